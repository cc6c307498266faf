"""Prepared folders hold, byte for byte, what vLLM holds after loading the same checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from aiter_prep.cli import main
from aiter_prep.plan import make_plan
from aiter_prep.storage.checkpoint import open_checkpoint
from aiter_prep.targets.table import target_named
from conformance.checkpoint_values import RawTensor
from conformance.compare import compare
from conformance.dump_format import dump_path, read_dump
from conformance.engine_run import group_name, group_of
from conformance.make_checkpoints import model_of
from conformance.paths import PATHS, ConformancePath
from conformance.recipes import RECIPES, Place

Dump = Callable[[str, int], Path]

TARGET = "vllm"
NO_RULE = 11
"""The exit code where no rule covers a family, dtype, layout, target or split."""


def in_one_process(path: ConformancePath) -> tuple[pytest.MarkDecorator, ...]:
    """The marks of a test that needs the engine: xdist gives tests of one process to one worker."""
    return pytest.mark.vllm, pytest.mark.xdist_group(group_name("vllm", group_of(path)))


CASES = [
    pytest.param(name, tp, id=f"{name}-tp{tp}", marks=in_one_process(path))
    for name, path in PATHS.items()
    for tp in path.tps
]
ACCEPTED = [case for case in CASES if not PATHS[str(case.values[0])].refused]
REFUSED = [name for name, path in PATHS.items() if path.refused]
RECIPE_CASES = [case for case in CASES if case.values[0] in RECIPES]


def convert(path: ConformancePath, source: Path, out: Path, tp: int) -> tuple[int, str]:
    """Prepares `source` as a user would; returns the exit code, and what was said."""
    command = ["convert", source, out, "--gfx", path.gfx, "--target", TARGET]
    command += ["--ep" if path.expert_parallel else "--tp", tp, *path.convert]
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as said:
        code = main([str(word) for word in command])
    return code, said.getvalue()


def source_path(module: str, tensors: dict[str, RawTensor]) -> str:
    """The path of the experts in the source, for the engine's module."""
    tail = module[module.index("layers.") :].removesuffix(".routed_experts")
    name = next(name for name in tensors if f"{tail}." in name)
    return name[: name.index(tail) + len(tail)]


def projections(experts: str, tensors: dict[str, RawTensor]) -> tuple[str, str, str]:
    """The names of gate, down and up below `experts`."""
    llama = any(name.startswith(f"{experts}.0.gate_proj.") for name in tensors)
    return ("gate_proj", "down_proj", "up_proj") if llama else ("w1", "w2", "w3")


@pytest.mark.parametrize(("name", "tp"), ACCEPTED)
def test_a_prepared_folder_holds_what_vllm_holds(
    name: str, tp: int, dump: Dump, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = dump(name, tp)
    out = tmp_path / "out"
    code, said = convert(PATHS[name], checkpoint(name), out, tp)
    assert code == 0, said
    result = compare(out, [dump_path(folder, rank) for rank in range(tp)])
    assert result.tensors, "nothing was compared"
    assert not result.differences, str(result)


@pytest.mark.vllm
def test_every_path_of_the_targets_table_is_compared(checkpoint: Callable[[str], Path]) -> None:
    taken: list[object] = []
    for name, path in PATHS.items():
        if path.refused or path.convert == ("--fuse-shared-experts",):
            continue
        words = dict(zip(path.convert[::2], path.convert[1::2], strict=True))
        options = {flag[2:].replace("-", "_"): value for flag, value in words.items()}
        source = open_checkpoint(checkpoint(name))
        tp = 1 if path.expert_parallel else path.tps[0]
        plan = make_plan(source, tp=tp, target=TARGET, gfx=path.gfx, options=options)
        taken += [block.path for block in plan.blocks]
    missed = [p for p in target_named(TARGET).paths if not any(p is held for held in taken)]
    assert [(p.scheme, dict(p.when)) for p in missed] == []


def test_the_documents_name_every_path_that_is_compared() -> None:
    text = (Path(__file__).parents[2] / "docs" / "targets.md").read_text("utf-8")
    _, _, listed = text.partition("### What was compared with vLLM's own code")
    listed, _, _ = listed.partition("### How the comparison runs")
    named = set(re.findall(r"`([a-z0-9_]+)`", listed))
    assert named == {name for name, path in PATHS.items() if not path.refused}


@pytest.mark.vllm
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_rule_covers_is_refused(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    path = PATHS[name]
    code, said = convert(path, checkpoint(name), tmp_path / "out", path.tps[0])
    assert code == NO_RULE, said


@pytest.mark.parametrize(("name", "tp"), CASES)
def test_the_engine_takes_the_path_of_the_table(name: str, tp: int, dump: Dump) -> None:
    for rank in range(tp):
        modules = read_dump(dump_path(dump(name, tp), rank)).modules
        assert {f"{m.method} {m.backend}" for m in modules.values()} == {PATHS[name].chosen}


@pytest.mark.parametrize(("name", "tp"), RECIPE_CASES)
def test_a_recipe_in_plain_numpy_gives_what_vllm_holds(name: str, tp: int, dump: Dump) -> None:
    path = PATHS[name]
    tensors, _ = model_of(name)
    for rank in range(tp):
        held = read_dump(dump_path(dump(name, tp), rank))
        for module in held.modules:
            experts = source_path(module, tensors)
            names = projections(experts, tensors)
            place = Place(tensors, experts, names, path.sizes, rank, tp)
            for leaf, expected in RECIPES[name](place).items():
                tensor = f"{module}.{leaf}"
                mask = held.masks.get(tensor, np.zeros(1, dtype=np.uint8)).astype(bool)
                wrong = (expected.reshape(-1) != held.data[tensor]) & ~mask
                assert not wrong.any(), f"rank {rank}: `{tensor}`: {int(wrong.sum())} bytes differ"
