"""What the config promises about the quantisation of an experts module."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from aiter_prep.families.quantized_modules import Reading, Rule, Unclear, scheme_of

# A config without a quantisation config that says one of these is not silent on the matter.
_HINTS = ("quantization_config", "compression_config", "expert_dtype")
_EXCLUSION_KEYS = (
    "modules_to_not_convert",
    "ignored_layers",
    "exclude",
    "ignore",
    "exclude_modules",
)

_EXPERT_DTYPES = {"fp4": "mxfp4", "fp8": "fp8_block"}
_MODELOPT = {
    "FP8": "fp8_tensor",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8_channel",
    "FP8_PB_WO": "fp8_block",
    "MXFP8": "mxfp8",
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
}
# dtype, qscheme of one weight
_QUARK = {
    ("fp8_e4m3", "per_tensor"): "fp8_tensor",
    ("fp8_e4m3", "per_channel"): "fp8_channel",
    ("fp8_e4m3", "per_block"): "fp8_block",
    ("int8", "per_tensor"): "int8",
    ("int8", "per_channel"): "int8",
    ("int4", "per_channel"): "int4",
    ("int4", "per_group"): "int4",
}
# dtype, group_size, scale_format where the qscheme is per_group
_QUARK_MX = {("fp4", 32, "e8m0"): "mxfp4", ("fp8_e4m3", 32, "e8m0"): "mxfp8"}
# dtypes of a weight that is quantised twice
_QUARK_TWICE = {("fp8_e4m3", "int4"): "int4_fp8", ("fp4", "fp8_e4m3"): "nvfp4"}
# format, type, num_bits, strategy
_COMPRESSED_TENSORS = {
    ("float-quantized", "float", 8, "tensor"): "fp8_tensor",
    ("float-quantized", "float", 8, "channel"): "fp8_channel",
    ("float-quantized", "float", 8, "block"): "fp8_block",
    ("naive-quantized", "float", 8, "tensor"): "fp8_tensor",
    ("naive-quantized", "float", 8, "channel"): "fp8_channel",
    ("naive-quantized", "float", 8, "block"): "fp8_block",
    ("mxfp8-quantized", "float", 8, "group"): "mxfp8",
    ("mxfp4-pack-quantized", "float", 4, "group"): "mxfp4",
    ("nvfp4-pack-quantized", "float", 4, "tensor_group"): "nvfp4",
    ("pack-quantized", "int", 4, "group"): "int4",
    ("pack-quantized", "int", 4, "channel"): "int4",
    ("pack-quantized", "int", 8, "group"): "int8",
    ("pack-quantized", "int", 8, "channel"): "int8",
    ("int-quantized", "int", 8, "channel"): "int8",
    ("int-quantized", "int", 8, "tensor"): "int8",
}
# Classes that a compressed-tensors target may name and that experts are made of.
_EXPERT_CLASSES = ("Linear", "FusedMoE", "RoutedExperts")

_CLASS_NAME = re.compile(r"[A-Z][A-Za-z0-9]*")
_LAYER_GLOB = re.compile(r"(.*\d)\*")


def quantization_config_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantisation config of a model, from the top level or `text_config`."""
    found = _values(config, "quantization_config")
    return next((value for value in found if isinstance(value, Mapping)), None)


def promised_scheme(
    config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None, experts_path: str
) -> str | None:
    """Return the scheme that a config promises for an experts module.

    Args:
        config: The model's `config.json`.
        hf_quant_config: The `hf_quant_config.json` beside it; read if the config itself is silent.
        experts_path: Path of the module, such as `model.layers.3.mlp.experts`.

    Returns:
        Name of a scheme, `bf16` for experts that are not quantised, or None where the config does
        not say it with certainty.
    """
    try:
        reading = _read(config, hf_quant_config)
        return None if reading is None else scheme_of(experts_path, reading)
    except Unclear:
        return None


def _read(config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None) -> Reading | None:
    quantization = quantization_config_of(config)
    if quantization is not None:
        method = quantization.get("quant_method")
        if method is None and "quant_algo" in quantization:
            method = "modelopt"  # such as Qwen3-32B-FP8-Static-PerTensor
        reader = _READERS.get(method) if isinstance(method, str) else None
        return None if reader is None else reader(config, quantization)
    if hf_quant_config is not None:
        return _read_modelopt(config, hf_quant_config)
    if any(_values(config, key) for key in _HINTS):
        return None
    return Reading((), "bf16")


def _values(config: Mapping[str, Any], key: str) -> list[Any]:
    """Return what a config says under a key, at its top level and in `text_config`."""
    holders = (config, config.get("text_config"))
    found = [holder.get(key) for holder in holders if isinstance(holder, Mapping)]
    return [value for value in found if value is not None]


# --- one reader per quant_method ---------------------------------------------------------------


def _read_fp8(config: Mapping[str, Any], quantization: Mapping[str, Any]) -> Reading:
    exclusions = _exclusions(quantization)
    algorithm = quantization.get("moe_quant_algo")
    if algorithm is not None:
        # Written over an FP4 checkpoint: what was left alone keeps a precision that is not named.
        return Reading(exclusions, _modelopt_scheme(algorithm), excluded=None)
    if quantization.get("quant_algo") == "MIXED_PRECISION":
        raise Unclear
    return Reading(exclusions, _fp8_scheme(config, quantization))


def _fp8_scheme(config: Mapping[str, Any], quantization: Mapping[str, Any]) -> str | None:
    said = [*_values(config, "expert_dtype"), *_values(quantization, "expert_dtype")]
    if said:
        return _EXPERT_DTYPES.get(str(said[0])) if said.count(said[0]) == len(said) else None
    if any(str(name).startswith("deepseek_v4") for name in _values(config, "model_type")):
        return "mxfp4"  # mirrors vllm/models/deepseek_v4/quant_config.py::expert_dtype
    block = quantization.get("weight_block_size")
    if block is None:
        return "fp8_tensor"
    is_block = isinstance(block, list) and len(block) == 2  # noqa: PLR2004 - rows and columns
    return "fp8_block" if is_block and all(type(n) is int and n > 1 for n in block) else None


def _read_mxfp4(_config: Mapping[str, Any], quantization: Mapping[str, Any]) -> Reading:
    return Reading(_exclusions(quantization), "mxfp4")


def _read_mxfp8(_config: Mapping[str, Any], quantization: Mapping[str, Any]) -> Reading:
    return Reading(_exclusions(quantization), "mxfp8")


def _read_quark(_config: Mapping[str, Any], quantization: Mapping[str, Any]) -> Reading:
    written = _mapping(quantization.get("export")).get("weight_format", "real_quantized")
    if quantization.get("layer_type_quant_config") or written != "real_quantized":
        raise Unclear
    layers = _mapping(quantization.get("layer_quant_config"))
    rules = [(pattern, _quark_scheme(spec)) for pattern, spec in layers.items()]
    default = _quark_scheme(quantization.get("global_quant_config"))
    return Reading(_exclusions(quantization), default, rules)


def _quark_scheme(spec: Any) -> str | None:
    weight = spec.get("weight") if isinstance(spec, Mapping) else None
    if isinstance(weight, list):
        return _row(_QUARK_TWICE, *(_mapping(one).get("dtype") for one in weight))
    if not isinstance(weight, Mapping) or weight.get("is_dynamic"):
        return None
    dtype, qscheme = weight.get("dtype"), weight.get("qscheme")
    group = (weight.get("group_size"), weight.get("scale_format"))
    mx = _row(_QUARK_MX, dtype, *group) if qscheme == "per_group" else None
    return mx or _row(_QUARK, dtype, qscheme)


def _read_compressed_tensors(
    _config: Mapping[str, Any], quantization: Mapping[str, Any]
) -> Reading:
    groups = _mapping(quantization.get("config_groups"))
    if not groups:
        raise Unclear
    rules: list[Rule] = []
    by_class: set[str | None] = set()
    for group in map(_mapping, groups.values()):
        scheme = _compressed_scheme(group, quantization.get("format"))
        for target in _strings(group.get("targets")):
            if _CLASS_NAME.fullmatch(target) is None:
                rules.append((target, scheme))
            else:
                by_class.add(scheme if target in _EXPERT_CLASSES else None)
    # without a class, all that no target names is left alone
    default = by_class.pop() if len(by_class) == 1 else None if by_class else "bf16"
    return Reading(_exclusions(quantization), default, rules)


def _compressed_scheme(group: Mapping[str, Any], outer_format: Any) -> str | None:
    weights = _mapping(group.get("weights"))
    written = group.get("format") or outer_format
    fields = (weights.get(key) for key in ("type", "num_bits", "strategy"))
    return _row(_COMPRESSED_TENSORS, written, *fields)


def _read_modelopt(_config: Mapping[str, Any], quantization: Mapping[str, Any]) -> Reading:
    inner = _mapping(quantization.get("quantization", quantization))
    exclusions = _modelopt_exclusions(inner)
    algorithm = inner.get("quant_algo")
    if str(algorithm).upper() != "MIXED_PRECISION":
        return Reading(exclusions, _modelopt_scheme(algorithm))
    layers = _mapping(inner.get("quantized_layers"))
    if not layers:
        raise Unclear
    rules = [(name, _modelopt_scheme(_mapping(s).get("quant_algo"))) for name, s in layers.items()]
    return Reading(exclusions, "bf16", rules)


def _modelopt_scheme(algorithm: Any) -> str | None:
    return _MODELOPT.get(str(algorithm).upper())


def _modelopt_exclusions(quantization: Mapping[str, Any]) -> list[str]:
    """Return the exclusions; `layers.1*` is all of layer 1, and nothing of layer 10."""
    found: list[str] = []
    for entry in _exclusions(quantization):
        layer = _LAYER_GLOB.fullmatch(entry)
        found += [entry] if layer is None else [layer[1], f"{layer[1]}.*"]
    return found


_READERS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], Reading]] = {
    "fp8": _read_fp8,
    "deepseek_v4_fp8": _read_fp8,
    "mxfp4": _read_mxfp4,
    "mxfp8": _read_mxfp8,
    "quark": _read_quark,
    "compressed-tensors": _read_compressed_tensors,
    "modelopt": _read_modelopt,
    "modelopt_fp4": _read_modelopt,
    "modelopt_mixed": _read_modelopt,
}


def _exclusions(quantization: Mapping[str, Any]) -> list[str]:
    return [entry for key in _EXCLUSION_KEYS for entry in _strings(quantization.get(key))]


def _strings(value: Any) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise Unclear
    return value


def _mapping(value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise Unclear
    return value


def _row(table: Mapping[Any, str], *fields: Any) -> str | None:
    """Return the entry of a table, whatever JSON stands in the fields."""
    known = all(isinstance(field, str | int) for field in fields)
    return table.get(fields) if known else None
