"""Loaders that do not know a prepared folder fail on it, loudly."""

from __future__ import annotations

from pathlib import Path

import pytest

import prepared
import tiny

pytestmark = pytest.mark.torch


def test_transformers_finds_no_weights_in_a_prepared_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    source = tiny.write(tmp_path / "source", kind="bf16", hidden=256, intermediate=512)
    prepared.prepare(source, tmp_path / "out", 2)
    config = transformers.Qwen3MoeConfig(
        num_hidden_layers=1, hidden_size=256, moe_intermediate_size=512, num_experts=4
    )
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path / "out", config=config)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert not names & {"model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"}
