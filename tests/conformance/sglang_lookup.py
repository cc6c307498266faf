"""Asks SGLang's own model configuration what folders are, and writes down what it said of each.

Runs inside the conformance environment: `python -m conformance.sglang_lookup OUT FOLDER... --engine
SOURCES --aiter SOURCES`; OUT gets a JSON list. The look-up of the quantisation method is SGLang's
own, over its own table of methods; what its modules import and a look-up never calls is stood in
for, as in `sglang_dump`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from conformance.engine_stubs import import_engine, install
from conformance.sglang_dump import KERNELS

KNOWN = "known"


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="sglang_lookup")
    parser.add_argument("out", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    for name in ("--engine", "--aiter"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    os.environ["SGLANG_USE_AITER"] = "1"
    sys.path.insert(0, str(options.engine))
    stubs = install(options.aiter, "gfx950", KERNELS)
    (config,) = import_engine(stubs, "sglang.srt.configs.model_config")
    options.out.write_text(json.dumps([said_of(folder, config) for folder in options.folders]))


def said_of(folder: Path, config: Any) -> str:
    """What the configuration of a folder's model says of its quantisation method."""
    try:
        return f"{KNOWN}: {config.ModelConfig(model_path=str(folder)).quantization}"
    except ValueError as fault:
        return f"{type(fault).__name__}: {fault}"


if __name__ == "__main__":
    main()
