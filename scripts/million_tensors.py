"""Reads a checkpoint of a million tensors, and says how long it takes and how much memory."""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from aiter_prep.plan import make_plan
from aiter_prep.storage.checkpoint import INDEX_FILE, open_checkpoint
from aiter_prep.storage.shard import lay_out_shard

EXPERTS, SHARDS = 1024, 20
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def main() -> int:
    """Write headers over holes, open them, plan, and print what that took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tensors", nargs="?", type=int, default=1_000_000)
    layers = parser.parse_args().tensors // (EXPERTS * len(PROJECTIONS))
    with tempfile.TemporaryDirectory(prefix="aiter-prep-million-") as place:
        _write(Path(place), list(_names(layers)))
        begin, before = time.process_time(), _peak_mb()
        checkpoint = open_checkpoint(place)
        opened = time.process_time()
        plan = make_plan(checkpoint, tp=2)
        planned = time.process_time()
    sys.stdout.write(
        f"{len(checkpoint.tensors):,} tensors: opened in {opened - begin:.1f} s, planned in "
        f"{planned - opened:.1f} s ({len(plan.blocks)} modules), memory +{_peak_mb() - before} MB\n"
    )
    return 0


def _names(layers: int) -> Iterator[str]:
    for layer in range(layers):
        for expert in range(EXPERTS):
            for projection in PROJECTIONS:
                yield f"model.layers.{layer}.mlp.experts.{expert}.{projection}.weight"


def _write(folder: Path, names: list[str]) -> None:
    weight_map: dict[str, str] = {}
    step = -(-len(names) // SHARDS)
    for number in range(SHARDS):
        file = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
        part = names[number * step : (number + 1) * step]
        layout = lay_out_shard(file, ((name, "BF16", (64, 64)) for name in part), {"format": "pt"})
        with (folder / file).open("wb") as shard:
            shard.write(layout.header)
            shard.truncate(layout.total_bytes)  # a hole: the data takes no room
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "qwen3_moe"}')


def _peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


if __name__ == "__main__":
    sys.exit(main())
