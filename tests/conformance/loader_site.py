"""The product, installed where the engine's interpreter finds it with its entry point."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import aiter_prep
from conformance.engine_run import Environment

ENTRY_POINT = "aiter_prep = aiter_prep.engines.vllm.plugin:register"


def installed(folder: Path, name: str, entry_point: str) -> Path:
    """Writes what an installer would write of a plugin of vLLM; returns the folder for the path."""
    facts = folder / f"{name.replace('-', '_')}-0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (facts / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entry_point}\n")
    return folder


def product_site(folder: Path) -> Path:
    """A folder with the product that is under test, and its entry point."""
    installed(folder, "aiter-prep", ENTRY_POINT)
    (folder / "aiter_prep").symlink_to(Path(aiter_prep.__file__).parent)
    return folder


def run_engine(
    environment: Environment, sites: Sequence[Path], words: Sequence[object], **variables: str
) -> str:
    """Runs a module in the engine's environment; returns all that it printed."""
    seen = environment.variables(variables)
    seen["PYTHONPATH"] = os.pathsep.join([seen["PYTHONPATH"], *map(str, sites)])
    command = [str(word) for word in (environment.python, "-m", *words)]
    done = subprocess.run(command, env=seen, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr
