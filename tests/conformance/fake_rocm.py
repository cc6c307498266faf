"""A stand-in for the ROCm platform, so that vLLM's own loading code runs on a CPU.

Call `install_rocm` before anything imports `vllm.platforms`; one process per chip.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from conformance.fake_aiter import COMPUTE_UNITS
from conformance.fake_modules import module


class FillUninitialised(TorchFunctionMode):
    """Fills every tensor that torch would hand out uninitialised with one byte value.

    Two runs with different bytes then differ exactly where a value was never written.
    """

    _ALLOCATORS = (
        torch.empty,
        torch.empty_like,
        torch.empty_strided,
        torch.Tensor.new_empty,
        torch.Tensor.new_empty_strided,
    )

    def __init__(self, byte: int) -> None:
        """Remembers the fill `byte`, 0 to 255."""
        super().__init__()
        self._byte = byte

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs `func`, then overwrites its result where it is a fresh allocation."""
        if func is torch.Tensor.copy_ and args[0].dtype == torch.int4:  # a GPU can, a CPU cannot
            args[0].view(torch.uint8).copy_(args[1].view(torch.uint8))
            return args[0]
        result = func(*args, **(kwargs or {}))
        if func in self._ALLOCATORS and result.device.type == "cpu" and result.numel():
            storage = torch.empty(0, dtype=torch.uint8).set_(result.untyped_storage())
            storage.fill_(self._byte)
        return result


class _Stream:
    """A GPU stream or event that does nothing; models create them when they are built."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        """Accepts what a stream accepts."""

    def wait_stream(self, *_args: Any) -> None:
        """Waits for nothing."""

    def synchronize(self) -> None:
        """Waits for nothing."""


def _install_amdsmi(gfx: str) -> None:
    """Registers the management library through which the platform learns the chip's name."""
    asic = {"target_graphics_version": gfx, "market_name": "conformance", "device_id": "0x75a3"}
    module(
        "amdsmi",
        AmdSmiException=type("AmdSmiException", (Exception,), {}),
        AmdSmiMemoryType=type("AmdSmiMemoryType", (), {"VRAM": 0}),
        AmdSmiLinkType=type("AmdSmiLinkType", (), {"AMDSMI_LINK_TYPE_XGMI": 2}),
        amdsmi_init=lambda *_a: None,
        amdsmi_shut_down=lambda: None,
        amdsmi_get_processor_handles=lambda: [0],
        amdsmi_get_gpu_asic_info=lambda _handle: asic,
        amdsmi_get_gpu_device_uuid=lambda _handle: "conformance",
        amdsmi_get_gpu_memory_total=lambda _handle, _kind: 288 << 30,
        amdsmi_topo_get_link_type=lambda _a, _b: {"hops": 1, "type": 2},
        amdsmi_topo_get_numa_node_number=lambda _handle: 0,
    )


_COMPILED = ("vllm._C", "vllm._C_AVX2", "vllm._C_AVX512", "vllm._C_stable_libtorch", "vllm._rocm_C")
"""Extensions that are never needed; some builds of them do not even load on every CPU."""


def install_rocm(gfx: str) -> None:
    """Makes vLLM believe that it runs on ROCm with the chip `gfx`."""
    _install_amdsmi(gfx)
    for name in _COMPILED:
        sys.modules[name] = None  # type: ignore[assignment]  # importing it raises ImportError
    replacements: dict[Any, dict[str, Any]] = {
        torch.accelerator: {
            "empty_cache": lambda: None,
            "synchronize": lambda *_a: None,
            "current_device_index": lambda: 0,
        },
        torch.cuda: {"Stream": _Stream, "Event": _Stream},
    }
    for owner, attributes in replacements.items():
        for name, value in attributes.items():
            setattr(owner, name, value)
    platforms = importlib.import_module("vllm.platforms")
    rocm = importlib.import_module("vllm.platforms.rocm").RocmPlatform
    platforms.__dict__["_current_platform"] = rocm()
    rocm.device_type = "cpu"  # some constructors allocate on the platform's device
    rocm.num_compute_units = classmethod(lambda _cls, _device_id=0: COMPUTE_UNITS)
    _declare_operators()
    with _real_triton(platforms):
        importlib.import_module("vllm.triton_utils")


_LIBRARIES: list[Any] = []
"""Keeps the operator libraries alive: torch drops their definitions with the object."""

_OPERATORS = (
    "silu_and_mul(Tensor! out, Tensor x) -> ()",
    "silu_and_mul_with_clamp(Tensor! out, Tensor x, float limit) -> ()",
    "situ_and_mul(Tensor! out, Tensor x, float beta, float linear_beta) -> ()",
    "rms_norm(Tensor! out, Tensor x, Tensor w, float eps) -> ()",
    "fused_add_rms_norm(Tensor! x, Tensor! r, Tensor w, float eps) -> ()",
)


def _declare_operators() -> None:
    """Declares the compiled operators that constructors look up; none is ever called."""
    library = torch.library.Library("_C", "FRAGMENT")
    _LIBRARIES.append(library)
    for declaration in _OPERATORS:
        if not hasattr(torch.ops._C, declaration.partition("(")[0]):
            library.define(declaration)


@contextmanager
def _real_triton(platforms: types.ModuleType) -> Iterator[None]:
    """Lets vLLM import the installed Triton, as kernel modules need it; nothing is compiled."""
    devices = os.environ.get("HIP_VISIBLE_DEVICES")
    matches = platforms.__dict__["vllm_version_matches_substr"]
    os.environ["HIP_VISIBLE_DEVICES"] = ""
    platforms.__dict__["vllm_version_matches_substr"] = lambda _substring: False
    try:
        yield
    finally:
        platforms.__dict__["vllm_version_matches_substr"] = matches
        if devices is None:
            del os.environ["HIP_VISIBLE_DEVICES"]
        else:
            os.environ["HIP_VISIBLE_DEVICES"] = devices


class InterpolationMode(enum.Enum):
    """torchvision's names, which image processors mention as default arguments."""

    NEAREST = "nearest"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"


def install_torchvision() -> None:
    """Registers a stand-in for torchvision: wrappers of text models import it and never call it."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    transformers_utils = importlib.import_module("transformers.utils")
    transformers_utils.is_torchvision_available()  # remembers that it is absent
    nowhere = Path(os.devnull)
    module("torchvision", nowhere)
    module("torchvision.transforms", nowhere, InterpolationMode=InterpolationMode)
    module("torchvision.transforms.functional", InterpolationMode=InterpolationMode)


def inspect_models_here() -> None:
    """Makes vLLM inspect model classes in this process: a new one would lack the stand-ins."""
    registry = importlib.import_module("vllm.model_executor.models.registry")
    registry.__dict__["_run_in_subprocess"] = lambda function: function()


def leave_out_routing_buffers() -> None:
    """Keeps vLLM from making buffers for the tokens of fused shared experts on a GPU."""
    for name in ("experts.rocm_aiter_moe", "expert_map_manager"):
        user = importlib.import_module(f"vllm.model_executor.layers.fused_moe.{name}")
        user.__dict__["init_aiter_topK_meta_data"] = lambda *_args, **_kwargs: None


def _dequantise_per_tensor(tensor: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiplies as a GPU does, which first rounds a 0-d float32 factor to fp16; a CPU does not."""
    return (tensor.float() * scale.half().float()).half()


def install_fp8_quantiser() -> None:
    """Replaces vLLM's compiled per-tensor FP8 quantiser, which a CPU build lacks."""
    operators = importlib.import_module("vllm._custom_ops")

    def scaled_fp8_quant(
        input: torch.Tensor,  # noqa: A002 - the engine's own name
        scale: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
        **_kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = operators.current_platform.fp8_dtype()
        limit = 224.0 if dtype == torch.float8_e4m3fnuz else 448.0
        values = input.float()
        if scale is None:
            scale = (values.abs().amax() / limit).clamp(min=1e-12).view(1)
        quantised = (values * (1.0 / scale.float())).clamp(-limit, limit).to(dtype)
        return (quantised if output is None else output.copy_(quantised)), scale

    operators.__dict__["scaled_fp8_quant"] = scaled_fp8_quant
    for name in ("w8a8_utils", "fp8_utils"):
        users = importlib.import_module(f"vllm.model_executor.layers.quantization.utils.{name}")
        users.__dict__["per_tensor_dequantize"] = _dequantise_per_tensor
