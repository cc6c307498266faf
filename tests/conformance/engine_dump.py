"""Writes what vLLM holds of each routed expert after loading a checkpoint with AITER selected.

Runs inside the conformance environment, never in the product's own:

    python -m conformance.engine_dump JOBS.json --aiter AITER_SOURCES --gfx gfx950

`JOBS.json` is a list of `Job`s as objects. Importing the engine takes far longer than a job, so the
process imports it once and forks for each job. What a job imported besides, its parent imports for
those that follow. A job that fails leaves `failure.txt` in its folder.

Every rank is built in turn in one process: loading needs no collective, so a world of one process
whose tensor-parallel group merely says that it is rank `r` of `tp` loads the same bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from conformance import fake_aiter, fake_rocm
from conformance.dump_format import FAILURE, RankDump, dump_path, write_dump
from conformance.engine_snapshot import snapshot

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ROCM_USE_AITER": "1",
    "VLLM_ROCM_USE_AITER_FP8BMM": "0",
}
"""What a run sets unless its caller says otherwise."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One checkpoint to load.

    Attributes:
        source: the checkpoint's folder.
        out: the folder that gets `rank-R.safetensors`, or `failure.txt`.
        tp: the number of ranks.
        engine_args: arguments of vLLM's `EngineArgs` by name, besides those set here.
        expert_parallel: whether the ranks share the experts instead of their columns.
    """

    source: Path
    out: Path
    tp: int = 1
    engine_args: dict[str, Any] = dataclasses.field(default_factory=dict)
    expert_parallel: bool = False


def job_from(facts: dict[str, Any]) -> Job:
    """The job that a JSON object describes."""
    return Job(**{**facts, "source": Path(facts["source"]), "out": Path(facts["out"])})


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="engine_dump")
    parser.add_argument("jobs", type=Path, help="a JSON list of jobs")
    parser.add_argument("--aiter", type=Path, required=True, help="AITER's sources")
    parser.add_argument("--gfx", default="gfx950", help="the chip that the platform reports")
    return parser.parse_args(arguments)


def install(aiter_sources: Path, gfx: str) -> None:
    """Puts the stand-ins in place; nothing of vLLM's may have been imported before."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_CACHE_ROOT"] = tempfile.mkdtemp(prefix="engine_dump_cache_")
    fake_aiter.install_aiter(aiter_sources, gfx)
    fake_rocm.install_rocm(gfx)
    fake_rocm.install_fp8_quantiser()
    fake_rocm.leave_out_routing_buffers()
    fake_rocm.install_torchvision()
    fake_rocm.inspect_models_here()


def engine_config(job: Job) -> Any:
    """vLLM's own configuration for the job, moved to the CPU."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = {
        "model": str(job.source),
        "dtype": "bfloat16",
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "skip_tokenizer_init": True,
        "tensor_parallel_size": job.tp,
        "enable_expert_parallel": job.expert_parallel,
        **job.engine_args,
    }
    config = EngineArgs(**arguments).create_engine_config()
    import torch

    config.device_config.device = torch.device("cpu")
    config.device_config.device_type = "cpu"
    return config


def start_one_process_world(config: Any) -> None:
    """Starts vLLM's process groups for a world of this one process."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    rendezvous = Path(tempfile.mkdtemp(prefix="engine_dump_")) / "rendezvous"
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            world_size=1,
            rank=0,
            distributed_init_method=f"file://{rendezvous}",
            local_rank=0,
            backend="gloo",
        )
        parallel_state.initialize_model_parallel(1, 1)


@contextlib.contextmanager
def as_rank(rank: int, size: int, expert_parallel: bool) -> Iterator[None]:
    """Lets this process say that it is `rank` of a tensor-parallel group of `size`."""
    from vllm.distributed import parallel_state

    groups = [parallel_state.get_tp_group()]
    if expert_parallel:
        groups.append(parallel_state.get_ep_group())
    before = [(g.world_size, g.rank_in_group, g.ranks) for g in groups]
    for group in groups:
        group.world_size, group.rank_in_group, group.ranks = size, rank, list(range(size))
    try:
        yield
    finally:
        for group, facts in zip(groups, before, strict=True):
            group.world_size, group.rank_in_group, group.ranks = facts


def load_model(config: Any, fill: int) -> Any:
    """Builds, loads and post-processes the model, uninitialised memory filled with `fill`."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import (
        initialize_model,
        process_weights_after_loading,
    )
    from vllm.utils.torch_utils import set_default_torch_dtype

    model_config = config.model_config
    config.compilation_config.static_forward_context.clear()  # else layer names are duplicates
    with (
        set_current_vllm_config(config),
        set_default_torch_dtype(model_config.dtype),
        fake_rocm.FillUninitialised(fill),
    ):
        with torch.device("cpu"):
            model = initialize_model(vllm_config=config, model_config=model_config)
        get_model_loader(config.load_config).load_weights(model, model_config)
        process_weights_after_loading(model, model_config, torch.device("cpu"))
    return model


def run_facts(job: Job, gfx: str, rank: int) -> dict[str, Any]:
    """What a reader must know of the run."""
    import vllm

    return {
        "engine": "vllm",
        "engine_version": vllm.__version__,
        "gfx": gfx,
        "tp": job.tp,
        "rank": rank,
        "expert_parallel": job.expert_parallel,
        "engine_args": job.engine_args,
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("VLLM_R", "AITER"))},
    }


def dump_rank(config: Any, job: Job, gfx: str, rank: int) -> RankDump:
    """Loads the model as `rank` twice and keeps the bytes of the first, masked by the second."""
    with as_rank(rank, job.tp, job.expert_parallel):
        modules, facts, data = snapshot(load_model(config, fill=0x00))
        _, _, again = snapshot(load_model(config, fill=0xFF))
    masks = {name: (data[name] != again[name]).astype("uint8") for name in data}
    masks = {name: mask for name, mask in masks.items() if mask.any()}
    for name, mask in masks.items():
        facts[name] = dataclasses.replace(facts[name], masked_bytes=int(mask.sum()))
    return RankDump(run_facts(job, gfx, rank), modules, facts, data, masks)


def run_job(job: Job, gfx: str) -> None:
    """Writes the dumps of every rank."""
    config = engine_config(job)
    start_one_process_world(config)
    for rank in range(job.tp):
        dump = dump_rank(config, job, gfx, rank)
        if not dump.modules:
            raise LookupError(f"no module of `{job.source}` holds fused experts")
        write_dump(dump, dump_path(job.out, rank))


def run_and_record(job: Job, gfx: str) -> None:
    """`run_job`; a failure is written down for whoever waits for the dumps."""
    job.out.mkdir(parents=True, exist_ok=True)
    (job.out / FAILURE).unlink(missing_ok=True)
    try:
        run_job(job, gfx)
    except Exception:
        (job.out / FAILURE).write_text(traceback.format_exc())
        raise


def run_in_child(job: Job, gfx: str, report: Connection) -> None:
    """`run_and_record`; tells through `report` which modules of vLLM it has imported."""
    try:
        run_and_record(job, gfx)
    finally:
        report.send([name for name in sys.modules if name.startswith("vllm.")])


def run_forked(job: Job, gfx: str) -> bool:
    """Runs a job in a child and imports what it imported; returns whether it went well."""
    receive, send = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=run_in_child, args=(job, gfx, send)
    )
    process.start()
    send.close()
    with contextlib.suppress(EOFError):  # the child was killed
        for name in receive.recv():
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    process.join()
    return process.exitcode == 0


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    options = parse(arguments)
    jobs = [job_from(facts) for facts in json.loads(options.jobs.read_text())]
    install(options.aiter, options.gfx)
    importlib.import_module("vllm.engine.arg_utils")
    importlib.import_module("vllm.model_executor.model_loader.utils")
    failed = 0
    for job in jobs:
        well = run_forked(job, options.gfx)
        failed += not well
        sys.stdout.write(f"{'dumped' if well else 'failed'} {job.out}\n")
        sys.stdout.flush()
    raise SystemExit(f"{failed} of {len(jobs)} jobs failed" if failed else 0)


if __name__ == "__main__":
    main()
