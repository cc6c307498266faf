"""The versions of vLLM whose expert layers are known, and the classes that prepare them.

A version or a class that is not in these tables is refused: what an engine holds after loading
changed more than once a year, and shuffled bytes in the wrong place give no error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from aiter_prep.engines.mismatch import EngineMismatch, convert_command
from aiter_prep.engines.vllm import kernels
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aiter_prep.manifest import Manifest

TARGETS_BY_VERSION: dict[str, frozenset[str]] = {
    # the expert layers of 0.32 hold the same bytes as those of 0.33: tests/conformance
    "0.32": frozenset({"vllm@0.33"}),
    "0.33": frozenset({"vllm@0.33"}),
}
"""The running version to the targets that it can serve."""

KEEPS_PARAMETERS: frozenset[str] = frozenset({"0.33"})
"""Versions whose `replace_parameter` keeps the parameter object and changes what it holds."""

SEPARATED, INTERLEAVED, AS_SOURCE = "separated", "interleaved_16", "as_source"


RowOrders: TypeAlias = "dict[str | None, str | Callable[[Any], str]]"


@dataclass(frozen=True, slots=True)
class Method:
    """What is known of a class of the engine that prepares an expert layer.

    Attributes:
        schemes: Schemes of the source that it is for.
        row_orders: Name of the backend that it selected to the order of the rows of w13, or to
            what tells it from the method; `None` is a method without a choice of backends.
        rebuild: Builds the kernel objects over tensors that are in place.
        renames: Our name of a parameter to that which it has until it is post-processed.
        leftovers: Parameters that belong to the source's form alone and stay as they are.
        since: The first version that prepares such a layer as the target says.
    """

    schemes: frozenset[str]
    row_orders: RowOrders
    rebuild: Callable[[Any, Any], None]
    renames: Mapping[str, str] | None = None
    leftovers: frozenset[str] = frozenset()
    since: str = "0.32"


def _mxfp4_row_order(method: Any) -> str:
    """Return the row order of `Mxfp4MoEMethod`, which depends on flags of the run.

    Mirrors vllm/model_executor/layers/fused_moe/oracle/mxfp4.py,
    convert_weight_to_mxfp4_moe_kernel_format.
    """
    if method.is_k3_situ_aiter:
        from vllm._aiter_ops import rocm_aiter_ops

        interleaved = rocm_aiter_ops.is_fused_moe_situv2_gate_up_interleaved()
        return INTERLEAVED if interleaved else SEPARATED
    return SEPARATED if method.moe.use_mxfp4_w4a4_dsv4 else INTERLEAVED


_FP8 = frozenset({"fp8_block", "fp8_channel", "fp8_tensor"})
_MXFP4 = frozenset({"mxfp4"})
_MXFP8 = frozenset({"mxfp8"})
_AITER: RowOrders = {"AITER": SEPARATED}
_PACKED = {"w13_weight": "w13_weight_packed", "w2_weight": "w2_weight_packed"}
_GPT_OSS: RowOrders = {"AITER_MXFP4_BF16": INTERLEAVED, "AITER_MXFP4_MXFP4": AS_SOURCE}
_BY_FLAGS: RowOrders = {"AITER_MXFP4_BF16": _mxfp4_row_order}
_AITER_MXFP8: RowOrders = {"AITER_MXFP8": INTERLEAVED}

_MOE = "vllm.model_executor.layers.fused_moe."
_QUANT = "vllm.model_executor.layers.quantization."
_CT = _QUANT + "compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_"

METHODS: dict[str, Method] = {
    _MOE + "unquantized_fused_moe_method.UnquantizedFusedMoEMethod": Method(
        frozenset({"bf16"}), _AITER, kernels.unquantized
    ),
    _QUANT + "fp8.Fp8MoEMethod": Method(_FP8, _AITER, kernels.fp8_by_itself),
    _QUANT + "quark.quark_moe.QuarkW8A8Fp8MoEMethod": Method(_FP8, _AITER, kernels.fp8),
    _CT + "w8a8_fp8.CompressedTensorsW8A8Fp8MoEMethod": Method(_FP8, _AITER, kernels.fp8),
    _QUANT + "modelopt.ModelOptFp8MoEMethod": Method(_FP8, _AITER, kernels.fp8),
    _QUANT + "modelopt.ModelOptMxFp8FusedMoE": Method(
        _MXFP8, _AITER_MXFP8, kernels.mxfp8_of_modelopt
    ),
    _CT + "w8a8_mxfp8.CompressedTensorsW8A8Mxfp8MoEMethod": Method(
        _MXFP8, _AITER_MXFP8, kernels.mxfp8, since="0.33"
    ),
    _QUANT + "quark.quark_moe.QuarkW8A8Mxfp8MoEMethod": Method(
        _MXFP8, _AITER_MXFP8, kernels.mxfp8, since="0.33"
    ),
    _QUANT + "mxfp4.Mxfp4MoEMethod": Method(_MXFP4, _BY_FLAGS, kernels.mxfp4_by_itself),
    _CT + "w4a8_mxfp4.CompressedTensorsW4A8Mxfp4MoEMethod": Method(
        _MXFP4, _BY_FLAGS, kernels.mxfp4_by_itself, _PACKED
    ),
    _QUANT + "mxfp4.GptOssMxfp4MoEMethod": Method(_MXFP4, _GPT_OSS, kernels.mxfp4),
    _QUANT + "quark.quark_moe.QuarkOCP_MX_MoEMethod": Method(_MXFP4, _GPT_OSS, kernels.mxfp4),
    _QUANT + "quark.quark_moe.QuarkW4A8Fp8MoEMethod": Method(
        frozenset({"int4_fp8"}),
        {None: SEPARATED},
        kernels.on_first_use,
        since="0.33",  # 0.32 shuffles the weights, and does not flag them
    ),
    _CT + "w4a16_flydsl.CompressedTensorsW4A16FlydslMoEMethod": Method(
        frozenset({"int4"}),
        {None: SEPARATED},
        kernels.flydsl,
        leftovers=frozenset({"w13_weight_shape", "w2_weight_shape"}),
    ),
}
"""Class of a method to what is known of it; a subclass is another class."""

LAYERS: frozenset[str] = frozenset(
    {
        _MOE + "routed_experts.RoutedExperts",
        "vllm.model_executor.models.gpt_oss.GptOssRoutedExperts",
    }
)
"""Classes of expert layers that hold the tensors of their method and nothing else."""

_BACKENDS = ("unquantized_backend", "fp8_backend", "mxfp8_backend", "mxfp4_backend")


def class_name(thing: object) -> str:
    """Return the full name of the class of an object."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def backend_of(method: Any) -> str | None:
    """Return the name of the backend that a method selected, or None if it has no choice."""
    found = [getattr(method, name) for name in _BACKENDS if hasattr(method, name)]
    return str(found[0].name) if found else None


def running_version() -> str:
    """Return major and minor version of the vLLM that runs.

    Raises:
        EngineMismatch: Nothing is known of that version.
    """
    import vllm

    match = re.match(r"(\d+\.\d+)(?![\d])", vllm.__version__)
    version = match[1] if match else ""
    if version not in TARGETS_BY_VERSION:
        raise EngineMismatch(
            f"vLLM {printable(vllm.__version__)} is not known to this version of aiter-prep, which "
            f"knows {', '.join(sorted(TARGETS_BY_VERSION))}",
            "install a version of vLLM that it knows, or a newer aiter-prep: "
            "`pip install --upgrade aiter-prep`",
        )
    return version


def check_target(manifest: Manifest, version: str) -> None:
    """Check that the running version can serve what a folder was prepared for.

    Raises:
        EngineMismatch: It cannot.
    """
    name = manifest.target["name"]
    served = TARGETS_BY_VERSION[version]
    if name not in served:
        wanted = max(served)
        raise EngineMismatch(
            f"the folder was prepared for `{printable(str(name))}`, vLLM {version} serves "
            f"{', '.join(sorted(served))}",
            f"prepare it for this engine: {convert_command(manifest, name=wanted)}",
        )
