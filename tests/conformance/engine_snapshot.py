"""What a loaded vLLM model holds of its routed experts: facts, bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from conformance.dump_format import Bytes, ModuleFacts, TensorFacts

_BACKENDS = ("mxfp4_backend", "fp8_backend", "unquantized_backend", "mxfp8_backend", "backend")
_OWN = ("w13_", "w2_", "shared_w")
"""How the names of an expert's own tensors begin; a router's bias hangs on the same module."""
_ATTRIBUTES = ("weight_block_size", "is_aiter_converted", "intermediate_pad")


def expert_modules(model: Any) -> Iterator[tuple[str, Any]]:
    """The modules that hold fused experts, each once, by path."""
    for path, module in model.named_modules():
        if any(name.startswith("w13_weight") for name, _ in module.named_parameters(recurse=False)):
            yield path, module


def tensors_of(module: Any) -> Iterator[tuple[str, str, Any]]:
    """The module's own tensors: kind, leaf name, tensor."""
    import torch

    named = dict(module.named_parameters(recurse=False))
    plain = {name: held for name, held in vars(module).items() if isinstance(held, torch.Tensor)}
    for kind, found in (("parameter", named), ("attribute", plain)):
        for name, tensor in found.items():
            if name.startswith(_OWN):
                yield kind, name, tensor


def bytes_of(tensor: Any) -> Bytes:
    """The tensor's bytes, flat."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    return np.array(flat.view(torch.uint8).numpy(), dtype=np.uint8)


def tensor_facts(kind: str, tensor: Any, masked_bytes: int) -> TensorFacts:
    """What is known of `tensor` besides its bytes."""
    return TensorFacts(
        runtime_dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        is_shuffled=bool(getattr(tensor, "is_shuffled", False)),
        kind=kind,
        masked_bytes=masked_bytes,
    )


def module_facts(module: Any) -> ModuleFacts:
    """What vLLM decided for the experts in `module`."""
    method, moe = module.quant_method, module.moe_config
    backends = [getattr(method, name) for name in _BACKENDS if getattr(method, name, None)]
    kernel = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    attributes = {
        name: repr(getattr(module, name)) for name in _ATTRIBUTES if hasattr(module, name)
    }
    if kernel is not None:
        attributes["kernel"] = type(kernel).__name__
    return ModuleFacts(
        method=type(method).__name__,
        backend=str(backends[0]) if backends else None,
        activation=str(getattr(module, "activation", None)),
        hidden=(moe.hidden_dim_unpadded, moe.hidden_dim),
        intermediate=(
            moe.intermediate_size_per_partition_unpadded,
            moe.intermediate_size_per_partition,
        ),
        local_experts=moe.num_local_experts,
        attributes=attributes,
    )


def snapshot(model: Any) -> tuple[dict[str, ModuleFacts], dict[str, TensorFacts], dict[str, Bytes]]:
    """Facts and bytes of all experts in `model`."""
    modules: dict[str, ModuleFacts] = {}
    facts: dict[str, TensorFacts] = {}
    data: dict[str, Bytes] = {}
    for path, module in expert_modules(model):
        modules[path] = module_facts(module)
        for kind, leaf, tensor in tensors_of(module):
            facts[f"{path}.{leaf}"] = tensor_facts(kind, tensor, 0)
            data[f"{path}.{leaf}"] = bytes_of(tensor)
    return modules, facts, data
