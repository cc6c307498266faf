"""Nothing opens a socket, starts a program or unpickles anything for a local folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from prepared import small

# Python reports these itself, from C as well: docs.python.org/3/library/audit_events.html
WATCHED = (
    *("socket.", "urllib.", "http.", "ftplib.", "pickle.", "subprocess.", "ctypes.dlopen"),
    *("os.system", "os.exec", "os.posix_spawn", "os.fork"),
)
PROGRAM = """
import json, sys
seen, armed = [], []
def look(event, arguments):
    if armed and event.startswith(tuple(json.loads(sys.argv[1]))):
        seen.append([event, repr(arguments)[:200]])
sys.addaudithook(look)
from aiter_prep.cli import main
import aiter_prep.cli.app
armed.append(True)
code = main(sys.argv[2:])
armed.clear()
sys.stderr.write("\\n" + json.dumps([code, seen]))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return small(tmp_path_factory.mktemp("network"))


@pytest.mark.parametrize(
    "argv",
    [
        ["inspect", "SOURCE"],
        ["inspect", "OUT"],
        ["convert", "SOURCE", "NEW", "--gfx", "gfx950", "--tp", "2"],
        ["convert", "SOURCE", "NEW", "--gfx", "gfx950", "--tp", "1", "--dry-run"],
        ["verify", "OUT"],
        ["verify", "OUT", "--source", "SOURCE"],
        ["verify", "OUT", "--sha256sums", "NEW"],
        ["restore", "OUT", "NEW"],
        ["layouts"],
    ],
    ids=" ".join,
)
def test_a_command_on_local_folders_opens_no_socket(
    argv: list[str], made: tuple[Path, Path], tmp_path: Path
) -> None:
    places = {"SOURCE": made[0], "OUT": made[1], "NEW": tmp_path / "new"}
    command = [str(places.get(word, word)) for word in argv]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(WATCHED), *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    code, seen = json.loads(done.stderr.rpartition("\n")[2])
    assert code == 0, done.stderr
    assert [event for event in seen if not is_harmless(*event)] == []


def is_harmless(event: str, arguments: str) -> bool:
    """Return whether an event leads nowhere: `None` is the program's own symbols."""
    return event == "ctypes.dlopen" and arguments.startswith(("(None", "('libc"))
