"""Converts a tiny checkpoint of every family for every target, and holds it to the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest

import oracle_engines
import oracle_recipes
import tiny_families
from aiter_prep.errors import NoRule
from aiter_prep.execution import execute
from aiter_prep.plan import make_plan
from aiter_prep.restoration import restore
from aiter_prep.storage.checkpoint import open_checkpoint
from aiter_prep.verification import verify
from families_table import FAMILIES
from oracle import Source, read_safetensors

TARGETS = ("aiter", "vllm", "sglang", "atom")
TP = 2
GFX942 = ("fp8_block", "fp8_channel", "fp8_tensor", "bf16")
CASES = [
    (name, target)
    for name, family in FAMILIES.items()
    for target in TARGETS
    if target not in family.refused
]
REFUSED = [(name, target) for name, family in FAMILIES.items() for target in sorted(family.refused)]


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips fsync: what a crash leaves behind is the subject of other tests."""
    monkeypatch.setattr("os.fsync", lambda _descriptor: None)


def check(
    folder: Path,
    name: str,
    target: str,
    gfx: str,
    recipes: dict[str, oracle_engines.Recipe] | None = None,
) -> None:
    """Convert, compare with the oracle, verify against the source, restore."""
    family = FAMILIES[name]
    source = tiny_families.write(folder / "source", name, family)
    checkpoint = open_checkpoint(source)
    options = family.options.get(target, {})
    plan = make_plan(checkpoint, tp=TP, target=target, gfx=gfx, options=options)
    manifest = execute(plan, folder / "out")
    known = recipes or oracle_recipes.recipes_for(target, family.special)
    wanted = oracle_engines.expected(source, known, TP, gfx)
    records = {(r.rank, r.name): r for r in manifest.tensors if r.rank is not None}
    assert records.keys() == wanted.keys()
    held: dict[tuple[int, str], Source] = {}
    for path in (folder / "out").glob("model-rank-*.safetensors"):
        rank = int(path.name.split("-")[2])
        held |= {(rank, key): tensor for key, tensor in read_safetensors(path).items()}
    for key, tensor in wanted.items():
        assert (held[key].dtype, held[key].shape) == (tensor.dtype, tensor.shape), key
        assert held[key].data == tensor.data, f"{key} has other bytes than the oracle"
        assert records[key].runtime_dtype == tensor.runtime_dtype, key
    assert verify(folder / "out", source=checkpoint).problems == ()
    if not manifest.lossy:
        restore(folder / "out", folder / "back")
        original = read_safetensors(source / "model.safetensors")
        back = [read_safetensors(path) for path in (folder / "back").glob("*.safetensors")]
        assert {key: tensor for shard in back for key, tensor in shard.items()} == original


@pytest.mark.parametrize(("name", "target"), CASES)
def test_each_family_becomes_what_the_oracle_says_and_comes_back(
    name: str, target: str, tmp_path: Path
) -> None:
    check(tmp_path, name, target, "gfx950")


@pytest.mark.parametrize(
    ("name", "target"),
    [
        (name, target)
        for name, target in CASES
        if all(module.scheme.startswith(GFX942) for module in FAMILIES[name].modules)
        and not (target == "vllm" and "modelopt" in name)
    ],
)
def test_each_family_becomes_what_the_oracle_says_on_gfx942(
    name: str, target: str, tmp_path: Path
) -> None:
    check(tmp_path, name, target, "gfx942")


@pytest.mark.parametrize(("target", "name"), sorted(oracle_recipes.GFX1250_RECIPES))
def test_fp4_and_fp8_experts_become_what_the_oracle_says_on_gfx1250(
    target: str, name: str, tmp_path: Path
) -> None:
    check(tmp_path, name, target, "gfx1250", oracle_recipes.GFX1250_RECIPES[target, name])


@pytest.mark.parametrize(("name", "target"), REFUSED)
def test_a_family_that_an_engine_does_not_serve_with_aiter_is_refused_with_a_reason(
    name: str, target: str, tmp_path: Path
) -> None:
    source = tiny_families.write(tmp_path / "source", name, FAMILIES[name])
    with pytest.raises(NoRule) as caught:
        make_plan(open_checkpoint(source), tp=TP, target=target)
    assert "has no rule for" not in caught.value.message
