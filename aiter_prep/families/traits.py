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
        model; `activation`: the activation function.
    """
    config = quantization_config_of(checkpoint.config)
    if config is None and checkpoint.hf_quant_config is not None:
        config = {"quant_method": "modelopt", **checkpoint.hf_quant_config}
    return {
        "method": _method(config),
        "model": text_model_type(checkpoint.config),
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
