"""Makes a plan: from a checkpoint and a target to every byte's place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiter_prep.errors import InvalidUsage, NoRule
from aiter_prep.families.classify import Classified, classify, contradictions
from aiter_prep.families.sizes import mismatches
from aiter_prep.families.traits import traits_of
from aiter_prep.plan.cut import Cut, Parallel, cut_block
from aiter_prep.plan.shards import Shard, common_shards, rank_shards
from aiter_prep.plan.stacks import stacks_of
from aiter_prep.quantities import count
from aiter_prep.sharding import PLACEMENTS
from aiter_prep.storage.checkpoint import is_plain_name
from aiter_prep.storage.collector import collector_paused
from aiter_prep.storage.folder import small_files
from aiter_prep.storage.jsontext import printable
from aiter_prep.targets.model import DEFAULT, OPTIONS
from aiter_prep.targets.table import DEFAULT_TARGET, target_named

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from aiter_prep.families.blocks import ExpertBlock
    from aiter_prep.plan.steps import Stack
    from aiter_prep.storage.checkpoint import Checkpoint
    from aiter_prep.storage.header import TensorInfo
    from aiter_prep.targets.model import Target, WeightPath

DEFAULT_MAX_SHARD_BYTES = 5_000_000_000
MAX_RANKS = 4096


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """What becomes of one experts module.

    Attributes:
        block: The module in the source.
        path: What the target wants of it.
        cut: Its sizes on each rank.
        stacks: Its output tensors.
    """

    block: ExpertBlock
    path: WeightPath
    cut: Cut
    stacks: tuple[Stack, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that `execute` will do, decided.

    Attributes:
        checkpoint: The source.
        target: What the result is for.
        gfx: The chip.
        parallel: How the ranks share the experts.
        options: What chose between paths of the target, by name.
        ranks: The ranks whose shards are written.
        max_shard_bytes: Limit for a shard's data; only a single larger tensor exceeds it.
        as_common: Patterns of names that are copied, though no rule knows them.
        fuse_shared_experts: Whether shared experts were appended to the routed ones.
        trust_tensors: Whether a config that promises another scheme was passed over.
        blocks: Experts modules, in the order of their layers.
        common: Tensors that are copied as they are.
        skipped: Tensors that are left out: name and reason.
        shards: Output files; ranks first, then common.
        small_files: Files that are copied beside the shards.
        warnings: What a person should know before using the result.
    """

    checkpoint: Checkpoint
    target: Target
    gfx: str
    parallel: Parallel
    options: Mapping[str, str]
    ranks: tuple[int, ...]
    max_shard_bytes: int
    as_common: tuple[str, ...]
    trust_tensors: bool
    fuse_shared_experts: bool
    blocks: tuple[BlockPlan, ...]
    common: tuple[TensorInfo, ...]
    skipped: tuple[tuple[str, str], ...]
    shards: tuple[Shard, ...]
    small_files: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks."""
        return self.parallel.tp

    @property
    def total_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.layout.total_bytes for shard in self.shards)

    @property
    def is_complete(self) -> bool:
        """Whether the shards of every rank are written."""
        return len(self.ranks) == self.parallel.ranks


@collector_paused()
def make_plan(
    checkpoint: Checkpoint,
    *,
    tp: int = 1,
    ep: int = 1,
    placement: str = "linear",
    target: str = DEFAULT_TARGET,
    gfx: str | None = None,
    options: Mapping[str, str] | None = None,
    ranks: Sequence[int] | None = None,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    as_common: Sequence[str] = (),
    trust_tensors: bool = False,
    fuse_shared_experts: bool = False,
) -> Plan:
    """Decide every output tensor of a conversion.

    Args:
        checkpoint: The source, opened.
        tp: Number of tensor-parallel ranks.
        ep: Number of expert-parallel ranks; then `tp` is 1.
        placement: Which experts an expert-parallel rank holds: `linear` or `round_robin`.
        target: Name of a target, such as `aiter`.
        gfx: The chip; the target's first by default.
        options: What an engine's flags and environment decide, by the names of
            `targets.model.OPTIONS`; each has the engine's default.
        ranks: Ranks to write; all by default.
        max_shard_bytes: Limit for the data of a shard.
        as_common: Patterns of names that no rule knows but that are to be copied.
        fuse_shared_experts: Append each module's shared expert to its routed ones.
        trust_tensors: Go on where the config promises another scheme than the tensors have.

    Raises:
        NoRule: A tensor, dtype, size or combination that no table has an entry for.
        BadSource: An experts module lacks a tensor.
        InvalidUsage: A number is out of range.
    """
    found = target_named(target)
    parallel = _check_parallel(tp, ep, placement, found)
    chosen_ranks = _check_numbers(parallel, ranks, max_shard_bytes)
    chip = gfx or found.chips[0]
    found.check_chip(chip)
    if fuse_shared_experts and ep > 1:
        raise InvalidUsage("--fuse-shared-experts and --ep exclude each other")
    classified = classify(checkpoint, as_common, fuse_shared=fuse_shared_experts)
    _refuse_substitution(checkpoint)
    warnings = [
        *_contradiction_warnings(checkpoint, classified, trust_tensors=trust_tensors),
        *_size_warnings(checkpoint, classified, trust_tensors=trust_tensors),
        *_leftover_warnings(checkpoint),
    ]
    traits = traits_for(checkpoint, chip, options)
    blocks = tuple(_plan_blocks(classified, found, traits, parallel, chosen_ranks))
    copied, left = small_files(checkpoint.folder)
    warnings += [_left_warning(name) for name in left]
    warnings += _block_warnings(blocks)
    facts = {"ep": ep, "gfx": chip, "target": found.name, "tp": tp}
    shards = (
        *rank_shards([plan.stacks for plan in blocks], chosen_ranks, max_shard_bytes, facts),
        *common_shards(classified.common, max_shard_bytes, facts),
    )
    return Plan(
        checkpoint=checkpoint,
        target=found,
        gfx=chip,
        parallel=parallel,
        options={name: traits[name] for name in OPTIONS if traits[name] != DEFAULT},
        ranks=chosen_ranks,
        max_shard_bytes=max_shard_bytes,
        as_common=tuple(as_common),
        trust_tensors=trust_tensors,
        fuse_shared_experts=fuse_shared_experts,
        blocks=blocks,
        common=classified.common,
        skipped=classified.skipped,
        shards=shards,
        small_files=tuple(copied),
        warnings=tuple(warnings),
    )


def traits_for(
    checkpoint: Checkpoint, gfx: str, options: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return what chooses a path of a target, but for what each experts module has of its own.

    Raises:
        InvalidUsage: An option is not known.
    """
    return {**_check_options(options or {}), **traits_of(checkpoint), "chip": gfx}


def path_of(block: ExpertBlock, target: Target, traits: Mapping[str, str]) -> WeightPath:
    """Return what a target wants of an experts module.

    Args:
        block: The module.
        target: The target.
        traits: From `traits_for`.

    Raises:
        NoRule: The target has no path for it.
        InvalidUsage: An option has no meaning for it.
    """
    own = {"family": block.family.name, "inputs": block.inputs}
    return target.path_for(block.scheme.name, {**traits, **own})


def _check_parallel(tp: int, ep: int, placement: str, target: Target) -> Parallel:
    for flag, number in (("--tp", tp), ("--ep", ep)):
        if not 1 <= number <= MAX_RANKS:
            raise InvalidUsage(f"{flag} {number} is out of range: 1 to {MAX_RANKS}")
    if tp > 1 and ep > 1:
        raise InvalidUsage(
            f"--tp {tp} and --ep {ep} exclude each other: an expert-parallel rank holds whole "
            "experts",
            "give --ep alone, with the number of all ranks",
        )
    if placement not in PLACEMENTS:
        raise InvalidUsage(
            f"placement {placement} is not known", f"use one of {', '.join(PLACEMENTS)}"
        )
    if placement not in target.placements:
        raise InvalidUsage(
            f"target `{target.name}` has no placement {placement}",
            f"use one of {', '.join(target.placements)}",
        )
    if ep == 1 and placement != next(iter(PLACEMENTS)):
        raise InvalidUsage(
            f"--placement {placement} has no effect without --ep: every rank has all experts",
            "leave it out, or give --ep",
        )
    return Parallel(tp, ep, placement)


def _check_options(options: Mapping[str, str]) -> dict[str, str]:
    for name in options:
        if name not in OPTIONS:
            raise InvalidUsage(f"option {name} is not known", f"use one of {', '.join(OPTIONS)}")
    return {name: options.get(name, DEFAULT) for name in OPTIONS}


def _check_numbers(
    parallel: Parallel, ranks: Sequence[int] | None, max_shard_bytes: int
) -> tuple[int, ...]:
    count = parallel.ranks
    if max_shard_bytes < 1:
        raise InvalidUsage(f"--max-shard-size {max_shard_bytes} is out of range: at least 1")
    if ranks is None:
        return tuple(range(count))
    chosen = tuple(sorted(set(ranks)))
    if not chosen or chosen[0] < 0 or chosen[-1] >= count:
        listed = ",".join(map(str, ranks)) or "[]"
        raise InvalidUsage(f"--ranks {listed} is out of range: 0 to {count - 1}")
    return chosen


def _plan_blocks(
    classified: Classified,
    target: Target,
    traits: Mapping[str, str],
    parallel: Parallel,
    ranks: tuple[int, ...],
) -> Iterator[BlockPlan]:
    modules = [(block, path_of(block, target, traits)) for block in classified.blocks]
    for block, path in modules:
        if target.even_experts and block.num_experts % parallel.ep:
            raise NoRule(
                f"`{block.experts}`: {block.num_experts} experts cannot be shared equally by "
                f"{parallel.ep} ranks, as target `{target.name}` wants",
                "use an --ep that divides the number of experts",
            )
        cut = cut_block(block, path, parallel, modules)
        yield BlockPlan(block, path, cut, tuple(stacks_of(block, path, cut, ranks)))


def _refuse_substitution(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose config lets some experts stand for others.

    mirrors vllm/model_executor/layers/fused_moe/layer.py (0.33): such experts are dropped.

    Raises:
        NoRule: It does.
    """
    config: Any = checkpoint.config.get("compression_config")
    for key in ("transform_config", "expert_substitution"):
        config = config.get(key) if isinstance(config, dict) else None
    if config:
        raise NoRule(
            "the config names an `expert_substitution`: some experts stand for others",
            "convert a checkpoint that holds every expert",
        )


def _contradiction_warnings(
    checkpoint: Checkpoint, classified: Classified, *, trust_tensors: bool
) -> Iterator[str]:
    found = contradictions(checkpoint, classified.blocks)
    if not found:
        return
    first = found[0]
    message = (
        f"the config promises {first.promised} for `{printable(first.experts)}`, but its tensors "
        f"are {first.found} ({len(found)} such)"
    )
    if not trust_tensors:
        raise NoRule(
            message,
            "the tensors are what counts: mend config.json, or go on as they are with "
            "--trust-tensors",
        )
    yield f"{message}; the tensors count"


def _size_warnings(
    checkpoint: Checkpoint, classified: Classified, *, trust_tensors: bool
) -> Iterator[str]:
    for found in mismatches(checkpoint.config, classified.blocks, classified.common):
        if found.is_certain and not trust_tensors:
            raise NoRule(
                f"the config is not of these tensors: {found.what}",
                "take the config and the index that belong to them, or go on as they are with "
                "--trust-tensors",
            )
        yield f"the config may not be of these tensors: {found.what}"


def _leftover_warnings(checkpoint: Checkpoint) -> Iterator[str]:
    if checkpoint.stray_files:
        names = ", ".join(f"`{printable(name)}`" for name in checkpoint.stray_files[:3])
        yield f"{len(checkpoint.stray_files)} files that the index does not name: {names}"
    if checkpoint.unindexed:
        name = printable(checkpoint.unindexed[0].name)
        yield f"{len(checkpoint.unindexed)} tensors that the index does not name, first `{name}`"


def _left_warning(name: str) -> str:
    kind = "a folder, a large file or no regular file"
    why = kind if is_plain_name(name) else "its name is none for a file"
    return f"`{printable(name)}` is not copied: {why}"


def _block_warnings(blocks: Sequence[BlockPlan]) -> Iterator[str]:
    one_way = [s for plan in blocks for stack in plan.stacks if stack.is_lossy for s in stack.steps]
    if one_way:
        yield (
            f"{count(len(one_way), 'tensor')} cannot be undone, since values are merged or rounded "
            "as the engine does: keep the source"
        )
    yield from sorted({plan.path.note for plan in blocks if plan.path.note})
    empty = sorted({r for plan in blocks for r, part in enumerate(plan.cut.parts) if not part})
    if empty:
        shown = ", ".join(map(str, empty))
        yield f"nothing is left for rank {shown}: its experts are padding alone"
