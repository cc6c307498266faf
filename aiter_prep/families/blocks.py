"""Groups the tensors of a checkpoint into experts modules, and checks that each is whole."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from aiter_prep.errors import BadSource, NoRule
from aiter_prep.families.inputs import inputs_of
from aiter_prep.families.names import (
    BIAS,
    DOWN,
    GATE,
    GATE_UP,
    INPUT_SCALE,
    SCALE,
    SCALE_2,
    SUFFIXES,
    UP,
    WEIGHT,
    ExpertName,
    Family,
    family_of,
)
from aiter_prep.families.schemes import SCHEMES, Scheme, matches
from aiter_prep.storage import jsontext
from aiter_prep.storage.dtypes import width_of
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from aiter_prep.storage.header import TensorInfo

    _Spelled = dict[int | None, TensorInfo]

MATRIX_AXES = 2
EXPERT_COUNT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts")


@dataclass(frozen=True, slots=True)
class Part:
    """The tensors of one projection in one role, over all experts of a module.

    Attributes:
        projection: `gate`, `up`, `down` or `gate_up`.
        role: `weight`, `weight_scale`, `bias` or `input_scale`.
        suffix: Last part of the name, as spelled.
        pattern: The names, with `{expert}` for the id.
        fused: One tensor holds all experts.
        tensors: One per expert in the order of ids, or the one that holds all.
        rows: Rows of one expert's matrix, rows being what the projection puts out.
        columns: Elements in a row of it.
        transposed: The matrix lies `[columns, rows]` in the file.
        shared: Name of the tensor that stands last, where a shared expert was appended.
    """

    projection: str
    role: str
    suffix: str
    pattern: str
    fused: bool
    tensors: tuple[TensorInfo, ...]
    rows: int
    columns: int
    transposed: bool = False
    shared: str | None = None

    @property
    def dtype(self) -> str:
        """Dtype of every tensor, by its safetensors name."""
        return self.tensors[0].dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.columns * width_of(self.dtype)


@dataclass(frozen=True, slots=True)
class ExpertBlock:
    """One module of routed experts: a layer's, or an MTP block's.

    Attributes:
        experts: Path of the module.
        family: How it names its tensors.
        scheme: How its weights are quantised.
        num_experts: Routed experts, and a shared one where it was appended.
        hidden: Hidden size, in elements.
        intermediate: Intermediate size of one expert, in elements.
        parts: Its tensors, by (projection, role).
        inputs: What the config says of its inputs, as `inputs.inputs_of` calls it.
    """

    experts: str
    family: Family
    scheme: Scheme
    num_experts: int
    hidden: int
    intermediate: int
    parts: Mapping[tuple[str, str], Part]
    inputs: str = "bf16"

    @property
    def total_bytes(self) -> int:
        """Bytes of all its source tensors."""
        return sum(t.total_bytes for part in self.parts.values() for t in part.tensors)


class _Module:
    """The tensors of one experts module, by spelling of projection and suffix, then by expert."""

    def __init__(self, experts: str, found: Mapping[tuple[str, str], _Spelled]) -> None:
        self._experts = experts
        self._found = found
        self._names = {
            key: ExpertName(experts, next(iter(tensors)), *key) for key, tensors in found.items()
        }

    def block(self, expected_experts: frozenset[int], model_type: str) -> ExpertBlock:
        """Return the module, checked.

        Args:
            expected_experts: Numbers of experts that the config allows; empty for any.
            model_type: `model_type` of the config.

        Raises:
            BadSource: A tensor is missing or has another shape than its siblings.
            NoRule: No family or no scheme describes the module.
        """
        family = family_of(self._experts, self._names.values(), model_type)
        count = self._expert_count(expected_experts)
        parts: dict[tuple[str, str], Part] = {}
        for key in self._found:
            part = self._part(key, count, family)
            other = parts.setdefault((part.projection, part.role), part)
            if other is not part:
                raise NoRule(
                    f"`{printable(self._experts)}` mixes two spellings: "
                    f"`{printable(part.pattern)}` and `{printable(other.pattern)}`"
                )
        self._check_projections(family, parts)
        stored_hidden, intermediate = _sizes(parts)
        scheme = _scheme(self._experts, parts)
        hidden = stored_hidden * scheme.weight_unit.columns
        if not (count and hidden and intermediate):
            raise BadSource(
                f"`{printable(self._experts)}` has {count} experts of {hidden} x {intermediate}"
            )
        block = ExpertBlock(self._experts, family, scheme, count, hidden, intermediate, parts)
        _check_shapes(block)
        if set(self._experts) & set("{}"):
            raise NoRule(
                f"`{printable(self._experts)}` has a brace in its path, which manifests keep for "
                "the number of an expert",
                "rename the tensors of this module",
            )
        return block

    def _expert_count(self, expected: frozenset[int]) -> int:
        ids = set().union(*self._found.values())
        if None in ids:
            counts = {next(iter(t.values())).shape[:1] for t in self._found.values()}
            if len(counts) != 1 or counts == {()}:
                raise BadSource(f"the tensors of `{printable(self._experts)}` disagree on experts")
            count = int(counts.pop()[0])
        else:
            count = self._listed_experts({e for e in ids if e is not None}, expected)
        if expected and count not in expected:
            raise BadSource(
                f"`{printable(self._experts)}` holds {count} experts, the config says "
                f"{' or '.join(map(jsontext.shown, sorted(expected)))}"
            )
        return count

    def _listed_experts(self, held: set[int], expected: frozenset[int]) -> int:
        """Return the number of experts where each has tensors of its own."""
        count = max(held) + 1
        wanted = count if count in expected else max(count, *expected, 0)
        missing = wanted - len(held)  # a config may want 10^18
        if missing:
            first = next(expert for expert in range(wanted) if expert not in held)
            raise BadSource(
                f"`{printable(self._experts)}` lacks expert {first} "
                f"({jsontext.shown(missing)} missing of {jsontext.shown(wanted)})",
                "finish the download",
            )
        return count

    def _part(self, key: tuple[str, str], count: int, family: Family) -> Part:
        name, found = self._names[key], self._found[key]
        fused = name.expert is None
        projection, role = (
            family.fused[name.key]
            if fused
            else (family.projections[name.key], SUFFIXES[name.suffix])
        )
        if not fused and len(found) != count:
            lost = next(expert for expert in range(count) if expert not in found)
            example = self._pattern(key).replace("{expert}", str(lost))
            raise BadSource(f"tensor `{printable(example)}` is missing", "finish the download")
        tensors = tuple(found[expert] for expert in ((None,) if fused else range(count)))
        first = tensors[0]
        for tensor in tensors:
            if tensor.dtype != first.dtype or tensor.shape != first.shape:
                raise BadSource(
                    f"tensor `{printable(tensor.name)}` is {tensor.dtype} {list(tensor.shape)}, "
                    f"`{printable(first.name)}` is {first.dtype} {list(first.shape)}"
                )
        shape = first.shape[1:] if fused else first.shape
        if role == WEIGHT and not fused and len(shape) != MATRIX_AXES:
            raise BadSource(
                f"tensor `{printable(first.name)}` has {len(shape)} axes, a weight has two"
            )
        transposed = family.transposed and len(shape) == MATRIX_AXES
        if transposed:
            shape = shape[::-1]
        rows, columns = (shape[0] if shape else 1), prod(shape[1:])
        return Part(
            projection,
            role,
            name.suffix,
            self._pattern(key),
            fused,
            tensors,
            rows,
            columns,
            transposed,
        )

    def _pattern(self, key: tuple[str, str]) -> str:
        name = self._names[key]
        if name.expert is None:
            return f"{self._experts}.{name.key}"
        return f"{self._experts}.{{expert}}.{name.key}.{name.suffix}"

    def _check_projections(self, family: Family, parts: Mapping[tuple[str, str], Part]) -> None:
        needed = (GATE_UP, DOWN) if family.has_gate_up else (GATE, UP, DOWN)
        roles = {role for _, role in parts}
        for role in sorted(roles | {WEIGHT}):
            for projection in needed:
                if (projection, role) not in parts:
                    raise BadSource(
                        f"`{printable(self._experts)}` has no {role} of the {projection} "
                        "projection",
                        "finish the download",
                    )


def group_blocks(
    named: Iterable[tuple[ExpertName, TensorInfo]], config: Mapping[str, Any]
) -> Iterator[ExpertBlock]:
    """Yield the experts modules of a checkpoint, in the order of their layers.

    Raises:
        BadSource: A module lacks a tensor.
        NoRule: No scheme describes a module.
    """
    modules: dict[str, dict[tuple[str, str], _Spelled]] = defaultdict(lambda: defaultdict(dict))
    for (experts, expert, key, suffix), tensor in named:
        modules[experts][key, suffix][expert] = tensor
    expected = expert_counts(config)
    model_type = text_model_type(config)
    for experts in sorted(modules, key=natural_key):
        # an MTP block may have its own number of experts, as DeepSeek-V4.1's does
        is_mtp = "mtp" in experts.split(".")
        module = _Module(experts, modules[experts])
        block = module.block(frozenset() if is_mtp else expected, model_type)
        yield replace(block, inputs=inputs_of(config, experts))


def expert_counts(config: Mapping[str, Any]) -> frozenset[int]:
    """Return the numbers of routed experts that a config names."""
    holders = [config, config.get("text_config")]
    values = [h.get(key) for h in holders if isinstance(h, dict) for key in EXPERT_COUNT_KEYS]
    return frozenset(value for value in values if type(value) is int and value > 0)


def text_model_type(config: Mapping[str, Any]) -> str:
    """Return `model_type` of the language model: of `text_config` where there is one."""
    for holder in (config.get("text_config"), config):
        value = holder.get("model_type") if isinstance(holder, dict) else None
        if isinstance(value, str):
            return value
    return "unknown"


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key under which `layers.2` comes before `layers.10`."""
    return tuple(map(_field_key, name.split(".")))


def _field_key(field: str) -> tuple[int, int, str]:
    if not (field.isascii() and field.isdigit()):
        return (1, 0, field)
    digits = field.lstrip("0")  # more of them, a larger number: no need for one of 1,000 digits
    return (0, len(digits), digits)


def _sizes(parts: Mapping[tuple[str, str], Part]) -> tuple[int, int]:
    """Return the stored elements in a row of gate, and the intermediate size."""
    if (GATE_UP, WEIGHT) in parts:
        gate_up = parts[GATE_UP, WEIGHT]
        if gate_up.rows % 2:
            raise BadSource(f"`{printable(gate_up.pattern)}` has an odd number of rows")
        return gate_up.columns, gate_up.rows // 2
    gate = parts[GATE, WEIGHT]
    return gate.columns, gate.rows


def _scheme(experts: str, parts: Mapping[tuple[str, str], Part]) -> Scheme:
    projection = GATE_UP if (GATE_UP, WEIGHT) in parts else GATE
    weight, scale = parts[projection, WEIGHT], parts.get((projection, SCALE))
    found = [scheme for scheme in SCHEMES if _fits(scheme, weight, scale)]
    if len(found) != 1:
        raise NoRule(
            f"no quantisation scheme describes `{printable(weight.pattern)}`: "
            f"{_seen(weight)}{f' with {_seen(scale)}' if scale else ''}",
            f"known schemes: {', '.join(sorted({scheme.name for scheme in SCHEMES}))}",
        )
    for (_, role), part in parts.items():
        if role not in found[0].roles:
            raise NoRule(
                f"scheme {found[0].name} has no rule for `{printable(part.pattern)}` in "
                f"`{printable(experts)}`"
            )
    return found[0]


def _seen(part: Part) -> str:
    return f"{part.suffix} {part.dtype} {list(part.tensors[0].shape)}"


def _fits(scheme: Scheme, weight: Part, scale: Part | None) -> bool:
    if weight.suffix not in scheme.weight_suffixes or weight.dtype not in scheme.weight_dtypes:
        return False
    if scale is None:
        return not scheme.scale_suffixes
    if scale.suffix not in scheme.scale_suffixes or scale.dtype not in scheme.scale_dtypes:
        return False
    shape = scale.tensors[0].shape[1:] if scale.fused else scale.tensors[0].shape
    columns = weight.columns * scheme.weight_unit.columns
    return matches(scheme.scale_unit, shape, weight.rows, columns)


def _check_shapes(block: ExpertBlock) -> None:
    """Check every part's matrix against the hidden and intermediate sizes."""
    width = {GATE: block.intermediate, UP: block.intermediate, GATE_UP: 2 * block.intermediate}
    for (projection, role), part in block.parts.items():
        rows = width.get(projection, block.hidden)
        columns = block.intermediate if projection == DOWN else block.hidden
        if not _shape_fits(block.scheme, part, rows, columns):
            raise BadSource(
                f"`{printable(part.pattern)}` has shape {list(part.tensors[0].shape)}, which does "
                f"not fit {rows} x {columns} of {block.scheme.name}"
            )
        if part.dtype != block.parts[_sibling(block, projection), role].dtype:
            raise BadSource(f"`{printable(part.pattern)}` has another dtype than its siblings")


def _sibling(block: ExpertBlock, projection: str) -> str:
    return (
        projection
        if projection in (GATE_UP, GATE)
        else (GATE_UP if (GATE_UP, WEIGHT) in block.parts else GATE)
    )


def _shape_fits(scheme: Scheme, part: Part, rows: int, columns: int) -> bool:
    shape = part.tensors[0].shape[1:] if part.fused else part.tensors[0].shape
    if part.role == WEIGHT:
        return (part.rows, part.columns * scheme.weight_unit.columns) == (rows, columns)
    if part.role == BIAS:
        return shape == (rows,)
    if part.role == INPUT_SCALE:
        return shape in {(), (1,)}
    if part.role == SCALE_2:
        return shape == (rows,)
    return matches(scheme.scale_unit, shape, rows, columns)
