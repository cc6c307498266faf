"""What a source checkpoint holds, told as far as it can be told."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiter_prep.errors import AiterPrepError, BadSource, InvalidUsage, NoRule
from aiter_prep.families.blocks import group_blocks
from aiter_prep.families.classify import contradictions
from aiter_prep.families.common import common_rule_of
from aiter_prep.families.names import SHAPE, ExpertName, parse_expert_name, role_of
from aiter_prep.families.sizes import mismatches
from aiter_prep.inspection.forecast import Module, forecasts_of
from aiter_prep.inspection.model import ExpertGroup, Outlook, expert_groups
from aiter_prep.plan.cut import workable_tp
from aiter_prep.plan.make import path_of, traits_for
from aiter_prep.plan.stacks import is_one_way
from aiter_prep.storage.collector import collector_paused
from aiter_prep.storage.folder import small_files
from aiter_prep.storage.jsontext import printable
from aiter_prep.targets.table import TARGETS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from aiter_prep.families.blocks import ExpertBlock
    from aiter_prep.families.sizes import Mismatch
    from aiter_prep.storage.checkpoint import Checkpoint
    from aiter_prep.storage.header import TensorInfo

FORECAST_TP = (1, 2, 4, 8, 16)

EXPERT_ROLES = {
    "weight": "expert_weights",
    "weight_scale": "expert_scales",
    "bias": "expert_biases",
    "input_scale": "expert_input_scales",
    "weight_scale_2": "expert_scales",
    "weight_shape": "expert_shapes",
}
# kinds of `families.common.COMMON_RULES`; the others are `other`
COMMON_ROLES = {
    "attention": "attention",
    "dense mlp": "dense",
    "embedding": "embeddings",
    "head": "embeddings",
    "router": "router",
    "router bias": "router",
    "shared expert": "shared_experts",
    "shared expert gate": "shared_experts",
}
OTHER, UNKNOWN = "other", "unknown"


@dataclass(frozen=True, slots=True)
class SourceInspection:
    """What a source checkpoint holds.

    Attributes:
        folder: Where it lies.
        name: Its name.
        architecture: First of `architectures` in its config.
        model_type: `model_type` of its config.
        shards: Number of shards.
        tensors: Number of tensors.
        total_bytes: Bytes of all tensors.
        groups: Its experts modules, grouped by scheme and sizes.
        roles: Role to bytes, largest first.
        outlooks: What each target and chip would make of it.
        problems: What would keep `convert` from starting.
        warnings: What a person should know, though `convert` would start.
    """

    folder: Path
    name: str
    architecture: str
    model_type: str
    shards: int
    tensors: int
    total_bytes: int
    groups: tuple[ExpertGroup, ...]
    roles: Mapping[str, int]
    outlooks: tuple[Outlook, ...]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return what it says as plain values."""
        return {"kind": "source", **asdict(self), "folder": str(self.folder)}


@collector_paused()
def inspect_source(checkpoint: Checkpoint) -> SourceInspection:
    """Tell what a checkpoint holds; what no rule knows is a problem in the result, not raised."""
    sorted_out = _sort(checkpoint)
    blocks, problems = _build(sorted_out, checkpoint)
    unlike = mismatches(checkpoint.config, blocks, sorted_out.common)
    return SourceInspection(
        folder=checkpoint.folder,
        name=checkpoint.name,
        architecture=checkpoint.architecture,
        model_type=checkpoint.model_type,
        shards=len(checkpoint.headers),
        tensors=len(checkpoint.tensors),
        total_bytes=checkpoint.total_bytes,
        groups=expert_groups(blocks),
        roles=dict(sorted(sorted_out.roles.items(), key=lambda item: (-item[1], item[0]))),
        outlooks=tuple(_outlooks(checkpoint, blocks, sorted_out.common)),
        problems=(
            *_unknown_problem(sorted_out.unknown),
            *problems,
            *_config_problems(checkpoint, blocks, unlike),
            *_link_problems(checkpoint),
        ),
        warnings=tuple(_warnings(checkpoint, unlike)),
    )


@dataclass(frozen=True, slots=True)
class _Sorted:
    """The tensors of a checkpoint: of which experts module, common, or unknown."""

    modules: Mapping[str, list[tuple[ExpertName, TensorInfo]]]
    common: list[TensorInfo]
    unknown: list[str]
    roles: Mapping[str, int]


def _sort(checkpoint: Checkpoint) -> _Sorted:
    modules: dict[str, list[tuple[ExpertName, TensorInfo]]] = defaultdict(list)
    common: list[TensorInfo] = []
    unknown: list[str] = []
    roles: dict[str, int] = defaultdict(int)
    for name, tensor in checkpoint.tensors.items():
        expert = _expert_name(name)
        if expert is not None:
            if expert.suffix == SHAPE:
                common.append(tensor)
            else:
                modules[expert.experts].append((expert, tensor))
            role = EXPERT_ROLES[role_of(expert)]
        elif (rule := common_rule_of(name)) is not None:
            common.append(tensor)
            role = COMMON_ROLES.get(rule.name, OTHER)
        else:
            unknown.append(name)
            role = UNKNOWN
        roles[role] += tensor.total_bytes
    return _Sorted(modules, common, unknown, roles)


def role_of_tensor(name: str) -> str:
    """Return what a tensor of a source is for: a key of `SourceInspection.roles`."""
    expert = _expert_name(name)
    if expert is not None:
        return EXPERT_ROLES[role_of(expert)]
    rule = common_rule_of(name)
    return UNKNOWN if rule is None else COMMON_ROLES.get(rule.name, OTHER)


def _expert_name(name: str) -> ExpertName | None:
    try:
        return parse_expert_name(name)
    except NoRule:
        return None


def _unknown_problem(names: Sequence[str]) -> Iterator[str]:
    if names:
        more = f" ({len(names)} such)" if len(names) > 1 else ""
        yield f"tensor `{printable(names[0])}` is known to no family{more}"


def _build(found: _Sorted, checkpoint: Checkpoint) -> tuple[list[ExpertBlock], list[str]]:
    """Build each experts module by itself, so that one that is broken hides no other."""
    blocks: list[ExpertBlock] = []
    faults: list[str] = []
    for named in found.modules.values():
        try:
            blocks.extend(group_blocks(named, checkpoint.config))
        except AiterPrepError as fault:  # noqa: PERF203 - a few modules
            faults.append(fault.message)
    problems = faults[:1]
    if len(faults) > 1:
        problems.append(f"{len(faults) - 1} more experts modules have such a fault")
    if not found.modules:
        problems.append("there are no routed experts, so there is nothing to prepare")
    return blocks, problems


def _config_problems(
    checkpoint: Checkpoint, blocks: Sequence[ExpertBlock], found: Sequence[Mismatch]
) -> Iterator[str]:
    """Yield what the config says of the tensors and what they are not, for certain."""
    promises = contradictions(checkpoint, blocks)
    if promises:
        yield (
            f"the config promises {promises[0].promised} for `{printable(promises[0].experts)}`, "
            f"but its tensors are {promises[0].found} ({len(promises)} such): `convert` asks for "
            "--trust-tensors"
        )
    for mismatch in found:
        if mismatch.is_certain:
            yield (
                f"the config is not of these tensors: {mismatch.what}: `convert` asks for "
                "--trust-tensors"
            )


def _link_problems(checkpoint: Checkpoint) -> Iterator[str]:
    try:
        small_files(checkpoint.folder)
    except BadSource as fault:
        yield fault.message


def _warnings(checkpoint: Checkpoint, found: Sequence[Mismatch]) -> Iterator[str]:
    for mismatch in found:
        if not mismatch.is_certain:
            yield f"the config may not be of these tensors: {mismatch.what}"
    if checkpoint.stray_files:
        first = printable(checkpoint.stray_files[0])
        yield f"{len(checkpoint.stray_files)} files that the index does not name, first `{first}`"
    if checkpoint.unindexed:
        first = printable(checkpoint.unindexed[0].name)
        yield f"{len(checkpoint.unindexed)} tensors that the index does not name, first `{first}`"


def _outlooks(
    checkpoint: Checkpoint, blocks: Sequence[ExpertBlock], common: Sequence[TensorInfo]
) -> Iterator[Outlook]:
    """Yield what each target on each chip would make of the experts modules."""
    seen: dict[tuple[object, ...], Outlook] = {}
    for target in TARGETS.values():
        for gfx in target.chips if blocks else ():
            try:
                traits = traits_for(checkpoint, gfx)
                modules = [(block, path_of(block, target, traits)) for block in blocks]
            except (NoRule, InvalidUsage) as fault:
                yield Outlook(target.name, gfx, refusal=fault.message)
                continue
            # chips that want the same of every module share one answer
            key = (len(gfx), target.name, *(id(path) for _, path in modules))
            if key not in seen:
                seen[key] = _outlook(target.name, gfx, modules, common)
            yield replace(seen[key], gfx=gfx)


def _outlook(
    target: str,
    gfx: str,
    modules: Sequence[Module],
    common: Sequence[TensorInfo],
) -> Outlook:
    sizes = workable_tp(modules)
    if not sizes:
        return Outlook(target, gfx, refusal="no tensor-parallel size from 1 to 64 works")
    try:
        tried = [tp for tp in FORECAST_TP if tp in sizes]
        forecasts = tuple(forecasts_of(modules, common, tried, target=target, gfx=gfx))
    except NoRule as fault:
        return Outlook(target, gfx, refusal=fault.message)
    one_way = any(is_one_way(block, path) for block, path in modules)
    return Outlook(target, gfx, sizes, forecasts, is_one_way=one_way)
