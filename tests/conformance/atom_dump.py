"""Writes what ATOM holds of each routed expert after loading a checkpoint.

Runs inside the conformance environment: see `moe_layer`. ATOM's own FusedMoE is built with its own
reading of the quantisation config, its own weight loader reads the experts, and its own method
post-processes them; only the models around the experts are left out, and what they pass on is said
here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from conformance.engine_stubs import Settings, import_engine, install
from conformance.moe_layer import Job, Rank, parse, run_all, tensors_of

_PROJECTIONS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
# models/gpt_oss.py, weights_mapping
_GPT_OSS = {
    "gate_up_proj_blocks": "w13_weight",
    "down_proj_blocks": "w2_weight",
    "gate_up_proj_scales": "w13_weight_scale",
    "down_proj_scales": "w2_weight_scale",
    "gate_up_proj_bias": "w13_bias",
    "down_proj_bias": "w2_bias",
    "gate_up_proj.weight_scale": "w13_weight_scale",
    "gate_up_proj.input_scale": "w13_input_scale",
    "gate_up_proj.weight": "w13_weight",
    "gate_up_proj.bias": "w13_bias",
    "down_proj.weight_scale": "w2_weight_scale",
    "down_proj.input_scale": "w2_input_scale",
    "down_proj.weight": "w2_weight",
    "down_proj.bias": "w2_bias",
}


def _give(name: str, value: Any) -> None:
    """Replaces a function wherever ATOM imported it."""
    for held in list(sys.modules.values()):
        space = getattr(held, "__dict__", {})
        if str(getattr(held, "__name__", "")).startswith("atom") and name in space:
            space[name] = value


class Atom:
    """ATOM's expert layers, in a process that has imported them."""

    def __init__(self, stubs: Any) -> None:
        self._moe, self._config, self._v4, self._gpt_oss = import_engine(
            stubs,
            "atom.model_ops.moe",
            "atom.config",
            "atom.models.deepseek_v4",
            "atom.models.gpt_oss",
        )
        _give("is_rocm_aiter_fusion_shared_expert_enabled_for_quant_config", lambda *_a, **_k: 0)

    def load(self, job: Job, rank: Rank) -> dict[str, torch.nn.Module]:
        """Builds, loads and post-processes every experts module of a job."""
        group = SimpleNamespace(
            world_size=max(rank.tp, rank.ep), rank_in_group=max(rank.tp_rank, rank.ep_rank)
        )
        alone = SimpleNamespace(world_size=1, rank_in_group=0)
        _give("get_tp_group", lambda: group)
        _give("get_dp_group", lambda: alone)
        _give("get_ep_group", lambda: group)
        by_path: dict[str, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in tensors_of(job.source):
            path, experts, rest = name.partition(".experts.")
            if experts and not rest.endswith("weight_shape"):
                by_path.setdefault(f"{path}.experts", []).append((rest, tensor))
        modules: dict[str, torch.nn.Module] = {}
        for path, tensors in by_path.items():
            settings = Settings(
                enable_expert_parallel=rank.ep > 1,
                torch_dtype=torch.bfloat16,
                tensor_parallel_size=group.world_size,
                max_num_batched_tokens=16,
                moe_backend="auto",
                compilation_config=SimpleNamespace(static_forward_context={}),
                parallel_config=Settings(data_parallel_size_local=1, data_parallel_size=1),
            )
            _give("get_current_atom_config", lambda settings=settings: settings)
            modules[path] = self._experts(job, path, tensors)
        return modules

    def _experts(self, job: Job, path: str, tensors: list[tuple[str, torch.Tensor]]) -> Any:
        text = job.text
        ids = [rest.partition(".")[0] for rest, _ in tensors]
        listed = [int(first) for first in ids if first.isdecimal()]
        is_gpt_oss = text["model_type"] == "gpt_oss"
        module = self._moe.FusedMoE(
            num_experts=max(listed) + 1 if listed else len(tensors[0][1]),
            top_k=2,
            hidden_size=text["hidden_size"],
            intermediate_size=text["moe_intermediate_size"],
            quant_config=self._quant_config(job),
            prefix=path,
            has_bias=is_gpt_oss,
            config=SimpleNamespace(quantization_config=job.quantization),
            # models/deepseek_v4.py, models/kimi_k3.py
            pad_align=128 if text["model_type"] in {"deepseek_v4", "kimi_linear"} else None,
        )
        if is_gpt_oss:
            self._fill_gpt_oss(module, tensors)
            self._gpt_oss._interleave_swiglu_weights(module)
        else:
            self._fill(path, module, tensors)
        module.quant_method.process_weights_after_loading(module)
        return module

    def _quant_config(self, job: Job) -> Any:
        config = SimpleNamespace(
            quantization_config=job.quantization,
            torch_dtype=torch.bfloat16,
            dtype=torch.bfloat16,
            **{name: value for name, value in job.text.items() if name != "quantization_config"},
        )
        if job.text["model_type"] == "deepseek_v4":
            return self._v4.make_v4_quant_config(config)
        return self._config.QuantizationConfig(config)

    def _fill(self, path: str, module: Any, tensors: list[tuple[str, torch.Tensor]]) -> None:
        for expert, shard, suffix, tensor in _parts(tensors):
            name = f"{'w2' if shard == 'w2' else 'w13'}_{suffix}"
            parameter = getattr(module, name)
            module.weight_loader(
                parameter, tensor, f"{path}.{name}", shard_id=shard, expert_id=expert
            )

    def _fill_gpt_oss(self, module: Any, tensors: list[tuple[str, torch.Tensor]]) -> None:
        for rest, tensor in tensors:
            first, _, leaf = rest.partition(".")
            expert, spelled = (int(first), leaf) if first.isdecimal() else (None, rest)
            parameter = getattr(module, _GPT_OSS[spelled])
            module.weight_loader(parameter, tensor.clone(), expert_id=expert)


def _parts(
    tensors: list[tuple[str, torch.Tensor]],
) -> Iterator[tuple[int, str, str, torch.Tensor]]:
    """Yields expert, shard, the parameter's name and the tensor, as the loader renames them."""
    names = {"weight_packed": "weight", "scale": "weight_scale", "weight_scale_inv": "weight_scale"}
    for rest, tensor in tensors:
        expert, projection, suffix = rest.split(".")
        shard = _PROJECTIONS.get(projection, projection)
        yield int(expert), shard, names.get(suffix, suffix), tensor


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    options = parse(arguments, "atom_dump")
    os.environ["ATOM_PCP_MOE_MERGE"] = "0"  # asks for process groups
    sys.path.insert(0, str(options.engine))
    engine = Atom(install(options.aiter, options.gfx))
    facts = {"engine": "atom", "version": "ffdf3bb", "gfx": options.gfx}
    run_all(options.jobs, engine.load, facts)


if __name__ == "__main__":
    main()
