"""Runs conversions in child processes that kill themselves at a chosen moment.

A program of its own, started by killing.py: it imports everything once and forks for every run.
It reads requests from its input, one JSON object a line, and answers each with a line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any, NoReturn

from aiter_prep.execution import Part, execute, execute_part, seal
from aiter_prep.plan import Plan, make_plan
from aiter_prep.storage import swap
from aiter_prep.storage.checkpoint import open_checkpoint

# Audit events that announce a change of the file system; they come before the change.
AUDITED = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "fcntl.flock"}
PATCHED = ("write", "pwrite", "fsync", "ftruncate")


class Bomb:
    """Counts changes of the file system and kills the process before the chosen one.

    Args:
        kill_at: Number of the change before which it kills; 0: never.
        torn: Let half of the bytes of a write through first.
    """

    def __init__(self, kill_at: int, *, torn: bool) -> None:
        self.count = 0
        self._kill_at = kill_at
        self._torn = torn
        self._lock = threading.Lock()

    def arm(self) -> None:
        """Begin to count."""
        sys.addaudithook(self._audit)
        for name in PATCHED:
            setattr(os, name, self._counted(getattr(os, name)))

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        is_write = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (event in AUDITED or is_write) and self._is_due():
            kill()

    def _counted(self, real: Any) -> Any:
        def counted(descriptor: int, *arguments: Any) -> Any:
            if self._is_due():
                if self._torn and arguments:
                    data = arguments[0]
                    if not isinstance(data, int):
                        real(descriptor, data[: len(data) // 2], *arguments[1:])
                kill()
            return real(descriptor, *arguments)

        return counted

    def _is_due(self) -> bool:
        with self._lock:
            self.count += 1
            return self.count == self._kill_at


def kill() -> NoReturn:
    """Die as by `kill -9`."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def convert(plan: Plan, request: dict[str, Any]) -> None:
    """Convert all of it."""
    execute(plan, request["out"], workers=request["workers"], **request["options"])


def convert_part(plan: Plan, request: dict[str, Any]) -> None:
    """Convert a part."""
    part = Part(**request["options"])
    execute_part(plan, request["out"], part, workers=request["workers"])


def complete(_plan: Plan, request: dict[str, Any]) -> None:
    """Seal what parts have written, perhaps where two names cannot be exchanged in one step."""
    if not request["options"].get("exchange", True):
        swap._exchange = lambda one, other: False  # noqa: ARG005 - as it is called
    seal(request["out"])


ACTS = {"convert": convert, "part": convert_part, "seal": complete}


def run(request: dict[str, Any], answer: int) -> None:
    """Convert as a request says, and write how many changes that took."""
    checkpoint = open_checkpoint(request["source"])
    plan = make_plan(checkpoint, tp=request["tp"], max_shard_bytes=request["max_shard_bytes"])
    write = os.write
    bomb = Bomb(request["kill_at"], torn=request["torn"])
    bomb.arm()
    ACTS[request["act"]](plan, request)
    write(answer, str(bomb.count).encode())


def serve(request: dict[str, Any]) -> dict[str, int]:
    """Run a request in a child; return the signal that ended it, its exit code and its count."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            run(request, writing)
        except BaseException as fault:  # noqa: BLE001 - the parent reports it
            sys.stderr.write(f"{fault!r}\n")
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    is_killed = os.WIFSIGNALED(status)
    return {
        "signal": os.WTERMSIG(status) if is_killed else 0,
        "exit_code": 0 if is_killed else os.WEXITSTATUS(status),
        "count": int(said or b"0"),
    }


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.write(json.dumps(serve(json.loads(line))) + "\n")
        sys.stdout.flush()
