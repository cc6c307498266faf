"""Writes a small prepared folder of every kind of tensor, to be kept for ever."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import tiny
from aiter_prep.execution import execute
from aiter_prep.manifest import FORMAT_VERSION
from aiter_prep.plan import make_plan
from aiter_prep.storage.checkpoint import open_checkpoint
from prepared import contents

HOME = Path(__file__).resolve().parents[1] / "tests" / "released"

# name, model, options of the plan: folded scales and padding, fused experts and biases, what a
# conversion lost, scales in other dtypes, whole experts, merges that cannot be undone, packed int4,
# gate and up interleaved by 16 and by 1. All forms and all layouts are among them.
CASES: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("mxfp4-tp2", {"kind": "mxfp4_quark", "hidden": 64, "intermediate": 64}, {"tp": 2}),
    ("gpt_oss-tp2", {"kind": "mxfp4_gpt_oss", "hidden": 64, "intermediate": 64}, {"tp": 2}),
    ("fp8_block-gfx942", {"kind": "fp8_block_f32"}, {"gfx": "gfx942"}),
    (
        "fp8_block_bf16-vllm-gfx942",
        {"kind": "fp8_block_bf16"},
        {"target": "vllm", "gfx": "gfx942"},
    ),
    ("bf16-ep2", {"kind": "bf16", "hidden": 32, "intermediate": 64}, {"ep": 2}),
    ("fp8_tensor", {"kind": "fp8_tensor", "hidden": 64, "intermediate": 64}, {}),
    (
        "int4-vllm",
        {"kind": "int4", "hidden": 128, "intermediate": 128},
        {"target": "vllm", "options": {"moe_backend": "flydsl"}},
    ),
    (
        "mxfp4_v4-vllm-tp2",
        {"kind": "mxfp4_v4", "hidden": 64, "intermediate": 64},
        {"target": "vllm", "tp": 2},
    ),
    (
        "mxfp4_v4-sglang-gfx1250",
        {"kind": "mxfp4_v4", "hidden": 128, "intermediate": 128, "experts": 2},
        {"target": "sglang", "gfx": "gfx1250"},
    ),
)


def main() -> int:
    """Write the folders, each with its source, and the SHA-256 of every file of both."""
    home = HOME / str(FORMAT_VERSION)
    if home.exists():
        sys.stderr.write(f"{home} is there already: a released folder is never changed\n")
        return 1
    with tempfile.TemporaryDirectory() as place:
        for name, model, options in CASES:
            source = tiny.write(Path(place) / name / "source", **model)
            (source / "tokenizer.json").write_text('{"tiny": true}', "utf-8")
            plan = make_plan(open_checkpoint(source, name=name), **options)
            execute(plan, Path(place) / name / "prepared", backend="cpu")
        sums = "".join(f"{digest}  {name}\n" for name, digest in contents(Path(place)).items())
        (Path(place) / "SHA256SUMS").write_text(sums, "utf-8")
        shutil.copytree(place, home)
    total = sum(path.stat().st_size for path in home.rglob("*") if path.is_file())
    sys.stdout.write(f"{home}: {len(CASES)} folders, {len(contents(home))} files, {total} bytes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
