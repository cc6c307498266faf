"""A stand-in for the AITER package, over AITER's own pure-torch files.

Only what an engine asks while it builds, loads and post-processes a model is imitated: the chip's
name, the enumerations, a signature. Every byte that AITER would move is moved by AITER's own code,
or, where the pinned release lacks a function that newer ones have, by the few lines below, which do
what the newer function does.
"""

from __future__ import annotations

import enum
import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from conformance.fake_modules import module, never_called

COMPUTE_UNITS = 256
"""Number of compute units that the imitated chip reports; no layout depends on it."""


class ActivationType(enum.IntEnum):
    """AITER's activation kinds, those that the engine looks for by name."""

    No = -1
    Silu = 0
    Gelu = 1
    Swiglu = 2
    Situv2 = 3


class QuantType(enum.IntEnum):
    """AITER's quantisation kinds."""

    No = 0
    per_Tensor = 1  # noqa: N815 - AITER's own name
    per_Token = 2  # noqa: N815 - AITER's own name
    per_1x32 = 3
    per_1x128 = 4
    per_128x128 = 5


def kernel(
    *_args: Any,
    act: Any = None,
    gate_mode: str | None = None,
    quant_dtype_a: Any = None,
    **_kwargs: Any,
) -> None:
    """Any kernel; the engine asks recent ones by name whether they take these three arguments."""
    never_called(act, gate_mode, quant_dtype_a)


def install_aiter(source: Path, gfx: str) -> None:
    """Registers a package `aiter` over the sources in `source`, the folder that has `ops/`."""
    if "aiter" in sys.modules:
        raise RuntimeError("the stand-in for aiter must be installed before aiter is imported")
    module(
        "aiter",
        source,
        ActivationType=ActivationType,
        QuantType=QuantType,
        flash_attn_varlen_func=never_called,
        get_hip_quant=lambda _kind: never_called,
    )
    module("aiter.fused_moe", fused_moe=kernel, moe_sorting=kernel)
    module("aiter.jit", source / "jit")
    module("aiter.jit.core", compile_ops=lambda *_a, **_k: lambda function: function)
    module("aiter.jit.utils", source / "jit" / "utils")
    module(
        "aiter.jit.utils.chip_info",
        get_gfx=lambda: gfx,
        get_gfx_runtime=lambda: gfx,
        get_gfx_list=lambda: [gfx],
        get_cu_num=lambda: COMPUTE_UNITS,
    )
    module("aiter.ops", source / "ops")
    module("aiter.ops.enum", ActivationType=ActivationType, QuantType=QuantType)
    module("aiter.utility", source / "utility")
    dtypes = importlib.import_module("aiter.utility.dtypes")
    _modernise_dtypes(dtypes, gfx)
    sys.modules["aiter"].__dict__["dtypes"] = dtypes
    _install_kernel_modules(source)
    _modernise(importlib.import_module("aiter.ops.shuffle"))
    _modernise_quant(source)


_KERNEL_MODULES = (
    "aiter.ops.triton.gated_delta_net",
    "aiter.ops.flydsl.kernels.moe_2stage_a16wmix",
)
"""Modules that are imported while a model is built or post-processed; old releases lack them."""


def _install_kernel_modules(source: Path) -> None:
    """Registers kernel modules any attribute of which is a kernel that must never run."""
    importlib.import_module("aiter.ops.triton")
    for name in _KERNEL_MODULES:
        if source.joinpath(*name.split(".")[1:]).with_suffix(".py").exists():
            continue
        parents = [p for p in _packages_of(name) if p not in sys.modules]
        for parent in parents:
            module(parent, source / "absent")
        module(name, __getattr__=_kernel)


def _packages_of(name: str) -> list[str]:
    """The packages around a module, outermost first."""
    parts = name.split(".")[:-1]
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _kernel(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)
    return kernel


def _modernise(shuffle: types.ModuleType) -> None:
    """Gives an older `aiter.ops.shuffle` the functions of a newer one, on top of its own."""
    if hasattr(shuffle, "shuffle_scale"):
        return
    e8m0_shuffle = importlib.import_module("aiter.utility.fp4_utils").e8m0_shuffle
    plain, gate_up_weight = shuffle.shuffle_weight, shuffle.shuffle_weight_a16w4
    gate_up_scale = shuffle.shuffle_scale_a16w4

    def shuffle_weight(
        x: torch.Tensor,
        layout: tuple[int, int] = (16, 16),
        use_int4: bool = False,
        is_guinterleave: bool = False,
        gate_up: bool = False,
    ) -> torch.Tensor:
        interleaved = is_guinterleave
        y = gate_up_weight(x, layout[0], gate_up) if interleaved else plain(x, layout, use_int4)
        y.is_shuffled = True
        return y

    def shuffle_scale(
        src: torch.Tensor | None,
        experts_cnt: int | None = None,
        is_guinterleave: bool = False,
        gate_up: bool = False,
    ) -> torch.Tensor | None:
        if src is None or src.dtype == torch.float32:
            return src
        if not is_guinterleave:
            return e8m0_shuffle(src)
        columns = -src.shape[1] % 8
        padded = torch.nn.functional.pad(src.view(torch.uint8), (0, columns), value=0x7F)
        return gate_up_scale(padded.view(src.dtype), experts_cnt, gate_up)

    def shuffle_weight_a16w4(src: torch.Tensor, lanes: int, gate_up: bool) -> torch.Tensor:
        return shuffle_weight(src, (lanes, 16), is_guinterleave=True, gate_up=gate_up)

    def shuffle_scale_a16w4(src: torch.Tensor, experts_cnt: int, gate_up: bool) -> Any:
        return shuffle_scale(src, experts_cnt, is_guinterleave=True, gate_up=gate_up)

    shuffle.__dict__.update(
        shuffle_weight=shuffle_weight,
        shuffle_scale=shuffle_scale,
        shuffle_weight_a16w4=shuffle_weight_a16w4,
        shuffle_scale_a16w4=shuffle_scale_a16w4,
        pack_int8_to_packed_int4=pack_int8_to_packed_int4,
        shuffle_scale_for_int4=shuffle_scale_for_int4,
    )


def pack_int8_to_packed_int4(shuffled: torch.Tensor) -> torch.Tensor:
    """Packs eight int4 values `v0..v7` at a time: byte `i` holds `v[i]` low and `v[i + 4]` high."""
    nibbles = (shuffled.contiguous().view(-1, 2, 4).to(torch.int16) & 0xF).to(torch.uint8)
    return (nibbles[:, 0] | (nibbles[:, 1] << 4)).view(-1).view(torch.int8)


def shuffle_scale_for_int4(scale: torch.Tensor, group_size: int = 32) -> torch.Tensor:
    """Pairs the bf16 scales `[E, G, N]` of neighbouring groups: `[E, G / 2, N, 2]`."""
    if group_size != 32:
        raise ValueError(f"int4 scales come in groups of 32, not {group_size}")
    if scale.dtype != torch.bfloat16:
        return scale.contiguous()
    experts, groups, rows = scale.shape
    return scale.view(experts, groups // 2, 2, rows).permute(0, 1, 3, 2).contiguous()


def per_1x32_i4_quant(
    weight: torch.Tensor, group_size: int = 32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises `[..., N, K]` to int4 in an int8 container, scales `[..., K / 32, N]` in bf16."""
    groups = weight.view(*weight.shape[:-1], -1, group_size)
    scale = (groups.abs().amax(dim=-1, keepdim=True).clamp(min=1e-6) / 7.0).squeeze(-1)
    quantised = (groups / scale.unsqueeze(-1)).round().clamp(-7, 7).to(torch.int8)
    return quantised.view(weight.shape), scale.transpose(-1, -2).contiguous().to(torch.bfloat16)


def _modernise_dtypes(dtypes: Any, gfx: str) -> None:
    """Gives gfx1250 the FP8 type that the table of AITER's `utility/dtypes.py` names for it now.

    The release that is installed does not know the chip, and falls back on bytes.
    """
    if gfx == "gfx1250":
        dtypes.fp8 = dtypes.d_dtypes["fp8"] = torch.float8_e4m3fn


def _modernise_quant(source: Path) -> None:
    """Registers `aiter.ops.quant` with the functions that weight post-processing calls."""
    if "aiter.ops.quant" not in sys.modules:
        module("aiter.ops.quant", per_1x32_i4_quant=per_1x32_i4_quant, source=source)
