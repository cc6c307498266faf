"""Jobs for engines whose expert layers are built one by one, and the dumps that they leave.

    python -m conformance.sglang_dump JOBS.json --engine SOURCES --aiter SOURCES --gfx gfx950

A job is loaded for each rank in turn, with uninitialised memory filled twice over, so that bytes
that the engine never writes can be told. A job that fails leaves `failure.txt` in its folder.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conformance.dump_format import FAILURE, RankDump, TensorFacts, dump_path, write_dump
from conformance.fake_rocm import FillUninitialised

_OWN = ("w13_", "w2_")
_FILLS = (0x00, 0x5A)


@dataclass(frozen=True)
class Job:
    """One checkpoint to load.

    Attributes:
        source: the checkpoint's folder.
        out: the folder that gets `rank-R.safetensors`, or `failure.txt`.
        ranks: the number of ranks.
        expert_parallel: whether the ranks share the experts instead of their columns.
        backend: what the engine is told of its kernels.
    """

    source: Path
    out: Path
    ranks: int
    expert_parallel: bool = False
    backend: str = "auto"

    @classmethod
    def of(cls, facts: dict[str, Any]) -> Job:
        """The job that a JSON object describes."""
        return cls(**{**facts, "source": Path(facts["source"]), "out": Path(facts["out"])})

    @property
    def config(self) -> dict[str, Any]:
        """The checkpoint's config.json."""
        found: dict[str, Any] = json.loads((self.source / "config.json").read_text("utf-8"))
        return found

    @property
    def text(self) -> dict[str, Any]:
        """What the config says of the language model."""
        return {**self.config, **self.config.get("text_config", {})}

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The quantisation config."""
        found = self.config.get("quantization_config", self.text.get("quantization_config"))
        return found if isinstance(found, dict) else None


@dataclass(frozen=True)
class Rank:
    """Which rank of which kind a layer is built for."""

    tp: int
    tp_rank: int
    ep: int
    ep_rank: int


# Builds, loads and post-processes every experts module of a job for a rank: path to module.
Load = Callable[[Job, Rank], dict[str, torch.nn.Module]]


def tensors_of(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the checkpoint's tensors by name, as an engine reads them."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                yield name, file.get_tensor(name)


def own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yields the tensors of an experts module: kind, name, tensor."""
    named = dict(module.named_parameters(recurse=False))
    plain = {n: held for n, held in vars(module).items() if isinstance(held, torch.Tensor)}
    for kind, found in (("parameter", named), ("attribute", plain)):
        for name, tensor in found.items():
            if name.startswith(_OWN):
                yield kind, name, tensor


def raw(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The tensor's bytes, flat."""
    flat = tensor.detach().contiguous().reshape(-1)
    return np.array(flat.view(torch.uint8).numpy(), np.uint8)


def dump_rank(job: Job, rank: Rank, load: Load, facts: dict[str, Any]) -> RankDump:
    """Loads a rank twice and returns what it holds."""
    tensors: dict[str, TensorFacts] = {}
    data: dict[str, Any] = {}
    masks: dict[str, Any] = {}
    for fill in _FILLS:
        with FillUninitialised(fill), torch.no_grad():
            modules = load(job, rank)
        for path, module in modules.items():
            for kind, leaf, tensor in own_tensors(module):
                name = f"{path}.{leaf}"
                held = raw(tensor)
                if name in data:
                    masks[name] = (data[name] != held).astype(np.uint8)
                    continue
                data[name] = held
                tensors[name] = TensorFacts(
                    runtime_dtype=str(tensor.dtype).removeprefix("torch."),
                    shape=tuple(tensor.shape),
                    stride=tuple(tensor.stride()),
                    is_shuffled=bool(getattr(tensor, "is_shuffled", False)),
                    kind=kind,
                )
    masks = {name: mask for name, mask in masks.items() if mask.any()}
    return RankDump(facts, {}, tensors, data, masks)


def run_job(job: Job, load: Load, facts: dict[str, Any]) -> None:
    """Writes the dumps of every rank, or why there are none."""
    job.out.mkdir(parents=True, exist_ok=True)
    try:
        for number in range(job.ranks):
            one = (job.ranks, number)
            rank = Rank(1, 0, *one) if job.expert_parallel else Rank(*one, 1, 0)
            write_dump(dump_rank(job, rank, load, facts), dump_path(job.out, number))
    except Exception:  # noqa: BLE001 - whatever stops an engine is what the test reports
        (job.out / FAILURE).write_text(traceback.format_exc(), "utf-8")


def parse(arguments: list[str] | None, program: str) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("jobs", type=Path, help="a JSON list of jobs")
    parser.add_argument("--engine", type=Path, required=True, help="the engine's sources")
    parser.add_argument("--aiter", type=Path, required=True, help="AITER's sources")
    parser.add_argument("--gfx", default="gfx950", help="the chip")
    return parser.parse_args(arguments)


def run_all(listing: Path, load: Load, facts: dict[str, Any]) -> None:
    """Runs each job in a fork of this process, which has the engine imported."""
    context = multiprocessing.get_context("fork")
    for entry in json.loads(listing.read_text("utf-8")):
        process = context.Process(target=run_job, args=(Job.of(entry), load, facts))
        process.start()
        process.join()
        sys.stdout.write(f"{entry['out']}: {process.exitcode}\n")
        sys.stdout.flush()
