"""Damages prepared folders in thousands of ways; `verify` must find each."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import mutations
import turns
from aiter_prep.storage.checkpoint import Checkpoint, open_checkpoint
from mutations import Mutation
from prepared import small

KINDS = ("mxfp4_quark", "fp8_block_f32", "mxfp4_gpt_oss")
# Facts about the making of a folder, which no byte of it or of its source depends on: a digest
# that fits can vouch for any of them. A signature over the manifest covers these, too.
FREE = ("created_by.", "source.", "options.")


def main() -> int:
    """Run the whole test; return 1 if anything was not found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bits", nargs="?", type=int, default=10_000)
    turns.add_argument(parser)
    options = parser.parse_args()
    rng = random.Random(2026)  # noqa: S311 - no secret
    lost = 0
    with tempfile.TemporaryDirectory(prefix="aiter-prep-mutation-") as place:
        for kind in KINDS:
            sizes = {"hidden": 128, "intermediate": 128} if "block" in kind else {}
            source, folder = small(Path(place) / kind, kind, tp=1 if sizes else 2, **sizes)
            checkpoint = open_checkpoint(source)
            share = options.bits // len(KINDS) + options.bits % len(KINDS) * (kind == KINDS[0])
            every = {
                "bits": mutations.bit_flips(folder, share, rng),
                "files": mutations.of_files(folder, rng),
            }
            for fits in (False, True):
                how = "digests that fit" if fits else "old digests"
                every[f"tensors swapped, {how}"] = mutations.of_tensors(folder, fits=fits)
                every[f"manifest edited, {how}"] = mutations.of_manifest(folder, fits=fits)
            for what, some in every.items():
                lost += _run(f"{kind}: {what}", folder, checkpoint, options.turn.of(some))
    return 1 if lost else 0


def _run(what: str, folder: Path, source: Checkpoint, every: Iterable[Mutation]) -> int:
    begin = time.monotonic()
    found = alike = free = 0
    lost: list[str] = []
    for mutation in every:
        try:
            if mutations.is_found(folder, mutation, source):
                found += 1
            elif mutation.fits and _is_free(mutation.what):
                free += 1
            else:
                lost.append(mutation.what)
        except mutations.Alike:  # noqa: PERF203 - rare
            alike += 1
    rest = f", {alike} without a difference" if alike else ""
    rest += f", {free} facts that only a signature covers" if free else ""
    sys.stdout.write(
        f"{what}: {found} of {found + len(lost)} found{rest}, {time.monotonic() - begin:.0f} s\n"
    )
    for one in lost:
        sys.stdout.write(f"  NOT FOUND: {one}\n")
    return len(lost)


def _is_free(what: str) -> bool:
    return what.startswith(FREE)


if __name__ == "__main__":
    sys.exit(main())
