"""Writes what SGLang holds of each routed expert after loading a checkpoint with AITER selected.

Runs inside the conformance environment: see `moe_layer`. SGLang's own FusedMoE is built with its
own quantisation config, its own weight loader reads the experts, and its own method post-processes
them; only the models around the experts are left out, and what they pass on is said here.
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
_QUANTIZATION = "sglang.srt.layers.quantization"
# kernels and nothing else, compiled when they are imported
KERNELS = ("sglang.kernels.jit",)


def _give(name: str, value: Any) -> None:
    """Replaces a function wherever SGLang imported it."""
    for held in list(sys.modules.values()):
        space = getattr(held, "__dict__", {})
        if str(getattr(held, "__name__", "")).startswith("sglang") and name in space:
            space[name] = value


class SGLang:
    """SGLang's expert layers, in a process that has imported them."""

    def __init__(self, stubs: Any) -> None:
        self._layer, self._quantization, self._mxfp4, self._quark, self._gpt_oss, self._moe = (
            import_engine(
                stubs,
                "sglang.srt.layers.moe.fused_moe_triton.layer",
                _QUANTIZATION,
                f"{_QUANTIZATION}.mxfp4",
                f"{_QUANTIZATION}.quark.weights",
                "sglang.srt.models.gpt_oss",
                "sglang.srt.layers.moe.utils",
            )
        )
        for name in ("get_exec", "get_server_args"):
            _give(name, Settings)
        _give("get_global_expert_location_metadata", lambda: None)
        _give("create_kt_config_from_server_args", lambda *_a: None)
        _give("per_tensor_dequantize", _dequantise_as_a_gpu)
        _give(
            "create_moe_dispatcher",
            lambda *_a, **_k: SimpleNamespace(
                set_quant_config=lambda _config: None, expert_mask_gpu=None
            ),
        )

    def load(self, job: Job, rank: Rank) -> dict[str, torch.nn.Module]:
        """Builds, loads and post-processes every experts module of a job."""
        parallel = SimpleNamespace(
            moe_ep_size=rank.ep,
            moe_ep_rank=rank.ep_rank,
            moe_tp_size=rank.tp,
            moe_tp_rank=rank.tp_rank,
            tp_size=rank.tp * rank.ep,
            tp_rank=max(rank.tp_rank, rank.ep_rank),
        )
        _give("get_parallel", lambda: parallel)
        backend = getattr(self._moe.MoeRunnerBackend, job.backend.upper())
        _give("get_moe_runner_backend", lambda: backend)
        by_path: dict[str, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in tensors_of(job.source):
            path, experts, rest = name.partition(".experts.")
            if experts and not rest.endswith("weight_shape"):
                by_path.setdefault(f"{path}.experts", []).append((rest, tensor))
        modules = {path: self._build(job, path, tensors) for path, tensors in by_path.items()}
        for path, module in modules.items():
            self._fill(job, path, module, by_path[path])
            module.quant_method.process_weights_after_loading(module)
        return modules

    def _build(self, job: Job, path: str, tensors: list[tuple[str, torch.Tensor]]) -> Any:
        text = job.text
        ids = [rest.partition(".")[0] for rest, _ in tensors]
        listed = [int(first) for first in ids if first.isdecimal()]
        return self._layer.FusedMoE(
            num_experts=max(listed) + 1 if listed else len(tensors[0][1]),
            hidden_size=text["hidden_size"],
            intermediate_size=text["moe_intermediate_size"],
            layer_id=0,
            top_k=2,
            quant_config=self._quant_config(job),
            params_dtype=torch.bfloat16,
            prefix=path,
            **_model_arguments(text),
        )

    def _quant_config(self, job: Job) -> Any:
        found = job.quantization
        if found is None:
            return None
        method = found["quant_method"]
        # models/kimi_k3.py: packed MXFP4 of compressed-tensors is loaded as mxfp4
        if _is_kimi_k3(job.text) and method == "compressed-tensors":
            return self._mxfp4.Mxfp4Config(is_checkpoint_mxfp4_serialized=True)
        # model_loader/weight_utils.py tells every config how the model packs its modules
        found = {"packed_modules_mapping": {}, **found}
        config = self._quantization.get_quantization_config(method).from_config(found)
        if method == "fp8" and job.text.get("expert_dtype") == "fp4":
            config.is_fp4_experts = True  # configs/model_config.py
        return config

    def _fill(
        self, job: Job, path: str, module: Any, tensors: list[tuple[str, torch.Tensor]]
    ) -> None:
        if tensors[0][0].startswith(("gate_up_proj", "down_proj")):
            self._fill_gpt_oss(job, path, module, tensors)
            return
        if job.text["model_type"] == "gpt_oss":
            self._fill_gpt_oss_quark(job, path, module, tensors)
            return
        parameters = dict(module.named_parameters())
        for expert, shard, suffix, tensor in _parts(tensors):
            group = "w2" if shard == "w2" else "w13"
            name = f"{group}_{suffix}"
            parameter = parameters[name]
            parameter.weight_loader(
                parameter, tensor, f"{path}.{name}", shard_id=shard, expert_id=expert
            )

    def _model(self, job: Job, path: str, module: Any) -> Any:
        """What the loaders of gpt-oss ask of their model."""
        return SimpleNamespace(
            named_parameters=lambda: [
                (f"{path}.{name}", held) for name, held in module.named_parameters()
            ],
            get_submodule=lambda _name: module,
            config=SimpleNamespace(**job.text),
        )

    def _fill_gpt_oss(
        self, job: Job, path: str, module: Any, tensors: list[tuple[str, torch.Tensor]]
    ) -> None:
        named = [(f"{path}.{rest}", tensor) for rest, tensor in tensors]
        load = self._gpt_oss.GptOssForCausalLM._load_mxfp4_experts_weights
        load(self._model(job, path, module), iter(named))

    def _fill_gpt_oss_quark(
        self, job: Job, path: str, module: Any, tensors: list[tuple[str, torch.Tensor]]
    ) -> None:
        model = self._model(job, path, module)
        model._load_normal_weights = lambda *_a, **_k: None
        named = [(f"{path}.{rest}", tensor) for rest, tensor in tensors]
        self._quark.load_gptoss_weight_quark(model, named, is_nextn=False, weight_name_mapping=None)


def _parts(
    tensors: list[tuple[str, torch.Tensor]],
) -> Iterator[tuple[int, str, str, torch.Tensor]]:
    """Yields expert, shard, the parameter's name and the tensor, as models/*.py rename them."""
    for rest, tensor in tensors:
        expert, projection, suffix = rest.split(".")
        renamed = {"weight_packed": "weight", "scale": "weight_scale_inv"}.get(suffix, suffix)
        yield int(expert), _PROJECTIONS.get(projection, projection), renamed, tensor


def _is_kimi_k3(text: dict[str, Any]) -> bool:
    return text["model_type"] in {"kimi_k3", "kimi_linear"}


def _model_arguments(text: dict[str, Any]) -> dict[str, Any]:
    """What a model passes to its experts: models/gpt_oss.py, kimi_k3.py, minimax_m3.py."""
    if text["model_type"] == "gpt_oss":
        return {"with_bias": True, "gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}
    if _is_kimi_k3(text):
        return {
            "activation": "situ",
            "gemm1_alpha": 4.0,
            "gemm1_clamp_limit": 4.0,
            "gate_up_interleaved": False,
        }
    if text["model_type"].startswith("minimax_m3"):
        return {
            "gemm1_alpha": 1.702,
            "gemm1_beta": 1.0,
            "gemm1_clamp_limit": 7.0,
            "gate_up_interleaved": False,
        }
    return {}


def _dequantise_as_a_gpu(tensor: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiplies as a GPU does, which first rounds a 0-d float32 factor to fp16; a CPU does not."""
    return (tensor.float() * scale.half().float()).half()


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    options = parse(arguments, "sglang_dump")
    os.environ["SGLANG_USE_AITER"] = "1"
    sys.path.insert(0, str(options.engine))
    engine = SGLang(install(options.aiter, options.gfx, KERNELS))
    facts = {"engine": "sglang", "version": "0.5.23", "gfx": options.gfx}
    run_all(options.jobs, engine.load, facts)


if __name__ == "__main__":
    main()
