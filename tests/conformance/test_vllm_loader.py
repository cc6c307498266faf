"""vLLM holds after our loader what it holds after its own, and no shuffle ran on the way."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aiter_prep.errors import AiterPrepError
from aiter_prep.execution import execute
from aiter_prep.plan import make_plan
from aiter_prep.storage.checkpoint import open_checkpoint
from conformance.engine_run import ENGINES, Environment
from conformance.loader_site import product_site, run_engine
from conformance.paths import PATHS, ConformancePath

MORE_RANKS = ("bf16_i352", "fp8_block_padded", "quark_mxfp4_i384", "gpt_oss_i288", "deepseek_v4")
"""Paths that are loaded for every number of ranks in their table, the others for one."""


ABSENT: dict[str, set[str]] = {
    "0.32": {
        "quark_mxfp8",  # the engine has no such experts
        # attention is quantised by a kernel of Triton while it loads
        "kimi_k3",
        "kimi_k3_e3",
        "kimi_k3_a16w4",
        "kimi_k3_a8w4",
    }
}
"""Paths whose source a version cannot load here."""

ALIKE = {
    "deepseek_v3_fp8_fused",  # as minimax_m3_mxfp8_fused
    "deepseek_v3_bf16_fused",
    "fp8_block_padded_gfx1250",  # as on gfx950
    "fp8_tensor_gfx1250",
    "ct_fp8_tensor_static_gfx942",
    "ct_fp8_tensor_static_gfx1250",
    "quark_fp8_block_aiter",  # as without --moe-backend
    "ct_fp8_block_aiter_gfx942",
    "ct_fp8_block_aiter_gfx1250",
    "gpt_oss_w4a4",  # as gpt_oss_quark_w4a4
}
"""Paths that are compared with the engine's own loading, and not loaded: others load alike."""

SINCE_33 = "are served from vLLM 0.33 on, this one is 0.32"
REFUSED = {
    (
        "0.32",
        "minimax_m3_mxfp8_fused",
    ): "the engine made room for torch.float8_e4m3fn [4, 512, 256]",
    ("0.32", "quark_int4_fp8"): SINCE_33,
    ("0.32", "quark_int4_fp8_gfx942"): SINCE_33,
    ("0.32", "ct_mxfp8"): SINCE_33,
    ("0.32", "ct_mxfp8_e3"): SINCE_33,
    ("0.32", "ct_mxfp8_gfx1250"): SINCE_33,
}
"""What our loader says to paths that a version prepares in another way than the target."""


def ranks_of(name: str) -> tuple[int, ...]:
    """The numbers of ranks for which a path is loaded."""
    tps = PATHS[name].tps
    return tps if name in MORE_RANKS else (2 if 2 in tps else tps[0],)


def in_one_process(version: str, name: str) -> tuple[pytest.MarkDecorator, ...]:
    """The marks of a test that needs the engine: xdist gives tests of one process to one worker."""
    group = f"loader {version} {PATHS[name].gfx}"
    return pytest.mark.vllm, pytest.mark.xdist_group(group)


PREPARED = [
    pytest.param(
        version, name, tp, id=f"{version}-{name}-tp{tp}", marks=in_one_process(version, name)
    )
    for version, name in itertools.product(sorted(ENGINES), PATHS)
    for tp in ranks_of(name)
    if not (PATHS[name].refused or name in ALIKE | ABSENT.get(version, set()))
]
CASES = [case for case in PREPARED if case.values[:2] not in REFUSED]
REFUSED_CASES = [case for case in PREPARED if case.values[:2] in REFUSED]

Loaded = Callable[[str, str, int], dict[str, Any]]


def options_of(path: ConformancePath) -> dict[str, Any]:
    """What `make_plan` is told, from the words on the command line."""
    words = list(path.convert)
    fuse = "--fuse-shared-experts" in words
    if fuse:
        words.remove("--fuse-shared-experts")
    pairs = zip(words[::2], words[1::2], strict=True)
    options = {flag.removeprefix("--").replace("-", "_"): value for flag, value in pairs}
    return {"fuse_shared_experts": fuse, "options": options}


def prepare(path: ConformancePath, source: Path, out: Path, tp: int) -> Path:
    """Prepares a checkpoint for this path; once."""
    if not (out / "aiter_prep.json").exists():
        ranks = {"ep" if path.expert_parallel else "tp": tp}
        arguments = {"target": "vllm", "gfx": path.gfx, **options_of(path), **ranks}
        execute(make_plan(open_checkpoint(source), **arguments), out)
    return out


@pytest.fixture(scope="session")
def loaded(
    request: pytest.FixtureRequest,
    environment: Environment,
    checkpoint: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Loaded:
    """What the engine said of a case; a process loads all chosen cases of a version and chip."""
    base = tmp_path_factory.mktemp("loaded")
    site = product_site(base / "site")
    chosen: dict[tuple[str, str], list[tuple[str, int]]] = defaultdict(list)
    for item in request.session.items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if {"version", "name", "tp"} <= set(parameters):
            version, name, tp = (parameters[key] for key in ("version", "name", "tp"))
            chosen[version, PATHS[name].gfx].append((name, tp))
    said: dict[tuple[str, str], str] = {}

    def jobs(version: str, cases: list[tuple[str, int]]) -> Iterator[dict[str, object]]:
        for name, tp in cases:
            with contextlib.suppress(AiterPrepError):  # the test of the case shows it
                yield job(version, name, tp)

    def job(version: str, name: str, tp: int) -> dict[str, object]:
        path, source = PATHS[name], checkpoint(name)
        return {
            "source": str(source),
            "prepared": str(prepare(path, source, base / f"{name}-tp{tp}", tp)),
            "out": str(base / version / f"{name}-tp{tp}"),
            "tp": tp,
            "engine_args": path.engine_args,
            "expert_parallel": path.expert_parallel,
            "variables": path.environment,
        }

    def result(version: str, name: str, tp: int) -> dict[str, Any]:
        group = version, PATHS[name].gfx
        if group not in said:
            listing = base / "jobs.json"
            listing.write_text(json.dumps(list(jobs(version, chosen[group]))))
            where = Environment(environment.folder, version)
            words = ["conformance.loader_check", listing, "--aiter", where.aiter]
            words += ["--gfx", group[1]]
            said[group] = run_engine(where, [site], words)
        file = base / version / f"{name}-tp{tp}" / "result.json"
        if not file.exists():
            job(version, name, tp)
        assert file.exists(), said[group][-6000:]
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    return result


@pytest.mark.parametrize(("version", "name", "tp"), CASES)
def test_vllm_holds_after_our_loader_what_it_holds_after_its_own(
    version: str, name: str, tp: int, loaded: Loaded
) -> None:
    result = loaded(version, name, tp)
    assert "failure" not in result, result["failure"]
    assert result["version"].startswith(f"{version}.")
    assert [rank["rank"] for rank in result["ranks"]] == list(range(tp))
    for rank in result["ranks"]:
        assert not rank["differences"], "\n".join(rank["differences"])
        assert rank["layers"], "no expert layer was compared"
        assert rank["tensors"]
        theirs, ours = rank["shuffles"]
        assert theirs["experts"] >= 2 * rank["layers"], "the spy missed shuffles of the engine"
        assert ours["experts"] == 0, "a shuffle of experts ran"
        assert ours["others"] == theirs["others"], "dense layers were treated in another way"


@pytest.mark.parametrize(("version", "name", "tp"), REFUSED_CASES)
def test_what_a_version_prepares_otherwise_is_refused(
    version: str, name: str, tp: int, loaded: Loaded
) -> None:
    failure = loaded(version, name, tp)["failure"]
    assert "EngineMismatch: " in failure
    assert REFUSED[version, name] in failure
