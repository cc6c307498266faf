"""Finds the expert layers of a model, and what a prepared folder has for each."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from aiter_prep.engines.mismatch import EngineMismatch
from aiter_prep.engines.vllm.contract import LAYERS, METHODS, Method, class_name
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from aiter_prep.engines.reading import StoredTensor
    from aiter_prep.manifest import Manifest

_RUNTIME = ".routed_experts"  # fused_moe/runner/moe_runner.py registers the experts as this


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """An expert layer of the engine, and what is there for it.

    Attributes:
        path: Path of the module in the model.
        module: The module.
        known: What is known of the class of its method.
        block: The entry of `Manifest.model` that it is.
        tensors: Its tensors by the name of the parameter.
    """

    path: str
    module: Any
    known: Method
    block: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @property
    def method(self) -> Any:
        """The object that prepares and runs the layer."""
        return self.module.quant_method


def expert_layers(
    model: Any, manifest: Manifest, stored: Sequence[StoredTensor], architecture: str
) -> list[ExpertLayer]:
    """Return the expert layers of a model that a folder has tensors for.

    Layers whose experts are common tensors of the folder are left to the engine.

    Args:
        model: The model, built.
        manifest: The manifest.
        stored: The tensors of one rank.
        architecture: The architecture that the engine built.

    Raises:
        EngineMismatch: A layer is of an unknown class, or the folder has nothing for it.
    """
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    blocks = {block["experts"]: block for block in manifest.model["blocks"]}
    tensors: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for item in stored:
        experts, _, leaf = item.record.name.rpartition(".")
        tensors[experts][leaf] = item
    found: list[ExpertLayer] = []
    for path, module in model.named_modules():
        if not isinstance(module, RoutedExperts):
            continue
        name = experts_at(path, list(blocks))
        if name is not None:
            _check_main(manifest, list(blocks), name, architecture)
            known = _known(path, module)
            found.append(ExpertLayer(path, module, known, blocks[name], tensors[name]))
        elif not _is_common(path, manifest):
            raise EngineMismatch(
                f"the folder has no experts for `{printable(path)}`",
                "prepare the whole checkpoint that the engine was given",
            )
    return found


def experts_at(path: str, blocks: Sequence[str]) -> str | None:
    """Return which experts module of the source a module of the engine is, or None.

    What stands before `layers.` may differ: `layers.0.ffn.experts` of a source is
    `model.layers.0.ffn.experts.routed_experts` in the engine. Of several that fit, as with next-n
    layers of a path of their own, the one with the longest common end is meant.

    Args:
        path: Path of the module in the engine.
        blocks: Paths of the experts modules in the source.
    """
    runtime = path.removesuffix(_RUNTIME)
    fitting = [experts for experts in blocks if _ends_with(runtime, tail_of(experts))]
    fitting.sort(key=lambda experts: _common_end(runtime, experts))
    return fitting[-1] if fitting else None


def tail_of(experts: str) -> str:
    """Return a path from its first `layers.` on."""
    start = f".{experts}".find(".layers.")
    return experts[max(start, 0) :]


def _ends_with(path: str, tail: str) -> bool:
    return path == tail or path.endswith(f".{tail}")


def _common_end(one: str, other: str) -> int:
    """Return how many parts two paths have in common, from their end."""
    pairs = zip(reversed(one.split(".")), reversed(other.split(".")), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _check_main(manifest: Manifest, blocks: Sequence[str], experts: str, architecture: str) -> None:
    """Refuse to guess which of two layers with one number a draft model means."""
    alike = [other for other in blocks if tail_of(other) == tail_of(experts)]
    if len(alike) > 1 and architecture != manifest.model["architecture"]:
        shown = ", ".join(f"`{printable(name)}`" for name in alike)
        raise EngineMismatch(
            f"`{architecture}` is not the model that the folder was prepared from, and {shown} "
            "could each be meant",
            "load the draft model from its source with a load format of its own",
        )


def _known(path: str, module: Any) -> Method:
    for thing, table in ((module, LAYERS), (module.quant_method, METHODS)):
        if class_name(thing) not in table:
            raise EngineMismatch(
                f"`{printable(path)}` is prepared by `{class_name(thing)}`, a class that this "
                "version of aiter-prep does not know",
                "serve the source itself, or look for a newer aiter-prep",
            )
    return METHODS[class_name(module.quant_method)]


def _is_common(path: str, manifest: Manifest) -> bool:
    """Return whether the experts of a layer are among the common tensors."""
    runtime = path.removesuffix(_RUNTIME)
    return any(_ends_with(runtime, tail) for tail in _common_tails(manifest))


def _common_tails(manifest: Manifest) -> Iterator[str]:
    for record in manifest.tensors:
        head, found, _ = record.name.partition(".experts.")
        if record.rank is None and found:
            yield tail_of(f"{head}.experts")
