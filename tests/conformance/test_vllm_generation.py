"""vLLM generates from a prepared folder, on a CPU, what it generates from the source.

CPU kernels know no layout of AITER's: a shim of these tests undoes it after our loader placed the
experts, and the controls show that everything the loader does is needed.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from aiter_prep.execution import execute
from aiter_prep.plan import make_plan
from aiter_prep.storage.checkpoint import open_checkpoint
from conformance import cpu_shim
from conformance.engine_run import Environment
from conformance.loader_site import installed, product_site, run_engine
from conformance.small_model import write_small_model

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm generation"), pytest.mark.torch]

Results = dict[str, Any]

MODES = {1: ("unshuffle", "none", "wrong_flag"), 2: ("unshuffle", "wrong_rank")}
CONTROLS = [(1, "none"), (1, "wrong_flag"), (2, "wrong_rank")]


@pytest.fixture(scope="module")
def results(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What was generated, by `<tp>-source` and `<tp>-<what the shim does>`."""
    base = tmp_path_factory.mktemp("generation")
    source = write_small_model(base / "source")
    jobs: list[dict[str, object]] = []
    for tp, modes in MODES.items():
        prepared = base / f"prepared-{tp}"
        execute(make_plan(open_checkpoint(source), target="vllm", tp=tp), prepared)
        stock = {"model": str(source), "load_format": "auto", "variables": {"VLLM_PLUGINS": ""}}
        jobs.append({**stock, "tp": tp, "out": str(base / f"{tp}-source.json")})
        ours = {"model": str(prepared), "load_format": "aiter_prep", "tp": tp}
        for mode in modes:
            variables = {cpu_shim.VARIABLE: mode}
            jobs.append({**ours, "variables": variables, "out": str(base / f"{tp}-{mode}.json")})
    (base / "jobs.json").write_text(json.dumps(jobs))
    sites = [
        product_site(base / "site"),
        installed(base / "shim", "shim", f"aiter_prep_shim = {cpu_shim.PLUGIN}"),
    ]
    where = Environment(environment.folder, "0.32")  # the one version with kernels for a CPU
    said = run_engine(where, sites, ["conformance.generate", base / "jobs.json"])
    found = {path.stem: json.loads(path.read_text()) for path in base.glob("*-*.json")}
    assert len(found) == len(jobs), said[-6000:]
    return found


def generated(results: Results, name: str) -> list[dict[str, Any]]:
    """The results of one job; what it failed with ends the test."""
    found = results[name]
    assert isinstance(found, list), found["failure"]
    return found


@pytest.mark.parametrize("tp", MODES)
def test_tokens_and_logprobs_equal_those_from_the_source(results: Results, tp: int) -> None:
    assert generated(results, f"{tp}-unshuffle") == generated(results, f"{tp}-source")


@pytest.mark.parametrize(("tp", "mode"), CONTROLS)
def test_bytes_in_the_wrong_place_give_other_tokens(results: Results, tp: int, mode: str) -> None:
    wrong, right = generated(results, f"{tp}-{mode}"), generated(results, f"{tp}-source")
    for prompt, expected in zip(wrong, right, strict=True):
        assert prompt["tokens"] != expected["tokens"]
