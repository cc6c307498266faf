"""A config whose sizes are not those of the tensors is refused where that is certain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny
from aiter_prep.errors import NoRule
from aiter_prep.inspection.source import inspect_source
from aiter_prep.plan import make_plan
from aiter_prep.storage.checkpoint import open_checkpoint
from support import FIXTURES, fixture


def source_with(folder: Path, config: dict[str, Any], *, without: str = "") -> Path:
    """Write a checkpoint with other values in its config, and without some tensors."""
    model = tiny.Model(config=config, layers=2)
    tensors = tiny.tensors_of(model)
    held = {name: tensor for name, tensor in tensors.items() if not without or without not in name}
    return tiny.write_tensors(folder / "source", model, held)


CERTAIN = [
    ({"num_hidden_layers": 5}, "`num_hidden_layers` is 5, but no tensor is of layer 2, 3, 4"),
    ({"num_hidden_layers": 40}, "no tensor is of layer 2, 3, 4, 5, 6 and 33 more"),
    ({"hidden_size": 1024}, "`hidden_size` is 1024, but `model.embed_tokens.weight` has rows of"),
    ({"moe_intermediate_size": 100}, "`moe_intermediate_size` is 100, but `model.layers.0.mlp"),
]


@pytest.mark.parametrize(("config", "message"), CERTAIN)
def test_a_size_that_no_tensor_has_is_refused_unless_the_tensors_are_trusted(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(source_with(tmp_path, config))
    with pytest.raises(NoRule) as caught:
        make_plan(checkpoint)
    assert message in caught.value.message
    assert "--trust-tensors" in caught.value.hint
    assert any(message in text for text in make_plan(checkpoint, trust_tensors=True).warnings)
    assert any(
        message in text and "--trust-tensors" in text
        for text in inspect_source(checkpoint).problems
    )


def test_sizes_in_a_text_config_are_compared_too(tmp_path: Path) -> None:
    config = {"text_config": {"num_hidden_layers": 5}, "num_hidden_layers": 2}
    with pytest.raises(NoRule, match="no tensor is of layer 2, 3, 4"):
        make_plan(open_checkpoint(source_with(tmp_path, config)))


def test_a_router_without_experts_tells_that_an_index_misses_them(tmp_path: Path) -> None:
    source = source_with(tmp_path, {}, without="layers.1.mlp.experts")
    with pytest.raises(NoRule, match=r"layers\.1\..*is a router, but layer 1 has no experts"):
        make_plan(open_checkpoint(source))


def test_a_layer_without_any_tensor_tells_that_an_index_misses_it(tmp_path: Path) -> None:
    source = source_with(tmp_path, {}, without="layers.1.")
    with pytest.raises(NoRule, match="no tensor is of layer 1"):
        make_plan(open_checkpoint(source))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": 1}, "`num_hidden_layers` is 1, but there are tensors of layer 1"),
        ({"first_k_dense_replace": 1}, "`first_k_dense_replace` is 1, but layer 0 has experts"),
    ],
)
def test_what_some_published_model_has_is_a_warning(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    plan = make_plan(open_checkpoint(source_with(tmp_path, config)))
    assert any(message in text for text in plan.warnings)


def test_draft_layers_beyond_the_last_are_no_reason_to_warn(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    assert make_plan(open_checkpoint(source_with(tmp_path, config))).warnings == ()


@pytest.mark.parametrize("name", FIXTURES)
def test_no_fixture_is_refused_or_warned_of(name: str) -> None:
    found = inspect_source(open_checkpoint(fixture(name)))
    assert not [text for text in found.warnings if "may not be of these" in text]
    assert json.loads((fixture(name) / "config.json").read_text("utf-8"))
