"""Where the layers and sizes that a config names are not those of the tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiter_prep.families.common import common_rule_of
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from aiter_prep.families.blocks import ExpertBlock
    from aiter_prep.storage.header import TensorInfo

_LAYER = re.compile(r"((?:.+\.)?(?:layers|blocks)\.)(\d{1,6})\.")
_EMBEDDING = re.compile(r"(?:(?:language_model|model)\.)*(?:embed_tokens|embed)\.weight")
_FLOATS = ("BF16", "F16", "F32")
MAX_LAYERS = 10_000
MAX_SHOWN = 5
TWO_AXES = 2


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A number of the config that the tensors do not have.

    Attributes:
        what: What the config says, and what the tensors are.
        is_certain: No published model is stored so; otherwise an engine might know better.
    """

    what: str
    is_certain: bool


def mismatches(
    config: Mapping[str, Any], blocks: Sequence[ExpertBlock], common: Sequence[TensorInfo]
) -> tuple[Mismatch, ...]:
    """Return where the layers and sizes of a config are not those of the tensors.

    The width of the embedding stands for the hidden size, since experts may have a narrower one.
    A config need not name every size; what it does not name is not compared.

    Args:
        config: The model's `config.json`.
        blocks: Its experts modules.
        common: Its other tensors.
    """
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config
    return (
        *_hidden(text, common),
        *_intermediate(text, blocks),
        *_layers(text, blocks, common),
    )


def _hidden(config: Mapping[str, Any], common: Sequence[TensorInfo]) -> Iterator[Mismatch]:
    hidden = _size(config, "hidden_size")
    for tensor in common:
        if not _EMBEDDING.fullmatch(tensor.name) or tensor.dtype not in _FLOATS:
            continue
        if hidden and len(tensor.shape) == TWO_AXES and tensor.shape[1] != hidden:
            yield Mismatch(
                f"`hidden_size` is {hidden}, but `{printable(tensor.name)}` has rows of "
                f"{tensor.shape[1]}",
                is_certain=True,
            )


def _intermediate(config: Mapping[str, Any], blocks: Sequence[ExpertBlock]) -> Iterator[Mismatch]:
    named = {key: _size(config, key) for key in ("moe_intermediate_size", "intermediate_size")}
    key = next((key for key, size in named.items() if size), "")
    count = _size(config, "num_hidden_layers") or MAX_LAYERS
    main = [block for block in blocks if _layer_of(block.experts)[1] < count]
    # MiniMax's experts have `intermediate_size` even where the other is named
    wrong = [block for block in main if block.intermediate not in named.values()]
    if key and wrong:
        yield Mismatch(
            f"`{key}` is {named[key]}, but `{printable(wrong[0].experts)}` has "
            f"{wrong[0].intermediate} ({len(wrong)} such)",
            is_certain=key == "moe_intermediate_size",
        )


@dataclass(frozen=True, slots=True)
class _Stack:
    """The layers that have tensors: with experts, with others, and with a router alone."""

    sparse: frozenset[int]
    others: frozenset[int]
    routers: Mapping[int, str]


def _stack_of(blocks: Sequence[ExpertBlock], common: Sequence[TensorInfo]) -> _Stack | None:
    """Return the one stack of layers that has experts; None if there are more, or none."""
    places = [_layer_of(block.experts) for block in blocks]
    prefixes = {prefix for prefix, _ in places if prefix and "mtp" not in prefix.split(".")}
    if len(prefixes) != 1:
        return None
    (prefix,) = prefixes
    sparse = {layer for found, layer in places if found == prefix}
    others: set[int] = set()
    routers: dict[int, str] = {}
    for tensor in common:
        found, layer = _layer_of(tensor.name)
        if found != prefix:
            continue
        others.add(layer)
        if "experts" in tensor.name.split("."):  # copied as they are, because the caller says so
            sparse.add(layer)
        elif layer not in sparse and layer not in routers and _is_router(tensor.name):
            routers[layer] = tensor.name
    alone = {layer: name for layer, name in routers.items() if layer not in sparse}
    return _Stack(frozenset(sparse), frozenset(others), alone)


def _layers(
    config: Mapping[str, Any], blocks: Sequence[ExpertBlock], common: Sequence[TensorInfo]
) -> Iterator[Mismatch]:
    count = _size(config, "num_hidden_layers")
    stack = _stack_of(blocks, common)
    if stack is None or not 0 < count <= MAX_LAYERS:
        return
    empty = [n for n in range(count) if n not in stack.sparse and n not in stack.others]
    if empty and stack.others:
        shown = ", ".join(map(str, empty[:MAX_SHOWN]))
        more = f" and {len(empty) - MAX_SHOWN} more" if len(empty) > MAX_SHOWN else ""
        yield Mismatch(
            f"`num_hidden_layers` is {count}, but no tensor is of layer {shown}{more}",
            is_certain=True,
        )
    if stack.routers:
        layer = min(stack.routers)
        yield Mismatch(
            f"`{printable(stack.routers[layer])}` is a router, but layer {layer} has no experts "
            f"({len(stack.routers)} such)",
            is_certain=True,
        )
    yield from _unusual_layers(config, stack, count)


def _unusual_layers(config: Mapping[str, Any], stack: _Stack, count: int) -> Iterator[Mismatch]:
    beyond = [n for n in stack.sparse | stack.others if n >= count]
    drafts = max(_size(config, "num_nextn_predict_layers"), _size(config, "num_mtp_modules"))
    if len(beyond) > drafts:
        yield Mismatch(
            f"`num_hidden_layers` is {count}, but there are tensors of layer {max(beyond)}",
            is_certain=False,
        )
    dense = _size(config, "first_k_dense_replace")
    if min(stack.sparse, default=dense) < dense:
        yield Mismatch(
            f"`first_k_dense_replace` is {dense}, but layer {min(stack.sparse)} has experts",
            is_certain=False,
        )


def _is_router(name: str) -> bool:
    rule = common_rule_of(name)
    return rule is not None and rule.name == "router"


def _layer_of(name: str) -> tuple[str, int]:
    """Return what leads to the number of a layer, and the number; or nothing, and 0."""
    match = _LAYER.match(name)
    return ("", 0) if match is None else (match[1], int(match[2]))


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    return value if type(value) is int and value > 0 else 0
