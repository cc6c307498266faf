"""Compares what vLLM holds after our loader with what it holds after its own, in the engine.

Runs inside the conformance environment, never in the product's own:

    python -m conformance.loader_check JOBS.json --aiter AITER_SOURCES --gfx gfx950

`JOBS.json` is a list of `LoaderJob`s as objects. Each job is a process of its own, forked after the
engine was imported, and writes `result.json` into its folder: a list of differences, and counts.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from conformance import engine_dump, fake_rocm
from conformance.engine_dump import Job, as_rank, engine_config, start_one_process_world
from conformance.forks import run_each
from conformance.shuffle_spy import Shuffles, counted

RESULT = "result.json"


@dataclasses.dataclass(frozen=True)
class LoaderJob:
    """One prepared folder to compare with its source.

    Attributes:
        source: the checkpoint.
        prepared: what was made of it.
        out: the folder for the result.
        tp: the number of ranks.
        engine_args: arguments of vLLM's `EngineArgs` by name.
        expert_parallel: whether the ranks share the experts instead of their columns.
        variables: what the environment says.
    """

    source: Path
    prepared: Path
    out: Path
    tp: int
    engine_args: dict[str, Any]
    expert_parallel: bool
    variables: dict[str, str]

    def config(self, *, prepared: bool) -> Any:
        """vLLM's own configuration for the source, or for the prepared folder."""
        more = {"load_format": "aiter_prep"} if prepared else {}
        folder = self.prepared if prepared else self.source
        arguments = {**self.engine_args, **more}
        return engine_config(Job(folder, self.out, self.tp, arguments, self.expert_parallel))


def load(config: Any, fill: int) -> tuple[Any, Shuffles]:
    """Builds and loads a model through `load_model` of the configured loader."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    config.compilation_config.static_forward_context.clear()  # else layer names are duplicates
    with (
        set_current_vllm_config(config),
        fake_rocm.FillUninitialised(fill),
        counted() as shuffles,
    ):
        return get_model(vllm_config=config), shuffles


def expert_modules(model: Any) -> Iterator[tuple[str, Any]]:
    """The expert layers of a model, by path."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    return ((p, m) for p, m in model.named_modules() if isinstance(m, RoutedExperts))


def tensors_of(model: Any) -> dict[str, Any]:
    """Every tensor that a model holds, by name: parameters, buffers, plain attributes."""
    found: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    found |= dict(model.named_buffers(remove_duplicate=False))
    for path, module in model.named_modules():
        held = {n: t for n, t in vars(module).items() if isinstance(t, torch.Tensor)}
        found |= {f"{path}.{name}": tensor for name, tensor in held.items()}
    return found


def facts_of(tensor: Any) -> dict[str, Any]:
    """What must be equal besides the bytes."""
    return {
        "dtype": str(tensor.dtype),
        "device": str(tensor.device),
        "shape": tuple(tensor.shape),
        "stride": tuple(tensor.stride()),
        "is_shuffled": getattr(tensor, "is_shuffled", None),
        "class": type(tensor).__name__,
    }


def bytes_of(tensor: Any) -> Any:
    """The bytes of a tensor, flat."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).clone()


def described(value: Any) -> Any:
    """An object in words that two processes or two loads would agree on."""
    if isinstance(value, torch.Tensor):
        return {**facts_of(value), "sum": int(bytes_of(value).to(torch.int64).sum())}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: described(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    return (
        repr(value)
        if isinstance(value, (int, float, str, bool, type(None), tuple))
        else type(value).__name__
    )


_MODULE_ATTRIBUTES = ("weight_block_size", "is_aiter_converted", "intermediate_size_per_partition")
_NOTED = "_already_called_process_weights_after_loading"


def kernels_of(model: Any, masked: bool) -> dict[str, Any]:
    """What each expert layer runs with: method, kernels, quantisation config."""
    found: dict[str, Any] = {}
    for path, module in expert_modules(model):
        method = module.quant_method
        kernel = getattr(method, "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        finalize = getattr(kernel, "prepare_finalize", None)
        config = getattr(method, "moe_quant_config", None)
        attributes = {n: repr(getattr(module, n, None)) for n in (*_MODULE_ATTRIBUTES, _NOTED)}
        held = {
            t.data_ptr(): name for name, t in module.named_parameters(recurse=False) if t.numel()
        }
        found[path] = {
            "method": type(method).__name__,
            "kernel": [type(kernel).__name__, type(experts).__name__, type(finalize).__name__],
            "quant_config": _without_sums(described(config)) if masked else described(config),
            "scales_are_parameters": [held.get(p) for p in _pointers(config)],
            "attributes": attributes,
            "process_is_the_class's": "process_weights_after_loading" not in vars(method),
        }
    return found


def _without_sums(value: Any) -> Any:
    """The same, but for the sums of bytes: padding is part of some tensors."""
    if isinstance(value, dict):
        return {key: _without_sums(item) for key, item in value.items() if key != "sum"}
    return value


def _pointers(value: Any) -> list[int]:
    if isinstance(value, torch.Tensor):
        return [value.data_ptr()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [p for f in dataclasses.fields(value) for p in _pointers(getattr(value, f.name))]
    return []


def differences(theirs: Any, ours: Any, again: Any = None) -> tuple[list[str], dict[str, int]]:
    """Lines on what differs, and counts; `again` has other bytes wherever none was written."""
    held, mine = tensors_of(theirs), tensors_of(ours)
    other = held if again is None else tensors_of(again)
    found = [f"`{name}` is on one side only" for name in sorted(set(held) ^ set(mine))]
    counts = {"tensors": 0, "bytes": 0, "masked": 0}
    for name in sorted(set(held) & set(mine)):
        facts, own = facts_of(held[name]), facts_of(mine[name])
        if facts != own:
            found.append(f"`{name}` is {own}, the engine has {facts}")
            continue
        if held[name].is_meta:  # a part that this run leaves out
            continue
        expected = bytes_of(held[name])
        written = expected == bytes_of(other[name])
        wrong = (bytes_of(mine[name]) != expected) & written
        if wrong.any():
            found.append(f"`{name}`: {int(wrong.sum())} of {expected.numel()} bytes differ")
        counts["tensors"] += 1
        counts["bytes"] += int(written.sum())
        counts["masked"] += int((~written).sum())
    their_kernels, our_kernels = (kernels_of(m, again is not None) for m in (theirs, ours))
    for path in sorted(set(their_kernels) | set(our_kernels)):
        wanted, got = their_kernels.get(path), our_kernels.get(path)
        if wanted != got:
            found.append(f"`{path}`: {got}, the engine has {wanted}")
    return found, counts


def compare_rank(job: LoaderJob, configs: tuple[Any, Any], rank: int) -> dict[str, Any]:
    """Loads the model as `rank` in both ways and compares.

    Fresh memory is zero in both, as is the padding of ours that AITER never writes. Where that is
    not enough, the engine loads once more over other bytes, and what then differs is not compared.
    """
    source, prepared = configs
    with as_rank(rank, job.tp, job.expert_parallel):
        os.environ.pop("AITER_BF16_FP8_MOE_BOUND", None)
        theirs, shuffled = load(source, 0x00)
        variables = aiter_variables()
        os.environ.pop("AITER_BF16_FP8_MOE_BOUND", None)
        ours, spared = load(prepared, 0x00)
        seen = aiter_variables()
        found, counts = differences(theirs, ours)
        if found:
            found, counts = differences(theirs, ours, load(source, 0xFF)[0])
    if seen != variables:
        found.append(f"environment: {seen}, the engine sets {variables}")
    return {
        "rank": rank,
        "differences": found,
        **counts,
        "shuffles": [dataclasses.asdict(counts) for counts in (shuffled, spared)],
        "layers": len(list(expert_modules(ours))),
    }


def aiter_variables() -> dict[str, str]:
    """What kernels of AITER read from the environment."""
    return {name: value for name, value in os.environ.items() if name.startswith("AITER_")}


def reread_environment() -> None:
    """Lets the engine see variables that it read when it was imported."""
    from vllm._aiter_ops import rocm_aiter_ops

    rocm_aiter_ops.refresh_env_variables()


def run_job(job: LoaderJob) -> None:
    """Compares every rank and writes the result down."""
    job.out.mkdir(parents=True, exist_ok=True)
    os.environ.update(job.variables)
    try:
        reread_environment()
        configs = job.config(prepared=False), job.config(prepared=True)
        start_one_process_world(configs[0])
        result: dict[str, Any] = {
            "ranks": [compare_rank(job, configs, rank) for rank in range(job.tp)]
        }
    except Exception:  # noqa: BLE001  # whatever it was, the test shows it
        result = {"failure": traceback.format_exc()}
    import vllm

    result["version"] = vllm.__version__
    (job.out / RESULT).write_text(json.dumps(result, indent=1))


def main() -> None:
    """Runs the command line."""
    options = engine_dump.parse()
    facts = json.loads(options.jobs.read_text())
    paths = ("source", "prepared", "out")
    jobs = [LoaderJob(**{**job, **{key: Path(job[key]) for key in paths}}) for job in facts]
    engine_dump.install(options.aiter, options.gfx)
    torch.accelerator.max_memory_allocated = lambda *_args: 0  # for a message of the engine
    importlib.import_module("vllm.engine.arg_utils")
    importlib.import_module("vllm.model_executor.model_loader.utils")
    run_each(run_job, jobs)


if __name__ == "__main__":
    main()
