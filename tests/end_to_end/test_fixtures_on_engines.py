"""Every small checkpoint is converted for every engine and comes back, or is refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny
from aiter_prep.errors import NoRule
from aiter_prep.execution import execute
from aiter_prep.plan import make_plan
from aiter_prep.restoration import restore
from aiter_prep.storage.checkpoint import open_checkpoint
from aiter_prep.verification import verify
from support import FIXTURES, fixture

ENGINES = ("vllm", "sglang", "atom")
REFUSED = {
    ("qwen3_moe-ct-mxfp4", "vllm"): "Marlin",
    ("qwen3_moe-ct-mxfp4", "sglang"): "no kernel",
    ("qwen3_moe-ct-mxfp4", "atom"): "Kimi-K3 only",
    ("qwen3_moe-modelopt-fp8", "sglang"): "SGLang runs these",
    ("qwen3_moe-modelopt-fp8", "atom"): "bug of the engine",
    ("qwen3_moe-bf16", "sglang"): "320, not a multiple of 128",
    ("minimax_m3-mxfp8", "sglang"): "SGLang runs MXFP8 experts",
}
ONE_RANK = {("gpt_oss-mxfp4", "atom")}  # two would cut a block of its scales
LOSSY = ("qwen3_moe-modelopt-fp8",)  # gate and up come under one scale
RANKS = ("tp", "ep")


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips fsync: what a crash leaves behind is the subject of other tests."""
    monkeypatch.setattr("os.fsync", lambda _descriptor: None)


@pytest.mark.parametrize("shared_by", RANKS)
@pytest.mark.parametrize("target", ENGINES)
@pytest.mark.parametrize("name", FIXTURES)
def test_a_small_checkpoint_becomes_what_an_engine_holds_and_comes_back(
    name: str, target: str, shared_by: str, tmp_path: Path
) -> None:
    source = open_checkpoint(fixture(name))
    ranks = 1 if (name, target) in ONE_RANK and shared_by == "tp" else 2
    if reason := REFUSED.get((name, target)):
        with pytest.raises(NoRule, match=reason):
            make_plan(source, target=target, **{shared_by: 1})  # type: ignore[arg-type]
        return
    plan = make_plan(source, target=target, **{shared_by: ranks})  # type: ignore[arg-type]
    manifest = execute(plan, tmp_path / "out")
    assert verify(tmp_path / "out", source=source).problems == ()
    assert bool(manifest.lossy) == (name in LOSSY)
    if name in LOSSY:
        with pytest.raises(NoRule):
            restore(tmp_path / "out", tmp_path / "back")
        return
    restore(tmp_path / "out", tmp_path / "back")
    assert tiny.read_folder(tmp_path / "back") == tiny.read_folder(fixture(name))
