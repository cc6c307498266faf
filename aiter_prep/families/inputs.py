"""What a config says of the inputs of quantised experts, module by module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiter_prep.families.promises import quantization_config_of
from aiter_prep.families.quantized_modules import Reading, Rule, Unclear, scheme_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PLAIN, OTHER = "bf16", "other"
FP4_BITS, FP8_BITS = 4, 8


def inputs_of(config: Mapping[str, Any], experts_path: str) -> str:
    """Return what the experts of a module take.

    Quark and compressed-tensors say it, and may say it otherwise for some layers.

    Args:
        config: The model's `config.json`.
        experts_path: Path of the module.

    Returns:
        `bf16`, `fp4`, `fp8_static`, `fp8_dynamic` or `other`.
    """
    quantization = quantization_config_of(config) or {}
    reading = _reading(quantization)
    try:
        return scheme_of(experts_path, reading) or OTHER
    except Unclear:
        return OTHER


def _reading(quantization: Mapping[str, Any]) -> Reading:
    """Return the rules of a config; those of Quark first, where it has any."""
    everywhere = _section(quantization, "global_quant_config")
    layers = _section(quantization, "layer_quant_config")
    if everywhere or layers:
        return Reading(
            (),
            _kind(everywhere, "input_tensors"),
            [(pattern, _kind(_section(layers, pattern), "input_tensors")) for pattern in layers],
        )
    rules = list(_group_rules(quantization))
    by_class = {kind for target, kind in rules if _is_class(target)}
    default = by_class.pop() if len(by_class) == 1 else OTHER if by_class else PLAIN
    return Reading((), default, [rule for rule in rules if not _is_class(rule[0])])


def _is_class(target: str) -> bool:
    return target.isidentifier() and target[0].isupper()


def _group_rules(quantization: Mapping[str, Any]) -> Iterator[Rule]:
    """Yield the targets of compressed-tensors, a class such as `Linear` or the name of a module."""
    groups = _section(quantization, "config_groups")
    for group in (_section(groups, name) for name in groups):
        targets = group.get("targets")
        for target in targets if isinstance(targets, list) else ["Linear"]:
            yield str(target), _kind(group, "input_activations")


def _section(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def _kind(holder: Mapping[str, Any], key: str) -> str:
    spec = holder.get(key)
    if spec is None:
        return PLAIN
    if not isinstance(spec, dict):
        return OTHER
    dynamic = spec.get("is_dynamic", spec.get("dynamic"))
    if spec.get("dtype") == "fp4" or spec.get("num_bits") == FP4_BITS:
        return "fp4"
    if str(spec.get("dtype", "")).startswith("fp8") or spec.get("num_bits") == FP8_BITS:
        return "fp8_dynamic" if dynamic else "fp8_static"
    return OTHER
