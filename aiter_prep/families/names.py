"""What checkpoints call the tensors of their routed experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiter_prep.errors import NoRule
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

GATE, UP, DOWN, GATE_UP = "gate", "up", "down", "gate_up"
WEIGHT, SCALE, BIAS, INPUT_SCALE = "weight", "weight_scale", "bias", "input_scale"


@dataclass(frozen=True, slots=True)
class Family:
    """One way to name and cut the tensors of an experts module.

    Attributes:
        name: What manifests call it.
        meaning: Who writes it.
        projections: Per-expert spelling of the projections, `<experts>.E.<key>.<suffix>`.
        fused: Tensors that hold all experts, `<experts>.<key>`: their projection and role.
        gate_up_rows: Order of the rows of a fused gate_up: `separated` or `interleaved_1`.
        split: How ranks share the intermediate size: a name of `sharding.SPLITS`.
        down_bias: Which ranks hold w2's bias: `every_rank` or `first_rank` (zero elsewhere).
    """

    name: str
    meaning: str
    projections: Mapping[str, str]
    fused: Mapping[str, tuple[str, str]]
    gate_up_rows: str = "separated"
    split: str = "equal_parts"
    down_bias: str = "every_rank"


# `<experts>.E.<projection>.<suffix>`: shared by every per-expert family
SUFFIXES: dict[str, str] = {
    "weight": WEIGHT,
    "weight_packed": WEIGHT,
    "weight_scale": SCALE,
    "weight_scale_inv": SCALE,
    "scale": SCALE,
    "input_scale": INPUT_SCALE,
}

_FAMILIES = (
    Family(
        name="gate_up_down",
        meaning="Qwen-MoE, DeepSeek-V2 to V3.2, GLM, Kimi-K2, and llm-compressor's Mixtral",
        projections={"gate_proj": GATE, "up_proj": UP, "down_proj": DOWN},
        fused={},
    ),
    Family(
        name="w1_w2_w3",
        meaning="Mixtral, MiniMax, DeepSeek-V4, Kimi-K3",
        projections={"w1": GATE, "w3": UP, "w2": DOWN},
        fused={},
    ),
    Family(
        name="gpt_oss",
        meaning="gpt-oss: all experts in one tensor, gate and up rows interleaved",
        projections={},
        fused={
            "gate_up_proj_blocks": (GATE_UP, WEIGHT),
            "gate_up_proj_scales": (GATE_UP, SCALE),
            "gate_up_proj_bias": (GATE_UP, BIAS),
            "down_proj_blocks": (DOWN, WEIGHT),
            "down_proj_scales": (DOWN, SCALE),
            "down_proj_bias": (DOWN, BIAS),
        },
        gate_up_rows="interleaved_1",
        split="whole_blocks",
        down_bias="first_rank",
    ),
)

FAMILIES: dict[str, Family] = {family.name: family for family in _FAMILIES}

_FAMILY_OF_PROJECTION = {key: family for family in _FAMILIES for key in family.projections}
_FAMILY_OF_FUSED = {key: family for family in _FAMILIES for key in family.fused}

_SEPARATOR = ".experts."
_PER_EXPERT_FIELDS = 3
MAX_DIGITS = 6


@dataclass(frozen=True, slots=True)
class ExpertName:
    """What the name of a routed-expert tensor says.

    Attributes:
        experts: Path of the module that holds the experts, `model.layers.3.mlp.experts`.
        expert: Global id, or None where one tensor holds all experts.
        family: The naming that it follows.
        projection: `gate`, `up`, `down` or `gate_up`.
        role: `weight`, `weight_scale`, `bias` or `input_scale`.
        suffix: The last part of the name, as spelled.
    """

    experts: str
    expert: int | None
    family: Family
    projection: str
    role: str
    suffix: str


def parse_expert_name(name: str) -> ExpertName | None:
    """Return what the name of a routed-expert tensor says, or None for any other tensor.

    Raises:
        NoRule: The tensor lies below an experts module, but no family names it so.
    """
    head, separator, tail = name.rpartition(_SEPARATOR)
    if separator:
        experts = head + ".experts"
    elif name.startswith("experts."):
        experts, tail = "experts", name[len("experts.") :]
    else:
        return None
    parsed = _parse_tail(experts, tail)
    if parsed is None:
        raise NoRule(
            f"tensor `{printable(name)}` lies below an experts module, but no family names a "
            "tensor so",
            "docs/adding-a-family.md says how to add one",
        )
    return parsed


def _parse_tail(experts: str, tail: str) -> ExpertName | None:
    fused = _FAMILY_OF_FUSED.get(tail)
    if fused is not None:
        projection, role = fused.fused[tail]
        return ExpertName(experts, None, fused, projection, role, tail)
    fields = tail.split(".")
    if len(fields) != _PER_EXPERT_FIELDS or not _is_number(fields[0]):
        return None
    family, role_of = _FAMILY_OF_PROJECTION.get(fields[1]), SUFFIXES.get(fields[2])
    if family is None or role_of is None:
        return None
    projection = family.projections[fields[1]]
    return ExpertName(experts, int(fields[0]), family, projection, role_of, fields[2])


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS and text == str(int(text))
