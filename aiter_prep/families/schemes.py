"""How checkpoints quantise their experts, told from dtypes, suffixes and shapes."""

from __future__ import annotations

from dataclasses import dataclass

E8M0_GROUP = 32
FP8_BLOCK = 128

FLOAT_SCALES = frozenset({"F32", "BF16", "F16"})
BYTE_SCALES = frozenset({"U8", "F8_E8M0"})


@dataclass(frozen=True, slots=True)
class Unit:
    """How much of a weight one element of a tensor stands for.

    Attributes:
        rows: Rows of the weight per row of the tensor; 0: the tensor has one row for all.
        columns: Columns of the weight per element of the tensor; 0: one element for all.
    """

    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Scheme:
    """One quantisation of expert weights.

    Attributes:
        name: What manifests and messages call it.
        weight_suffixes: Last parts of a weight's name.
        weight_dtypes: safetensors dtypes of a weight.
        weight_unit: Unit of a weight; two columns per element for packed fp4.
        scale_suffixes: Last parts of a scale's name; empty for none.
        scale_dtypes: safetensors dtypes of a scale.
        scale_unit: Unit of a scale.
        roles: Roles that its tensors may have.
        group: Columns of a weight that share what must not be cut; ranks cut at multiples of it.
    """

    name: str
    weight_suffixes: frozenset[str]
    weight_dtypes: frozenset[str]
    weight_unit: Unit
    scale_suffixes: frozenset[str] = frozenset()
    scale_dtypes: frozenset[str] = frozenset()
    scale_unit: Unit = Unit(0, 0)
    roles: frozenset[str] = frozenset({"weight", "weight_scale", "bias"})
    group: int = 1


# Sources: shared by the published checkpoints and their writers; docs/design.md names them.
SCHEMES: tuple[Scheme, ...] = (
    Scheme(
        name="bf16",
        weight_suffixes=frozenset({"weight", "gate_up_proj", "down_proj"}),
        weight_dtypes=frozenset({"BF16", "F16"}),
        weight_unit=Unit(1, 1),
        roles=frozenset({"weight", "bias"}),
    ),
    Scheme(
        name="fp8_block",
        weight_suffixes=frozenset({"weight"}),
        weight_dtypes=frozenset({"F8_E4M3"}),
        weight_unit=Unit(1, 1),
        scale_suffixes=frozenset({"weight_scale_inv", "weight_scale", "scale"}),
        scale_dtypes=FLOAT_SCALES,
        scale_unit=Unit(FP8_BLOCK, FP8_BLOCK),
        group=FP8_BLOCK,
    ),
    Scheme(
        name="fp8_channel",
        weight_suffixes=frozenset({"weight"}),
        weight_dtypes=frozenset({"F8_E4M3"}),
        weight_unit=Unit(1, 1),
        scale_suffixes=frozenset({"weight_scale"}),
        scale_dtypes=FLOAT_SCALES,
        scale_unit=Unit(1, 0),
    ),
    Scheme(
        name="fp8_tensor",
        weight_suffixes=frozenset({"weight"}),
        weight_dtypes=frozenset({"F8_E4M3"}),
        weight_unit=Unit(1, 1),
        scale_suffixes=frozenset({"weight_scale"}),
        scale_dtypes=FLOAT_SCALES,
        scale_unit=Unit(0, 0),
        roles=frozenset({"weight", "weight_scale", "bias", "input_scale"}),
    ),
    Scheme(  # Quark: int4 values under one FP8 scale a tensor and one factor a row
        name="int4_fp8",
        weight_suffixes=frozenset({"weight"}),
        weight_dtypes=frozenset({"I32"}),
        weight_unit=Unit(1, 8),
        scale_suffixes=frozenset({"weight_scale"}),
        scale_dtypes=frozenset({"F32"}),
        scale_unit=Unit(0, 0),
        roles=frozenset({"weight", "weight_scale", "weight_scale_2"}),
        group=8,
    ),
    Scheme(  # compressed-tensors pack-quantized, symmetric
        name="int4",
        weight_suffixes=frozenset({"weight_packed"}),
        weight_dtypes=frozenset({"I32"}),
        weight_unit=Unit(1, 8),
        scale_suffixes=frozenset({"weight_scale"}),
        scale_dtypes=FLOAT_SCALES,
        scale_unit=Unit(1, E8M0_GROUP),
        group=E8M0_GROUP,
    ),
    Scheme(
        name="mxfp8",
        weight_suffixes=frozenset({"weight"}),
        weight_dtypes=frozenset({"F8_E4M3"}),
        weight_unit=Unit(1, 1),
        scale_suffixes=frozenset({"weight_scale_inv", "weight_scale"}),
        scale_dtypes=BYTE_SCALES,
        scale_unit=Unit(1, E8M0_GROUP),
        group=E8M0_GROUP,
    ),
    Scheme(  # Quark, compressed-tensors, gpt-oss
        name="mxfp4",
        weight_suffixes=frozenset(
            {"weight", "weight_packed", "gate_up_proj_blocks", "down_proj_blocks"}
        ),
        weight_dtypes=frozenset({"U8"}),
        weight_unit=Unit(1, 2),
        scale_suffixes=frozenset({"weight_scale", "gate_up_proj_scales", "down_proj_scales"}),
        scale_dtypes=BYTE_SCALES,
        scale_unit=Unit(1, E8M0_GROUP),
        roles=frozenset({"weight", "weight_scale", "bias", "input_scale"}),
        group=E8M0_GROUP,
    ),
    Scheme(  # DeepSeek-V4: I8 is packed fp4; with `.weight_scale` beside it, it would be int8
        name="mxfp4",
        weight_suffixes=frozenset({"weight"}),
        weight_dtypes=frozenset({"I8"}),
        weight_unit=Unit(1, 2),
        scale_suffixes=frozenset({"scale"}),
        scale_dtypes=frozenset({"F8_E8M0"}),
        scale_unit=Unit(1, E8M0_GROUP),
        group=E8M0_GROUP,
    ),
)


def matches(unit: Unit, shape: tuple[int, ...], rows: int, columns: int) -> bool:
    """Return whether a scale of this shape belongs to a weight of `[rows, columns]`.

    A per-channel scale is `[rows]` or `[rows, 1]`, a per-tensor one `[]` or `[1]`.
    """
    if not unit.rows:
        return shape in ((), (1,))
    if not unit.columns:
        return shape in ((rows,), (rows, 1))
    return shape == (-(-rows // unit.rows), -(-columns // unit.columns))
