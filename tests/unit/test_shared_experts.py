"""`--fuse-shared-experts`: a shared expert becomes the last expert of every rank, or is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tiny_families
from aiter_prep.errors import InvalidUsage, NoRule
from aiter_prep.execution import execute
from aiter_prep.plan import Plan, make_plan
from aiter_prep.restoration import restore
from aiter_prep.storage.checkpoint import open_checkpoint
from aiter_prep.verification import verify
from families_table import model
from oracle import read_safetensors
from tiny_families import Experts, Family

LAYER = "model.layers.1.mlp"
INTER, HIDDEN = 128, 256
Shapes = dict[str, tuple[str, tuple[int, ...]]]


def shared(dtype: str = "BF16", wider: int = 1) -> Shapes:
    """Name the shared expert's tensors; several experts lie side by side in wider ones."""
    shapes = {
        "gate_proj": (INTER * wider, HIDDEN),
        "up_proj": (INTER * wider, HIDDEN),
        "down_proj": (HIDDEN, INTER * wider),
    }
    return {f"{LAYER}.shared_experts.{n}.weight": (dtype, s) for n, s in shapes.items()}


def deepseek(common: Shapes) -> Family:
    return Family(
        model("deepseek_v3", "n_routed_experts"),
        (Experts(f"{LAYER}.experts", "bf16"),),
        common=common,
        hidden=HIDDEN,
        intermediate=INTER,
    )


def write(folder: Path, common: Shapes) -> Path:
    return tiny_families.write(folder, "shared experts", deepseek(common))


def planned(source: Path, **more: object) -> Plan:
    options = {"target": "vllm", "tp": 2, "fuse_shared_experts": True, **more}
    return make_plan(open_checkpoint(source), **options)  # type: ignore[arg-type]


def renamed_to_a_fifth_expert(source: Path) -> None:
    """Make the shared expert of a checkpoint one more routed one, byte for byte."""
    file = source / "model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header = {k.replace(".shared_experts.", ".experts.4."): v for k, v in header.items()}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"n_routed_experts": 5}))


def test_a_fused_shared_expert_is_stored_as_one_more_routed_expert(tmp_path: Path) -> None:
    source = write(tmp_path / "source", shared())
    execute(planned(source), tmp_path / "fused")
    routed = write(tmp_path / "routed", shared())
    renamed_to_a_fifth_expert(routed)
    execute(planned(routed, fuse_shared_experts=False), tmp_path / "five")
    for rank in range(2):
        name = f"model-rank-{rank}-part-0.safetensors"
        fused, five = (read_safetensors(tmp_path / f / name) for f in ("fused", "five"))
        assert fused.keys() == five.keys()
        assert {k: (t.shape, t.data) for k, t in fused.items()} == {
            k: (t.shape, t.data) for k, t in five.items()
        }


def test_a_fused_shared_expert_comes_back_under_its_own_name(tmp_path: Path) -> None:
    source = write(tmp_path / "source", shared())
    execute(planned(source), tmp_path / "fused")
    assert verify(tmp_path / "fused", source=open_checkpoint(source)).is_clean
    restore(tmp_path / "fused", tmp_path / "back")
    there = read_safetensors(source / "model.safetensors")
    back: dict[str, object] = {}
    for file in (tmp_path / "back").glob("*.safetensors"):
        back |= read_safetensors(file)
    assert back == there


@pytest.mark.parametrize(
    ("common", "said"),
    [
        ({}, "has no shared expert beside it"),
        (shared(wider=2), "2 shared experts in one tensor"),
        (shared("F32"), "differs from its shared expert"),
        (shared() | {f"{LAYER}.shared_experts.gate_proj.bias": ("BF16", (INTER,))}, "no part like"),
    ],
)
def test_what_cannot_be_one_more_expert_is_refused(
    tmp_path: Path, common: Shapes, said: str
) -> None:
    source = write(tmp_path / "source", common)
    with pytest.raises(NoRule, match=said) as caught:
        planned(source)
    assert "leave --fuse-shared-experts away" in caught.value.hint


def test_shared_experts_are_not_fused_with_expert_parallel(tmp_path: Path) -> None:
    source = write(tmp_path / "source", shared())
    with pytest.raises(InvalidUsage, match="exclude each other"):
        planned(source, tp=1, ep=2)


def test_without_the_option_the_shared_expert_stays_apart(tmp_path: Path) -> None:
    source = write(tmp_path / "source", shared())
    manifest = execute(planned(source, fuse_shared_experts=False), tmp_path / "out")
    common = {record.name for record in manifest.tensors if record.rank is None}
    assert common >= set(shared())
