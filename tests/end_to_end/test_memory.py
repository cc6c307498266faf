"""Memory is bounded by a few experts, whatever the model's size or the number of ranks."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import synthetic
import tiny

LIMIT_BYTES = 600_000_000
MODEL = tiny.Model("mxfp4_quark", experts=32, hidden=2048, intermediate=1536)

# Prints the peak of its own resident memory, in KiB. Not getrusage's, which a process inherits from
# the one that started it: pytest's may be larger.
PROGRAM = """
import sys
from aiter_prep import execute, make_plan, open_checkpoint, restore, verify

action, source, out, tp = sys.argv[1:]
if action == "execute":
    execute(make_plan(open_checkpoint(source), tp=int(tp)), out)
elif action == "verify":
    assert verify(out, source=open_checkpoint(source)).is_clean
else:
    restore(out, source)
with open("/proc/self/status") as status:
    print(next(line.split()[1] for line in status if line.startswith("VmHWM:")))
"""


def peak_of(action: str, source: Path, out: Path, tp: int) -> int:
    """Run something in a process of its own; return its peak of resident memory in bytes."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, action, str(source), str(out), str(tp)],
        check=True,
        capture_output=True,
        text=True,
    )
    return int(done.stdout) * 1024


@pytest.fixture(scope="module", params=[4, 16])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 4 or 16 layers: 0.7 or 2.6 GB."""
    folder = tmp_path_factory.mktemp("model") / "source"
    return synthetic.write_model(folder, replace(MODEL, layers=request.param))


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 8])
def test_nothing_takes_more_than_the_limit_whatever_the_size_and_the_ranks(
    tp: int, model: Path, tmp_path: Path
) -> None:
    assert peak_of("execute", model, tmp_path / "out", tp) < LIMIT_BYTES
    assert peak_of("verify", model, tmp_path / "out", tp) < LIMIT_BYTES
    assert peak_of("restore", tmp_path / "back", tmp_path / "out", tp) < LIMIT_BYTES
