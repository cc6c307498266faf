"""Asks the engine to load what it must refuse, and writes down what it said.

Runs inside the conformance environment, never in the product's own:

    python -m conformance.loader_refusals CASES.json --aiter AITER_SOURCES --gfx gfx950

`CASES.json` is a list of `Case`s as objects. Each is a process of its own, forked after the engine
was imported, and writes the text of the exception, or `loaded`, into its file.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from conformance import engine_dump
from conformance.engine_dump import Job, as_rank, engine_config, start_one_process_world
from conformance.forks import run_each
from conformance.loader_check import reread_environment

LOADED = "loaded"


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing to refuse.

    Attributes:
        out: the file for what the engine said.
        model: the folder to load.
        tp: the number of ranks of the engine.
        rank: the rank that loads.
        engine_args: arguments of vLLM's `EngineArgs` by name.
        expert_parallel: whether the ranks share the experts.
        variables: what the environment says besides.
        version: what the engine says that its version is, or None for the truth.
        without_aiter: whether AITER cannot be imported when weights are loaded.
        other_aiter: whether AITER lays out tensors in another way.
        again: whether weights are asked for once more after the model was loaded.
    """

    out: str
    model: str
    tp: int = 2
    rank: int = 0
    engine_args: dict[str, Any] = dataclasses.field(default_factory=dict)
    expert_parallel: bool = False
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    version: str | None = None
    without_aiter: bool = False
    other_aiter: bool = False
    again: bool = False


def run_case(case: Case) -> None:
    """Loads, and writes down how that ended."""
    os.environ.update(case.variables)
    try:
        reread_environment()
        load(case)
        said = LOADED
    except BaseException as fault:  # noqa: BLE001  # the test reads what it says
        said = f"{type(fault).__name__}: {fault}"
    Path(case.out).write_text(said)


def load(case: Case) -> None:
    """Loads as an engine does, through its configuration."""
    import vllm
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model, get_model_loader

    if case.version:
        vllm.__version__ = case.version
    arguments = case.engine_args
    config = engine_config(
        Job(Path(case.model), Path(case.out), case.tp, arguments, case.expert_parallel)
    )
    start_one_process_world(config)
    if case.without_aiter:
        sys.modules["aiter.ops.shuffle"] = None  # type: ignore[assignment]  # as if it was not there
    if case.other_aiter:
        shuffle = importlib.import_module("aiter.ops.shuffle")
        shuffle.__dict__["shuffle_weight"] = lambda weight, *_args, **_more: weight
    with as_rank(case.rank, case.tp, case.expert_parallel), set_current_vllm_config(config):
        model = get_model(vllm_config=config)
        if case.again:
            loader = get_model_loader(config.load_config)
            list(loader.get_all_weights(config.model_config, model))


def main() -> None:
    """Runs the command line."""
    options = engine_dump.parse()
    engine_dump.install(options.aiter, options.gfx)
    torch.accelerator.max_memory_allocated = lambda *_args: 0  # for a message of the engine
    importlib.import_module("vllm.engine.arg_utils")
    importlib.import_module("vllm.model_executor.model_loader.utils")
    run_each(run_case, [Case(**facts) for facts in json.loads(options.jobs.read_text())])


if __name__ == "__main__":
    main()
