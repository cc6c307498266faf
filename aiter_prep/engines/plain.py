"""Loads prepared folders into plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aiter_prep.engines.readers import DIRECT, read
from aiter_prep.engines.reading import StoredTensor, stored_tensors
from aiter_prep.engines.runtime_dtypes import as_runtime
from aiter_prep.manifest import read_manifest

if TYPE_CHECKING:
    from aiter_prep.manifest import TensorRecord

SHUFFLED = "is_shuffled"
LAYOUT = "aiter_prep_layout"
FLAGS = (SHUFFLED, LAYOUT)
"""What says how the bytes of a tensor lie; stale, it makes a kernel compute garbage."""

# vllm/model_executor/parameter.py::BasevLLMParameter keeps its loader under the second name
_LOADERS = ("weight_loader", "_weight_loader")


def load(
    folder: str | Path,
    rank: int,
    device: torch.device | str = "cpu",
    *,
    common: bool = False,
    check_digests: bool = False,
    reader: str = DIRECT,
) -> dict[str, torch.Tensor]:
    """Load the tensors of one rank of a prepared folder.

    Each has the dtype that kernels see it as, AITER's `is_shuffled` where that belongs on it, and
    the name of its layout as `aiter_prep_layout`. Most operations of torch drop such attributes:
    hand the tensors to `attach`, or pass them on as they are.

    Args:
        folder: The prepared folder; nothing is written into it.
        rank: The rank.
        device: Where the tensors go.
        common: Load the tensors that all ranks share, too.
        check_digests: Compare every byte with the manifest's digests.
        reader: What reads the files: `direct`, ours, or `fastsafetensors` or `runai_streamer`,
            which need the packages of these names.

    Raises:
        InvalidUsage: The folder does not hold that rank, or there is no such reader.
        AiterPrepError: The package of the reader is not installed.
        DataMismatch: It is no prepared folder, or not what its manifest says.
        NoRule: torch lacks a dtype.
    """
    path = Path(folder)
    manifest = read_manifest(path)
    stored = stored_tensors(path, manifest, rank)
    if common:
        stored += stored_tensors(path, manifest, None)
    memory = [(tensor, _memory_for(tensor, device)) for tensor in stored]
    read(path, memory, reader=reader, check_digests=check_digests)
    return {tensor.record.name: flagged(flat, tensor.record) for tensor, flat in memory}


def _memory_for(stored: StoredTensor, device: torch.device | str) -> torch.Tensor:
    return torch.empty(stored.total_bytes, dtype=torch.uint8, device=device)


def flagged(flat: torch.Tensor, record: TensorRecord) -> torch.Tensor:
    """Return flat bytes as the tensor that they are, with the flags that belong on it."""
    tensor = as_runtime(flat, record)
    if is_flagged(record):
        setattr(tensor, SHUFFLED, True)
    if record.layout is not None:
        setattr(tensor, LAYOUT, record.layout)
    return tensor


def is_flagged(record: TensorRecord) -> bool:
    """Return whether AITER would have flagged a tensor.

    aiter/ops/shuffle.py flags weights; scales of any layout have no flag, and no kernel asks.
    """
    return record.is_shuffled and "scale" not in record.name.rpartition(".")[2]


def attach(
    module: torch.nn.Module, name: str, tensor: torch.Tensor, *, prefer_copy: bool = False
) -> torch.nn.Parameter:
    """Make a tensor the parameter of a module, with all that was said of it.

    The attributes of the tensor (`is_shuffled`, `aiter_prep_layout`, ...) end up on the parameter
    that the module holds afterwards. Its `weight_loader` is always that of the parameter which it
    replaces, never one that rides along on the tensor. A parameter that is handed back to its own
    module stays as it is.

    Args:
        module: The module.
        name: Name of the parameter, without dots; a buffer or a plain tensor of that name goes.
        tensor: The tensor; not copied unless `prefer_copy` says so.
        prefer_copy: Where the old parameter has the same shape, stride, dtype and device, copy
            into its memory: its `data_ptr` stays valid for captured graphs.

    Returns:
        The parameter that the module holds.
    """
    old = getattr(module, name, None)
    if tensor is old and isinstance(old, torch.nn.Parameter):
        return old
    attributes = {key: value for key, value in vars(tensor).items() if key not in _LOADERS}
    if prefer_copy and isinstance(old, torch.nn.Parameter) and _is_like(old, tensor):
        _copy_bytes(old.data, tensor.detach())
        for flag in FLAGS:
            vars(old).pop(flag, None)
        return _with(old, attributes)
    loader = getattr(old, _LOADERS[0], None) if isinstance(old, torch.nn.Parameter) else None
    parameter = torch.nn.Parameter(tensor.detach(), requires_grad=False)
    _forget(module, name)
    module.register_parameter(name, parameter)
    if loader is not None:
        attributes = {_LOADERS[0]: loader, **attributes}
    return _with(parameter, attributes)


def _is_like(old: torch.Tensor, new: torch.Tensor) -> bool:
    return bool(
        old.shape == new.shape
        and old.stride() == new.stride()
        and old.dtype == new.dtype
        and old.device == new.device
        and not old.is_meta
    )


def _copy_bytes(old: torch.Tensor, new: torch.Tensor) -> None:
    if old.dtype.itemsize == 1:  # torch has no copy for some of these dtypes, but one for bytes
        old, new = old.view(torch.uint8), new.view(torch.uint8)
    old.copy_(new)


def _forget(module: torch.nn.Module, name: str) -> None:
    """Take whatever has this name off a module."""
    if hasattr(module, name):
        delattr(module, name)


def _with(parameter: torch.nn.Parameter, attributes: dict[str, Any]) -> torch.nn.Parameter:
    for key, value in attributes.items():
        setattr(parameter, key, value)
    return parameter
