"""Sorts the tensors of a checkpoint into routed experts, common tensors and what is left out."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from aiter_prep.errors import NoRule
from aiter_prep.families.blocks import ExpertBlock, group_blocks, natural_key
from aiter_prep.families.common import common_rule_of
from aiter_prep.families.names import SHAPE, ExpertName, parse_expert_name
from aiter_prep.families.promises import promised_scheme
from aiter_prep.families.shared import fuse_shared_expert
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiter_prep.storage.checkpoint import Checkpoint
    from aiter_prep.storage.header import TensorInfo

NOT_INDEXED = "in a shard, but not named by the index"


@dataclass(frozen=True, slots=True)
class Classified:
    """A checkpoint whose every tensor is accounted for.

    Attributes:
        blocks: Modules of routed experts, in the order of their layers.
        common: Tensors that every rank gets as they are, in the order of their names.
        skipped: Tensors that are left out: name and reason.
    """

    blocks: tuple[ExpertBlock, ...]
    common: tuple[TensorInfo, ...]
    skipped: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A config that promises another scheme than the tensors have.

    Attributes:
        experts: Path of the experts module.
        promised: What the config says.
        found: What the tensors are.
    """

    experts: str
    promised: str
    found: str


def classify(
    checkpoint: Checkpoint, as_common: Sequence[str] = (), *, fuse_shared: bool = False
) -> Classified:
    """Sort every tensor of a checkpoint.

    Args:
        checkpoint: The source.
        as_common: Patterns of names (`*` and `?`) that no rule knows but that are to be copied.
        fuse_shared: Append each module's shared expert to its routed ones.

    Raises:
        NoRule: A tensor that no rule knows, or no routed experts at all.
        BadSource: An experts module lacks a tensor.
    """
    named: list[tuple[ExpertName, TensorInfo]] = []
    common: list[TensorInfo] = []
    unknown: list[str] = []
    for name, tensor in checkpoint.tensors.items():
        if as_common and any(fnmatchcase(name, pattern) for pattern in as_common):
            common.append(tensor)
        elif (parsed := parse_expert_name(name)) is not None:
            # a packed weight's shape: engines compute it again, and only `restore` needs it
            if parsed.suffix == SHAPE:
                common.append(tensor)
            else:
                named.append((parsed, tensor))
        elif common_rule_of(name) is not None:
            common.append(tensor)
        else:
            unknown.append(name)
    if unknown:
        raise _unknown(unknown)
    if not named:
        raise NoRule(
            f"`{printable(checkpoint.name)}` ({printable(checkpoint.architecture)}) has no routed "
            "experts: there is nothing to prepare",
            "engines load dense models as they are",
        )
    blocks = tuple(group_blocks(named, checkpoint.config))
    if fuse_shared:
        fused = [fuse_shared_expert(block, checkpoint.tensors) for block in blocks]
        blocks = tuple(block for block, _ in fused)
        used = frozenset().union(*(names for _, names in fused))
        common = [tensor for tensor in common if tensor.name not in used]
    common.sort(key=lambda tensor: natural_key(tensor.name))
    skipped = tuple((tensor.name, NOT_INDEXED) for tensor in checkpoint.unindexed)
    return Classified(blocks, tuple(common), skipped)


def contradictions(
    checkpoint: Checkpoint, blocks: Sequence[ExpertBlock]
) -> tuple[Contradiction, ...]:
    """Return where the config promises another scheme than the tensors have."""
    found: list[Contradiction] = []
    for block in blocks:
        promised = promised_scheme(checkpoint.config, checkpoint.hf_quant_config, block.experts)
        if promised is not None and promised != block.scheme.name:
            found.append(Contradiction(block.experts, promised, block.scheme.name))
    return tuple(found)


def _unknown(names: Sequence[str]) -> NoRule:
    more = f" ({len(names)} such)" if len(names) > 1 else ""
    return NoRule(
        f"tensor `{printable(names[0])}` is known to no family{more}",
        "if every rank may hold it unchanged, say so with --as-common and its name or a pattern",
    )
