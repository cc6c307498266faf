"""Engines that know nothing of prepared folders name the unknown quantisation method."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from aiter_prep.execution import execute
from aiter_prep.plan import make_plan
from aiter_prep.storage.checkpoint import open_checkpoint
from conformance.engine_run import Environment
from conformance.layer_run import SOURCES

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm refusals")]


def said_by_sglang(environment: Environment, out: Path, folders: Sequence[Path]) -> list[str]:
    """What SGLang's own configuration says of folders."""
    command: list[object] = [environment.python, "-m", "conformance.sglang_lookup", out, *folders]
    command += ["--engine", environment.folder / SOURCES["sglang"], "--aiter", environment.aiter]
    variables = environment.variables({"HF_HUB_OFFLINE": "1", "TMPDIR": str(out.parent)})
    words = [str(word) for word in command]
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
    assert out.exists(), (done.stdout + done.stderr)[-6000:]
    found: list[str] = json.loads(out.read_text())
    return found


def test_sglang_names_the_method_that_it_does_not_know(
    environment: Environment, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    source, prepared = checkpoint("fp8_block"), tmp_path / "prepared"
    execute(make_plan(open_checkpoint(source), target="sglang", tp=2), prepared)
    refused, known = said_by_sglang(environment, tmp_path / "said.json", [prepared, source])
    assert refused.startswith("ValueError: Unknown quantization method: aiter_prep")
    # the source passes the same look-up, so it is the method that SGLang stumbles over
    assert known == "known: fp8"
