"""How one linear of a checkpoint is quantised: its tensors, and what config.json says of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from conformance.checkpoint_values import Named, Values, input_scale

Linear = Callable[[Values, str, int, int], Iterator[Named]]
"""Yields the tensors of the linear `name` with `out` rows and `width` columns."""


@dataclass(frozen=True)
class Scheme:
    """One way to quantise experts.

    Attributes:
        linear: the tensors of one linear.
        config: the `quantization_config` object, or none.
        ignored: the key of `config` that lists the modules left alone, if it has one.
        extra: more JSON files of the checkpoint, by name.
    """

    linear: Linear
    config: dict[str, Any] | None = None
    ignored: str | None = None
    extra: dict[str, dict[str, Any]] = field(default_factory=dict)

    def config_for(self, kept: list[str]) -> dict[str, Any] | None:
        """`config` that leaves the modules `kept` alone."""
        if self.config is None or self.ignored is None:
            return self.config
        return {**self.config, self.ignored: kept}


def bf16_linear(values: Values, name: str, out: int, width: int) -> Iterator[Named]:
    """An unquantised linear."""
    yield f"{name}.weight", values.bf16(out, width)


def fp8_block_linear(leaf: str, dtype: str, block: int = 128) -> Linear:
    """FP8 in square blocks; `leaf` and `dtype` are those of the scale."""

    def linear(values: Values, name: str, out: int, width: int) -> Iterator[Named]:
        yield f"{name}.weight", values.fp8(out, width)
        rows, columns = math.ceil(out / block), math.ceil(width / block)
        yield f"{name}.{leaf}", values.scale(dtype, rows, columns)

    return linear


def fp8_channel_linear(dtype: str, *, two_dimensional: bool) -> Linear:
    """FP8 with one scale a row, `[out, 1]` or `[out]`."""

    def linear(values: Values, name: str, out: int, width: int) -> Iterator[Named]:
        yield f"{name}.weight", values.fp8(out, width)
        shape = (out, 1) if two_dimensional else (out,)
        yield f"{name}.weight_scale", values.scale(dtype, *shape)

    return linear


def fp8_tensor_linear(dtype: str, shape: tuple[int, ...], *, static: bool) -> Linear:
    """FP8 with one scale a tensor; `static` adds the scale of the activations."""

    def linear(values: Values, name: str, out: int, width: int) -> Iterator[Named]:
        yield f"{name}.weight", values.fp8(out, width)
        yield f"{name}.weight_scale", values.scale(dtype, *shape)
        if static:
            yield f"{name}.input_scale", input_scale(dtype, shape, name)

    return linear


def mxfp8_linear(leaf: str) -> Linear:
    """FP8 with one exponent byte for 32 columns."""

    def linear(values: Values, name: str, out: int, width: int) -> Iterator[Named]:
        yield f"{name}.weight", values.fp8(out, width)
        yield f"{name}.{leaf}", values.e8m0("U8", out, width // 32)

    return linear


def mxfp4_linear(weight: str, dtype: str, scale: str, scale_dtype: str) -> Linear:
    """Packed FP4 with one exponent byte for 32 columns; names and dtypes as the vendor has them."""

    def linear(values: Values, name: str, out: int, width: int) -> Iterator[Named]:
        yield f"{name}.{weight}", values.fp4(dtype, out, width // 2)
        yield f"{name}.{scale}", values.e8m0(scale_dtype, out, width // 32)

    return linear


def int4_linear(values: Values, name: str, out: int, width: int) -> Iterator[Named]:
    """compressed-tensors int4, symmetric, groups of 32."""
    yield f"{name}.weight_packed", values.i32(out, width // 8)
    yield f"{name}.weight_scale", values.scale("BF16", out, width // 32)
    yield f"{name}.weight_shape", values.size(out, width)


def int4_fp8_linear(values: Values, name: str, out: int, width: int) -> Iterator[Named]:
    """Quark int4 weights that are expanded to FP8: one scale a tensor, one a row."""
    yield f"{name}.weight", values.i32(out, width // 8)
    yield f"{name}.weight_scale", values.scale("F32")
    yield f"{name}.weight_scale_2", values.scale("F32", out)


def _quark_tensor(dtype: str, scheme: str, **more: Any) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "qscheme": scheme,
        "is_dynamic": False,
        "ch_axis": -1,
        "group_size": None,
        "block_size": None,
        "symmetric": True,
        "round_method": "half_even",
        "scale_type": "float",
        "scale_format": None,
        **more,
    }


def quark_config(weight: Any, inputs: Any) -> dict[str, Any]:
    """Quark's `quantization_config` for one scheme everywhere."""
    tensors = {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None}
    return {
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "version": "0.13",
        "global_quant_config": tensors,
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "kv_cache_quant_config": {},
        "export": {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": "reorder",
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
    }


def compressed_config(form: str, weights: dict[str, Any], inputs: Any) -> dict[str, Any]:
    """compressed-tensors' `quantization_config` for one scheme on every linear."""
    common: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "group_size": None,
        "observer": None,
        "observer_kwargs": {},
        "symmetric": True,
        "zp_dtype": None,
    }
    group = {
        "format": form,
        "targets": ["Linear"],
        "weights": {**common, "dynamic": False, **weights},
        "input_activations": None if inputs is None else {**common, "dynamic": True, **inputs},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "version": "0.19.0",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "transform_config": {},
        "config_groups": {"group_0": group},
    }


_FP8_BLOCK = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}
_FP8_TENSOR = {"quant_method": "fp8", "fmt": "e4m3"}
_FLOAT8 = {"num_bits": 8, "type": "float"}
_MX = {"strategy": "group", "group_size": 32, "type": "float", "scale_dtype": "torch.uint8"}
_QUARK_MX = {"group_size": 32, "scale_format": "e8m0", "scale_calculation_mode": "even"}


def _quark(linear: Linear, weight: Any, inputs: Any) -> Scheme:
    return Scheme(linear, quark_config(weight, inputs), "exclude")


def _compressed(linear: Linear, form: str, weights: dict[str, Any], inputs: Any) -> Scheme:
    return Scheme(linear, compressed_config(form, weights, inputs), "ignore")


def _fp8(linear: Linear, **config: Any) -> Scheme:
    return Scheme(linear, {**_FP8_TENSOR, **config}, "modules_to_not_convert")


_QUARK_FP4 = _quark_tensor("fp4", "per_group", symmetric=None, **_QUARK_MX)
_QUARK_MXFP8 = _quark_tensor("fp8_e4m3", "per_group", symmetric=None, **_QUARK_MX)
_QUARK_FP8 = _quark_tensor("fp8_e4m3", "per_tensor")
_QUARK_PTPC = _quark_tensor("fp8_e4m3", "per_channel", ch_axis=0)
_QUARK_BLOCK = _quark_tensor("fp8_e4m3", "per_block", block_size=[128, 128])
_QUARK_INT4 = _quark_tensor("int4", "per_channel", ch_axis=0)

_U8_MXFP4 = mxfp4_linear("weight", "U8", "weight_scale", "U8")
_PACKED_MXFP4 = mxfp4_linear("weight_packed", "U8", "weight_scale", "U8")

SCHEMES: dict[str, Scheme] = {
    "bf16": Scheme(bf16_linear),
    "fp8_block": _fp8(fp8_block_linear("weight_scale_inv", "F32"), **_FP8_BLOCK),
    "fp8_block_bf16_scale": _fp8(fp8_block_linear("weight_scale_inv", "BF16"), **_FP8_BLOCK),
    "fp8_tensor": _fp8(fp8_tensor_linear("F32", (), static=False), activation_scheme="dynamic"),
    "fp8_tensor_static": _fp8(
        fp8_tensor_linear("F32", (), static=True), activation_scheme="static"
    ),
    "modelopt_fp8": Scheme(
        fp8_tensor_linear("F32", (), static=True),
        extra={
            "hf_quant_config.json": {
                "producer": {"name": "modelopt", "version": "0.31.0"},
                "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None},
            }
        },
    ),
    "quark_fp8_tensor": _quark(fp8_tensor_linear("F32", (), static=True), _QUARK_FP8, _QUARK_FP8),
    "quark_ptpc_fp8": _quark(
        fp8_channel_linear("F32", two_dimensional=False),
        _QUARK_PTPC,
        {**_QUARK_PTPC, "is_dynamic": True, "ch_axis": 1},
    ),
    "quark_fp8_block": _quark(
        fp8_block_linear("weight_scale", "F32"),
        _QUARK_BLOCK,
        _quark_tensor("fp8_e4m3", "per_group", group_size=128, is_dynamic=True),
    ),
    "quark_mxfp4": _quark(_U8_MXFP4, _QUARK_FP4, {**_QUARK_FP4, "is_dynamic": True}),
    "quark_mxfp4_weight_only": _quark(_U8_MXFP4, _QUARK_FP4, None),
    "quark_mxfp8": _quark(
        mxfp8_linear("weight_scale"), _QUARK_MXFP8, {**_QUARK_MXFP8, "is_dynamic": True}
    ),
    "quark_int4_fp8": _quark(
        int4_fp8_linear,
        [_QUARK_FP8, _QUARK_INT4],
        {**_QUARK_PTPC, "is_dynamic": True, "ch_axis": 1},
    ),
    "ct_fp8_channel": _compressed(
        fp8_channel_linear("BF16", two_dimensional=True),
        "float-quantized",
        {**_FLOAT8, "strategy": "channel"},
        {**_FLOAT8, "strategy": "token"},
    ),
    "ct_fp8_tensor_static": _compressed(
        fp8_tensor_linear("BF16", (1,), static=True),
        "float-quantized",
        {**_FLOAT8, "strategy": "tensor"},
        {**_FLOAT8, "strategy": "tensor", "dynamic": False},
    ),
    "ct_fp8_block": _compressed(
        fp8_block_linear("weight_scale", "BF16"),
        "float-quantized",
        {**_FLOAT8, "strategy": "block", "block_structure": [128, 128]},
        {**_FLOAT8, "strategy": "group", "group_size": 128},
    ),
    "ct_mxfp8": _compressed(
        mxfp8_linear("weight_scale"),
        "mxfp8-quantized",
        {**_MX, "num_bits": 8},
        {**_MX, "num_bits": 8},
    ),
    "ct_mxfp4": _compressed(
        _PACKED_MXFP4, "mxfp4-pack-quantized", {**_MX, "num_bits": 4}, {**_MX, "num_bits": 4}
    ),
    "ct_mxfp4_fp8": _compressed(
        _PACKED_MXFP4,
        "mxfp4-pack-quantized",
        {**_MX, "num_bits": 4},
        {**_FLOAT8, "strategy": "token"},
    ),
    "ct_int4": _compressed(
        int4_linear,
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
        None,
    ),
    "mxfp4": Scheme(_U8_MXFP4, {"quant_method": "mxfp4"}, "modules_to_not_convert"),
    "deepseek_v4_fp4": Scheme(
        mxfp4_linear("weight", "I8", "scale", "F8_E8M0"), {"expert_dtype": "fp4"}
    ),
    "deepseek_v4_fp8": Scheme(fp8_block_linear("scale", "F32"), {"expert_dtype": "fp8"}),
    "kimi_k3_mxfp4": _compressed(
        _PACKED_MXFP4, "mxfp4-pack-quantized", {**_MX, "num_bits": 4}, None
    ),
    "mxfp8": Scheme(
        mxfp8_linear("weight_scale_inv"),
        {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
        "ignored_layers",
    ),
}
