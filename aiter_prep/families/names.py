"""What checkpoints call the tensors of their routed experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from aiter_prep.errors import NoRule
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

GATE, UP, DOWN, GATE_UP = "gate", "up", "down", "gate_up"
WEIGHT, SCALE, SCALE_2 = "weight", "weight_scale", "weight_scale_2"
BIAS, INPUT_SCALE, SHAPE = "bias", "input_scale", "weight_shape"


@dataclass(frozen=True, slots=True)
class Family:
    """One way to name and cut the tensors of an experts module.

    Attributes:
        name: What manifests call it.
        meaning: Who writes it.
        projections: Per-expert spelling of the projections, `<experts>.E.<key>.<suffix>`.
        fused: Tensors that hold all experts, `<experts>.<key>`: their projection and role.
        model_types: `model_type` of the configs that use it; empty for any.
        gate_up_rows: Order of the rows of a fused gate_up: `separated` or `interleaved_1`.
        transposed: Expert matrices are stored `[columns, rows]`.
        split: How ranks share the intermediate size: a name of `sharding.SPLITS`.
        down_bias: Which ranks hold w2's bias: `every_rank` or `first_rank` (zero elsewhere).
    """

    name: str
    meaning: str
    projections: Mapping[str, str]
    fused: Mapping[str, tuple[str, str]]
    model_types: frozenset[str] = frozenset()
    gate_up_rows: str = "separated"
    transposed: bool = False
    split: str = "equal_parts"
    down_bias: str = "every_rank"

    @property
    def has_gate_up(self) -> bool:
        """Whether gate and up lie in one tensor."""
        values = [
            *self.projections.values(),
            *(projection for projection, _ in self.fused.values()),
        ]
        return GATE_UP in values


# `<experts>.E.<projection>.<suffix>`: shared by every per-expert family
SUFFIXES: dict[str, str] = {
    "weight": WEIGHT,
    "weight_packed": WEIGHT,
    "weight_scale": SCALE,
    "weight_scale_inv": SCALE,
    "scale": SCALE,
    "weight_scale_2": SCALE_2,
    "input_scale": INPUT_SCALE,
    "weight_shape": SHAPE,
    "bias": BIAS,
}

_FUSED_PAIR = {"gate_up_proj": (GATE_UP, WEIGHT), "down_proj": (DOWN, WEIGHT)}

_FAMILIES = (
    Family(
        name="gate_up_down",
        meaning="Qwen-MoE, DeepSeek-V2 to V3.2, GLM, Kimi-K2, and llm-compressor's Mixtral",
        projections={"gate_proj": GATE, "up_proj": UP, "down_proj": DOWN},
        fused={},
    ),
    Family(
        name="w1_w2_w3",
        meaning="Mixtral, MiniMax, phimoe, DeepSeek-V4, Kimi-K3",
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
    Family(
        name="gpt_oss_per_expert",
        meaning="gpt-oss as Quark writes it: one gate_up tensor per expert, rows interleaved",
        projections={"gate_up_proj": GATE_UP, "down_proj": DOWN},
        fused={},
        model_types=frozenset({"gpt_oss"}),
        gate_up_rows="interleaved_1",
        split="whole_blocks",
        down_bias="first_rank",
    ),
    Family(
        name="fused_rows",
        meaning="Qwen3.5-MoE: all experts in one tensor, gate rows then up rows",
        projections={},
        fused=_FUSED_PAIR,
        model_types=frozenset({"qwen3_5_moe", "qwen3_5_moe_text"}),
    ),
    Family(
        name="fused_columns",
        meaning="Llama-4, Qwen3-VL-MoE: all experts in one tensor, transposed",
        projections={},
        fused=_FUSED_PAIR,
        model_types=frozenset({"llama4", "llama4_text", "qwen3_vl_moe", "qwen3_vl_moe_text"}),
        transposed=True,
    ),
)

FAMILIES: dict[str, Family] = {family.name: family for family in _FAMILIES}

_PROJECTION_KEYS = frozenset(key for family in _FAMILIES for key in family.projections)
_FUSED_KEYS = frozenset(key for family in _FAMILIES for key in family.fused)

_SEPARATOR = ".experts."
_PER_EXPERT_FIELDS = 3
MAX_DIGITS = 6


class ExpertName(NamedTuple):
    """What the name of a routed-expert tensor says.

    Attributes:
        experts: Path of the module that holds the experts, `model.layers.3.mlp.experts`.
        expert: Global id, or None where one tensor holds all experts.
        key: The projection as spelled, or the fused tensor's whole name.
        suffix: The last part of the name, as spelled.
    """

    experts: str
    expert: int | None
    key: str
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
    parsed = _parse_tail(tail)
    if parsed is None:
        raise NoRule(
            f"tensor `{printable(name)}` lies below an experts module, but no family names a "
            "tensor so",
            "docs/adding-a-family.md says how to add one",
        )
    return ExpertName(experts, *parsed)


def role_of(name: ExpertName) -> str:
    """Return what a tensor is to its expert: `weight`, `weight_scale`, `bias`, ..."""
    if name.expert is not None:
        return SUFFIXES[name.suffix]
    return next(family.fused[name.key][1] for family in _FAMILIES if name.key in family.fused)


def family_of(experts: str, names: Iterable[ExpertName], model_type: str) -> Family:
    """Return the one family that names an experts module so.

    Args:
        experts: Path of the module.
        names: Names of its tensors, at least one of each spelling.
        model_type: `model_type` of the config; it breaks ties.

    Raises:
        NoRule: No family does, or more than one.
    """
    fused = {name.key for name in names if name.expert is None}
    keys = {name.key for name in names if name.expert is not None}
    found = [
        family
        for family in _FAMILIES
        if fused <= family.fused.keys()
        and keys <= family.projections.keys()
        and (not family.model_types or model_type in family.model_types)
    ]
    if len(found) == 1:
        return found[0]
    spelled = ", ".join(sorted(printable(key) for key in fused | keys))
    raise NoRule(
        f"no one family names its experts as `{printable(experts)}` does: {spelled} in a model of "
        f"type {printable(model_type)}",
        "docs/adding-a-family.md says how to add one",
    )


@lru_cache(maxsize=16384)  # the layers of a model have their tails in common
def _parse_tail(tail: str) -> tuple[int | None, str, str] | None:
    """Return expert, key and suffix of a name that ends so."""
    if tail in _FUSED_KEYS:
        return None, tail, tail
    fields = tail.split(".")
    if len(fields) != _PER_EXPERT_FIELDS or not _is_number(fields[0]):
        return None
    if fields[1] not in _PROJECTION_KEYS or fields[2] not in SUFFIXES:
        return None
    return int(fields[0]), fields[1], fields[2]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS and text == str(int(text))
