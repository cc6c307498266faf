"""What a config says that decides an engine's path, besides the tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiter_prep.families.blocks import text_model_type
from aiter_prep.families.promises import quantization_config_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiter_prep.storage.checkpoint import Checkpoint

NONE = "none"


def traits_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the traits of a checkpoint.

    Returns:
        `method`: the quantisation method, or `none`; `model`: `model_type` of the language
        model; `inputs`: what its quantised experts take: `bf16`, `fp4`, `fp8_static`,
        `fp8_dynamic`, `other`; `activation`: the activation function.
    """
    config = quantization_config_of(checkpoint.config)
    if config is None and checkpoint.hf_quant_config is not None:
        config = {"quant_method": "modelopt", **checkpoint.hf_quant_config}
    return {
        "method": _method(config),
        "model": text_model_type(checkpoint.config),
        "inputs": _inputs(config or {}),
        "activation": _activation(checkpoint.config),
    }


def _method(config: Mapping[str, Any] | None) -> str:
    if config is None:
        return NONE
    method = config.get("quant_method", "modelopt" if "quant_algo" in config else NONE)
    return method if isinstance(method, str) else NONE


def _activation(config: Mapping[str, Any]) -> str:
    for holder in (config.get("text_config"), config):
        value = holder.get("hidden_act") if isinstance(holder, dict) else None
        if isinstance(value, str):
            return value
    return "silu"


def _inputs(config: Mapping[str, Any]) -> str:
    """Return what Quark and compressed-tensors say of the inputs of quantised layers."""
    specs = [_section(config, "global_quant_config").get("input_tensors")]
    specs += [
        group.get("input_activations")
        for group in _section(config, "config_groups").values()
        if isinstance(group, dict)
    ]
    kinds = {_kind(spec) for spec in specs if spec is not None}
    if not kinds:
        return "bf16"
    return kinds.pop() if len(kinds) == 1 else "other"


def _section(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def _kind(spec: Any) -> str:
    if not isinstance(spec, dict):
        return "other"
    dynamic = spec.get("is_dynamic", spec.get("dynamic"))
    if spec.get("dtype") == "fp4" or spec.get("num_bits") == 4:  # noqa: PLR2004 - bits
        return "fp4"
    if str(spec.get("dtype", "")).startswith("fp8") or spec.get("num_bits") == 8:  # noqa: PLR2004
        return "fp8_dynamic" if dynamic else "fp8_static"
    return "other"
