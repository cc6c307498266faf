"""Shared experts as extra routed experts, as engines fuse them."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from aiter_prep.errors import NoRule
from aiter_prep.families.names import FAMILIES
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from aiter_prep.families.blocks import ExpertBlock, Part
    from aiter_prep.storage.header import TensorInfo

MODULES = ("shared_experts", "shared_expert")


def fuse_shared_expert(
    block: ExpertBlock, tensors: Mapping[str, TensorInfo]
) -> tuple[ExpertBlock, frozenset[str]]:
    """Return a module with its shared expert appended as one more expert.

    Args:
        block: The module of routed experts.
        tensors: Every tensor of the checkpoint, by name.

    Returns:
        The larger module, and the names of the shared expert's tensors.

    Raises:
        NoRule: There is no shared expert, or it is not quantised and sized as the routed ones.
    """
    parent = block.experts.removesuffix("experts")
    modules = [m for m in MODULES if any(_candidates(f"{parent}{m}", block, tensors))]
    if not modules:
        raise _refusal(block, "has no shared expert beside it")
    parts: dict[tuple[str, str], Part] = {}
    for key, part in block.parts.items():
        shared = next(_tensors(f"{parent}{modules[0]}", part, tensors), None)
        if shared is None:
            raise _refusal(
                block,
                f"has a {part.role} of the {part.projection} projection, its shared expert not",
            )
        first = part.tensors[0]
        if part.fused or (shared.dtype, shared.shape) != (first.dtype, first.shape):
            count = prod(shared.shape) / max(1, prod(first.shape))
            several = (
                "" if count <= 1 or count % 1 else f", {count:.0f} shared experts in one tensor"
            )
            raise _refusal(
                block,
                f"differs from its shared expert: `{printable(first.name)}` is {first.dtype} "
                f"{list(first.shape)}, `{printable(shared.name)}` is {shared.dtype} "
                f"{list(shared.shape)}{several}",
            )
        parts[key] = replace(part, tensors=(*part.tensors, shared), shared=shared.name)
    used = frozenset(part.shared for part in parts.values() if part.shared is not None)
    _check_nothing_left(f"{parent}{modules[0]}.", used, block, tensors)
    return replace(block, num_experts=block.num_experts + 1, parts=parts), used


def _candidates(
    module: str, block: ExpertBlock, tensors: Mapping[str, TensorInfo]
) -> Iterator[TensorInfo]:
    for part in block.parts.values():
        yield from _tensors(module, part, tensors)


def _tensors(module: str, part: Part, tensors: Mapping[str, TensorInfo]) -> Iterator[TensorInfo]:
    """Yield the shared expert's tensor of a part, in whichever spelling it has."""
    for family in FAMILIES.values():
        for key, projection in family.projections.items():
            name = f"{module}.{key}.{part.suffix}"
            if projection == part.projection and name in tensors:
                yield tensors[name]


def _check_nothing_left(
    prefix: str, used: frozenset[str], block: ExpertBlock, tensors: Mapping[str, TensorInfo]
) -> None:
    left = sorted(name for name in tensors if name.startswith(prefix) and name not in used)
    if left:
        raise _refusal(block, f"has no part like `{printable(left[0])}` of its shared expert")


def _refusal(block: ExpertBlock, what: str) -> NoRule:
    return NoRule(
        f"--fuse-shared-experts: `{printable(block.experts)}` {what}",
        "leave --fuse-shared-experts away, and let the engine keep this shared expert apart",
    )
