"""Writes the tiny checkpoints of the table in `paths`.

python -m conformance.make_checkpoints OUT [NAME...]
"""

from __future__ import annotations

import argparse
import functools
import sys
import zlib
from pathlib import Path

from conformance.checkpoint_models import Model
from conformance.checkpoint_schemes import SCHEMES
from conformance.checkpoint_values import Values, save_checkpoint
from conformance.paths import PATHS


@functools.lru_cache(maxsize=2)  # tests of one path follow each other
def model_of(name: str) -> Model:
    """The tensors and the config of the path `name`; the same name gives the same bytes."""
    path = PATHS[name]
    key = f"{path.build.__name__} {path.scheme} {path.sizes}"
    return path.build(Values(zlib.crc32(key.encode())), SCHEMES[path.scheme], path.sizes)


def make_checkpoint(name: str, folder: Path) -> None:
    """Writes the checkpoint of the path `name`."""
    tensors, config = model_of(name)
    save_checkpoint(folder, tensors, config, SCHEMES[PATHS[name].scheme].extra)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="make_checkpoints", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", help="all paths when none is named")
    options = parser.parse_args(arguments)
    for name in options.names or PATHS:
        make_checkpoint(name, options.out / name)
        sys.stdout.write(f"{name}\n")


if __name__ == "__main__":
    main()
