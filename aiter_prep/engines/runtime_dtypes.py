"""The torch dtype that stored bytes are seen as."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from aiter_prep.errors import NoRule
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from aiter_prep.manifest import TensorRecord

# mirrors safetensors/bindings/python/src/lib.rs::get_pydtype; F4 packs two elements into one of
# torch's, and F6 has no dtype in torch
_TORCH_NAMES = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}


def runtime_dtype(record: TensorRecord) -> torch.dtype:
    """Return the torch dtype of a tensor at run time.

    Raises:
        NoRule: The installed torch, or torch as such, has no such dtype.
    """
    name = record.runtime_dtype or _TORCH_NAMES.get(record.dtype, "")
    dtype = getattr(torch, name, None) if name else None
    if not isinstance(dtype, torch.dtype):
        raise NoRule(
            f"`{printable(record.name)}` is {printable(name or record.dtype)}, for which torch "
            f"{torch.__version__} has no dtype",
            "install torch 2.8 or newer",
        )
    return dtype


def runtime_shape(record: TensorRecord) -> tuple[int, ...]:
    """Return the shape of a tensor in elements of its runtime dtype."""
    if record.runtime_dtype is None and record.dtype == "F4":
        return (*record.shape[:-1], record.shape[-1] // 2)
    return record.shape


def as_runtime(flat: torch.Tensor, record: TensorRecord) -> torch.Tensor:
    """Return flat bytes seen as the tensor that they are, without a copy.

    Args:
        flat: uint8, 1-D: the bytes of the tensor.
        record: What the manifest says of it.
    """
    return flat.view(runtime_dtype(record)).view(runtime_shape(record))
