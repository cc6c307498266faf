"""The load format `aiter_prep`: experts as they lie in the folder, all else as vLLM loads it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from aiter_prep.engines.mismatch import EngineMismatch
from aiter_prep.engines.readers import DIRECT
from aiter_prep.engines.reading import stored_tensors
from aiter_prep.engines.vllm.checks import check_chip, check_layer, check_since, rank_of
from aiter_prep.engines.vllm.config import is_prepared
from aiter_prep.engines.vllm.contract import check_target, running_version
from aiter_prep.engines.vllm.fingerprint import check_fingerprint
from aiter_prep.engines.vllm.layers import ExpertLayer, expert_layers
from aiter_prep.engines.vllm.placing import check_placed, place
from aiter_prep.manifest import Manifest, read_manifest
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

_CHECK_DIGESTS = "check_digests"
_READER = "reader"


class AiterPrepLoader(DefaultModelLoader):
    """Loads a prepared folder.

    The common tensors take vLLM's own way: the model's `load_weights`, then its post-processing.
    Expert tensors are read into their parameters, and the post-processing of their layers is
    replaced, once, by building the kernel objects over them.

    Args:
        load_config: vLLM's; `model_loader_extra_config` may say `check_digests` and `reader`,
            besides what vLLM's default loader knows.
    """

    def __init__(self, load_config: Any) -> None:
        extra = dict(load_config.model_loader_extra_config or {})
        self._check_digests = bool(extra.pop(_CHECK_DIGESTS, False))
        self._reader = str(extra.pop(_READER, DIRECT))
        super().__init__(dataclasses.replace(load_config, model_loader_extra_config=extra))
        self._is_loading = False

    def download_model(self, model_config: Any) -> None:
        """Check that the folder is here; there is nothing to download."""
        _manifest_of(model_config.model)

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Load a built model, but for its post-processing.

        Raises:
            EngineMismatch: What runs is not what the folder was prepared for.
            DataMismatch: The folder is not what its manifest says.
        """
        version = running_version()
        folder = Path(model_config.model)
        manifest = _manifest_of(model_config.model)
        layers = _checked_layers(folder, manifest, version, model, model_config)
        self._is_loading = True
        try:
            super().load_weights(model, model_config)
        finally:
            self._is_loading = False
        place(folder, layers, version, reader=self._reader, check_digests=self._check_digests)
        for layer in layers:
            _build_kernels_only(layer)

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
        """Return the common tensors.

        Raises:
            EngineMismatch: They are asked for outside of a load, to be loaded again.
        """
        if not self._is_loading:
            raise EngineMismatch(
                "a prepared folder cannot be loaded again into a running engine",
                "start the engine again, or update experts in place with "
                "`aiter_prep.attach(..., prefer_copy=True)`",
            )
        return super().get_all_weights(model_config, model)  # type: ignore[no-any-return]

    def _prepare_weights(
        self, model_name_or_path: str, *args: Any, **kwargs: Any
    ) -> tuple[str, list[str], bool, str]:
        """Name the shards of the common tensors; mirrors the method that it overrides."""
        if not is_prepared(model_name_or_path):  # what a model wants besides, from elsewhere
            found: tuple[str, list[str], bool, str]
            found = super()._prepare_weights(model_name_or_path, *args, **kwargs)
            return found
        shards = read_manifest(Path(model_name_or_path)).shards
        files = [str(Path(model_name_or_path) / s.file) for s in shards if s.rank is None]
        return model_name_or_path, files, True, ""


def _manifest_of(model: str) -> Manifest:
    if not is_prepared(model):
        raise EngineMismatch(
            f"`{printable(str(model))}` is not a prepared folder: it has no `aiter_prep.json`",
            "prepare it with `aiter-prep convert SOURCE OUT --target vllm`, or serve it without "
            "--load-format aiter_prep",
        )
    return read_manifest(Path(model))


def _checked_layers(
    folder: Path, manifest: Manifest, version: str, model: Any, model_config: Any
) -> list[ExpertLayer]:
    """Return the layers to place, after every comparison that can fail."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    check_target(manifest, version)
    check_chip(manifest)
    first = next((m for m in model.modules() if isinstance(m, RoutedExperts)), None)
    if first is None:
        return []
    rank = rank_of(first.moe_config.moe_parallel_config, manifest)
    stored = stored_tensors(folder, manifest, rank)
    layers = expert_layers(model, manifest, stored, str(model_config.architecture))
    for layer in layers:
        check_since(layer, version)
        check_layer(layer, manifest)
    check_fingerprint(manifest)
    return layers


def _build_kernels_only(layer: ExpertLayer) -> None:
    """Replace the next post-processing of a layer, and only the next one.

    Later ones, after an update of the weights, are vLLM's own again.
    """
    method = layer.method

    def build(module: Any) -> None:
        del method.process_weights_after_loading
        layer.known.rebuild(method, module)
        check_placed(layer)

    method.process_weights_after_loading = build
