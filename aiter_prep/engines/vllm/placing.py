"""Puts prepared tensors where the engine's expert layers hold theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from aiter_prep.engines.plain import FLAGS, SHUFFLED, flagged, is_flagged
from aiter_prep.engines.readers import DIRECT, read
from aiter_prep.engines.vllm.contract import KEEPS_PARAMETERS
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from aiter_prep.engines.reading import Destination, StoredTensor
    from aiter_prep.engines.vllm.layers import ExpertLayer


def place(
    folder: Path,
    layers: Sequence[ExpertLayer],
    version: str,
    *,
    reader: str = DIRECT,
    check_digests: bool = False,
) -> None:
    """Read the tensors of expert layers and make them their parameters, flags last.

    A tensor is read into the memory that the engine allocated for the parameter, where that is as
    large; only scales that grow on the way get fresh memory.

    Args:
        folder: The prepared folder.
        layers: The layers.
        version: The vLLM that runs.
        reader: What reads the files; see `aiter_prep.load`.
        check_digests: Compare what was read with the manifest.

    Raises:
        InvalidUsage: There is no such reader.
        AiterPrepError: The package of the reader is not installed.
        DataMismatch: A file is not what the manifest says.
    """
    destinations: list[Destination] = []
    for layer in layers:
        _rename(layer)
        for leaf, stored in layer.tensors.items():
            destinations.append((stored, _memory(getattr(layer.module, leaf), stored)))
    read(folder, destinations, reader=reader, check_digests=check_digests)
    memory = iter(destinations)
    for layer in layers:
        for leaf in layer.tensors:
            stored, flat = next(memory)
            _put(layer.module, leaf, flagged(flat, stored.record), version)


def _rename(layer: ExpertLayer) -> None:
    """Give parameters the names that they have after loading."""
    for ours, before in (layer.known.renames or {}).items():
        parameter = getattr(layer.module, before)
        delattr(layer.module, before)
        layer.module.register_parameter(ours, parameter)


def _memory(parameter: torch.Tensor, stored: StoredTensor) -> torch.Tensor:
    data = parameter.data
    if data.nbytes == stored.total_bytes and data.is_contiguous() and not data.is_meta:
        return data.reshape(-1).view(torch.uint8)
    return torch.empty(stored.total_bytes, dtype=torch.uint8, device=data.device)


def _put(module: Any, leaf: str, tensor: torch.Tensor, version: str) -> None:
    from vllm.model_executor.utils import replace_parameter

    held = getattr(module, leaf)
    is_there = (held.data_ptr(), held.shape, held.stride(), held.dtype) == (
        tensor.data_ptr(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )
    if is_there and version in KEEPS_PARAMETERS:  # its copy onto itself would change nothing
        for flag in FLAGS:
            if hasattr(tensor, flag):
                setattr(held, flag, getattr(tensor, flag))
    else:
        replace_parameter(module, leaf, tensor)


def check_placed(layer: ExpertLayer) -> None:
    """Assert that what a layer holds is real, and flagged as it must be."""
    for leaf, stored in layer.tensors.items():
        held = getattr(layer.module, leaf)
        name = printable(stored.record.name)
        assert not held.is_meta, f"`{name}` has no memory"
        flag = bool(getattr(held, SHUFFLED, False))
        assert flag == is_flagged(stored.record), f"`{name}` lost its flag on the way"
