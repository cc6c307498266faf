"""Compares what runs with what a folder was prepared for, and refuses to serve wrong bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from aiter_prep.engines.mismatch import EngineMismatch, convert_command
from aiter_prep.engines.runtime_dtypes import runtime_dtype
from aiter_prep.engines.vllm.contract import (
    INTERLEAVED,
    SEPARATED,
    backend_of,
    class_name,
)
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from aiter_prep.engines.vllm.layers import ExpertLayer
    from aiter_prep.manifest import Manifest

_OWN = ("w13_", "w2_")
_HALVES = {"torch.bfloat16", "torch.float16"}

# what a parameter is allocated as, to what it is after loading, where these differ
_CONVERTED = {
    ("torch.uint8", "torch.float4_e2m1fn_x2"),
    ("torch.uint8", "torch.float8_e8m0fnu"),
    ("torch.float8_e4m3fn", "torch.float8_e4m3fnuz"),
    ("torch.bfloat16", "torch.float32"),  # biases of MXFP4 experts
    ("torch.int32", "torch.int8"),
}


def running_chip() -> str:
    """Return the name of the chip that vLLM runs on, or that of its platform if it is not AMD's."""
    from vllm.platforms import current_platform

    if not current_platform.is_rocm():
        return str(current_platform.device_name)
    from vllm.platforms import rocm

    return str(rocm._GCN_ARCH).partition(":")[0]  # noqa: SLF001  # what the platform goes by


def check_chip(manifest: Manifest) -> None:
    """Check that the chip is the one that the folder was prepared for.

    Raises:
        EngineMismatch: It is another.
    """
    wanted, found = manifest.target["gfx"], running_chip()
    if wanted != found:
        hint = f"serve it on {printable(str(wanted))}"
        if found.startswith("gfx"):
            hint += f", or prepare it for this chip: {convert_command(manifest, gfx=found)}"
        raise EngineMismatch(
            f"the folder was prepared for {printable(str(wanted))}, this process runs on {found}",
            hint,
        )


def rank_of(parallel: Any, manifest: Manifest) -> int:
    """Return the rank of this process, as the folder counts them.

    Args:
        parallel: vLLM's `FusedMoEParallelConfig`, which has data and context parallelism in it.
        manifest: The manifest.

    Raises:
        EngineMismatch: The ranks share the experts in another way than the folder's do.
    """
    target = manifest.target
    running = (1, parallel.ep_size) if parallel.use_ep else (parallel.tp_size, 1)
    if running != (target["tp"], target["ep"]):
        command = convert_command(manifest, tp=running[0], ep=running[1])
        raise EngineMismatch(
            f"the folder was prepared for tp {target['tp']} and ep {target['ep']}, the experts of "
            f"this engine are shared by tp {running[0]} and ep {running[1]}",
            f"prepare it for these ranks: {command}, or start the engine with "
            f"{_parallel_flags(target)}",
        )
    if parallel.enable_eplb:
        raise EngineMismatch(
            "expert-parallel load balancing moves experts while the engine runs",
            "start the engine without --enable-eplb",
        )
    rank = int(parallel.ep_rank if parallel.use_ep else parallel.tp_rank)
    if rank not in target["ranks"]:
        held = ", ".join(map(str, target["ranks"]))
        raise EngineMismatch(
            f"this process is rank {rank}, the folder holds {held}",
            f"prepare every rank: {convert_command(manifest)}",
        )
    return rank


def _parallel_flags(target: Any) -> str:
    if target["ep"] != 1:
        return f"`--tensor-parallel-size {target['ep']} --enable-expert-parallel`"
    return f"`--tensor-parallel-size {target['tp']}`"


def check_since(layer: ExpertLayer, version: str) -> None:
    """Check that the running version prepares such a layer as the target says.

    Raises:
        EngineMismatch: Only newer ones do.
    """
    since = layer.known.since
    if _numbers(version) < _numbers(since):
        name = class_name(layer.method).rpartition(".")[2]
        raise EngineMismatch(
            f"experts as those of `{printable(layer.path)}`, which `{name}` prepares, are served "
            f"from vLLM {since} on, this one is {version}",
            f"`pip install 'vllm>={since}'`, or serve the source itself",
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def check_layer(layer: ExpertLayer, manifest: Manifest) -> None:
    """Check that the engine wants of a layer exactly what the folder has for it.

    Raises:
        EngineMismatch: It selected another backend, wants another row order, other experts, other
            sizes, other parameters or other dtypes.
    """
    _check_method(layer, manifest)
    _check_experts(layer, manifest)
    _check_sizes(layer, manifest)
    _check_parameters(layer, manifest)


def _check_method(layer: ExpertLayer, manifest: Manifest) -> None:
    where, block = f"`{printable(layer.path)}`", layer.block
    name = class_name(layer.method).rpartition(".")[2]
    if block["scheme"] not in layer.known.schemes:
        raise EngineMismatch(
            f"the experts of {where} were prepared from {block['scheme']}, the engine made a "
            f"`{name}` for them",
            "start the engine without --quantization",
        )
    backend = backend_of(layer.method)
    if backend not in layer.known.row_orders:
        wanted = " or ".join(map(str, layer.known.row_orders))
        raise EngineMismatch(
            f"the engine selected backend `{backend}` for {where}, the folder was prepared for "
            f"{wanted}",
            "start the engine with `VLLM_ROCM_USE_AITER=1 vllm serve ...`, and without "
            "--moe-backend unless the folder was prepared with it",
        )
    order = layer.known.row_orders[backend]
    order = order if isinstance(order, str) else order(layer.method)
    if order != block["row_order"]:
        raise EngineMismatch(
            f"rows of gate and up of {where} lie {block['row_order']}, `{name}` with backend "
            f"`{backend}` and the flags of this run wants them {order}",
            "run with the flags and VLLM_ROCM_USE_AITER_* variables that it was prepared for, or "
            f"prepare it for these: {convert_command(manifest, _options(layer.method, order))}",
        )


def _options(method: Any, row_order: str) -> dict[str, str]:
    """Return what `convert` is told for the order that flags of the run ask for.

    They choose the dtype of activations, and the order follows from it: see `Mxfp4MoEMethod` in
    the table of methods. Everything else has the order that `convert` chooses by itself.
    """
    is_k3 = getattr(method, "is_k3_situ_aiter", False)
    changed = INTERLEAVED if is_k3 else SEPARATED
    by_flags = hasattr(method, "is_k3_situ_aiter") and row_order == changed
    return {"activation_dtype": "fp8" if is_k3 else "fp4"} if by_flags else {}


def _check_experts(layer: ExpertLayer, manifest: Manifest) -> None:
    """Compare the global ids of the local experts, in their order."""
    held = layer.tensors["w13_weight"].record if "w13_weight" in layer.tensors else None
    if held is None or held.experts is None or layer.module._expert_map is None:  # noqa: SLF001
        return
    ids = layer.module._expert_map.cpu()  # noqa: SLF001
    local = [int(i) for i in torch.argsort(ids, stable=True) if ids[i] >= 0]
    if local != list(range(*held.experts)):
        raise EngineMismatch(
            f"the folder has experts {list(range(*held.experts))} for `{printable(layer.path)}`, "
            f"this rank runs {local}",
            "start the engine with --expert-placement-strategy "
            f"{manifest.target['placement']}, or prepare it anew: {convert_command(manifest)}",
        )


def _check_sizes(layer: ExpertLayer, manifest: Manifest) -> None:
    config, block = layer.module.moe_config, layer.block
    sizes = {
        "hidden size": (block["hidden"], config.hidden_dim_unpadded),
        "padded hidden size": (block["padded_hidden"], config.hidden_dim),
        "padded intermediate size per rank": (
            block["padded_intermediate_per_rank"],
            config.intermediate_size_per_partition,
        ),
    }
    for what, (held, wanted) in sizes.items():
        if held != wanted:
            raise EngineMismatch(
                f"the {what} of `{printable(layer.path)}` is {held} in the folder, the engine "
                f"wants {wanted}",
                f"prepare the checkpoint that the engine was given: {convert_command(manifest)}",
            )


def _check_parameters(layer: ExpertLayer, manifest: Manifest) -> None:
    own = {name: p for name, p in layer.module.named_parameters(recurse=False) if _is_own(name)}
    ours = {name: ours for ours, name in (layer.known.renames or {}).items()}
    wanted = {ours.get(name, name): p for name, p in own.items()}
    wanted = {name: p for name, p in wanted.items() if name not in layer.known.leftovers}
    again = f"prepare it again: {convert_command(manifest)}"
    for names, who in (
        (set(wanted) - set(layer.tensors), "the engine wants, and the folder lacks"),
        (set(layer.tensors) - set(wanted), "the folder has, and the engine does not know"),
    ):
        if names:
            shown = ", ".join(f"`{printable(name)}`" for name in sorted(names))
            raise EngineMismatch(f"{who} {shown} of `{printable(layer.path)}`", again)
    for name, parameter in wanted.items():
        _check_parameter(layer, name, parameter, again)


def _is_own(name: str) -> bool:
    return name.startswith(_OWN)


def _check_parameter(layer: ExpertLayer, name: str, parameter: Any, again: str) -> None:
    record = layer.tensors[name].record
    before, after = str(parameter.dtype), str(runtime_dtype(record))
    shapes = tuple(parameter.shape), record.shape
    # scales change their shape on the way; that of a weight is the allocated one, unless flat
    is_weight = name in {"w13_weight", "w2_weight"}
    if (is_weight and shapes[0] != shapes[1]) or not _may_become(before, after):
        if {before, after} <= _HALVES:
            again = f"start the engine with `--dtype {after.removeprefix('torch.')}`"
        raise EngineMismatch(
            f"`{printable(name)}` of `{printable(layer.path)}` is {after} {list(shapes[1])} in the "
            f"folder, the engine made room for {before} {list(shapes[0])}",
            again,
        )


def _may_become(before: str, after: str) -> bool:
    return before == after or (before, after) in _CONVERTED
