"""Makes system calls fail, stall or kill, each at the n-th of them, to see what is left.

The calls of the program under test go through `os`; an `Injector` stands between. As a program,
`python tests/faults.py CALL AT ACTION -- ARGUMENTS` runs the command line with one such fault.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    from typing_extensions import Self

READS = ("preadv",)
WRITES = ("pwrite", "write", "ftruncate")
COMMITS = ("fsync", "rename", "replace", "unlink", "mkdir", "rmdir")
CALLS = (*READS, *WRITES, *COMMITS, "open")
ANY = "any"

Action = Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]


def fail(number: int) -> Action:
    """Return an action that fails with an error of the system."""

    def act(_call: str, _function: Callable[..., Any], _arguments: tuple[Any, ...]) -> Any:
        raise OSError(number, os.strerror(number))

    return act


def kill_before(_call: str, _function: Callable[..., Any], _arguments: tuple[Any, ...]) -> Any:
    """End this process at once, the call undone."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_after(_call: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """End this process at once, the call done."""
    function(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)


def stop(number: int) -> Action:
    """Return an action that sends this process a signal, and goes on."""

    def act(_call: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        os.kill(os.getpid(), number)
        return function(*arguments)

    return act


def delay(seconds: float) -> Action:
    """Return an action that waits first."""

    def act(_call: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        time.sleep(seconds)
        return function(*arguments)

    return act


def then(what: Callable[[], object]) -> Action:
    """Return an action that does something else first."""

    def act(_call: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        what()
        return function(*arguments)

    return act


def short(call: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Read or write less than was asked for."""
    first, data, *rest = arguments
    if call == "preadv":
        data = [memoryview(data[0])[: max(1, len(data[0]) // 3)]]
    elif call in ("pwrite", "write"):
        data = memoryview(data)[: max(1, len(data) // 3)]
    return function(first, data, *rest)


ACTIONS: dict[str, Action] = {
    "EIO": fail(errno.EIO),
    "ENOSPC": fail(errno.ENOSPC),
    "kill": kill_before,
    "kill-after": kill_after,
    "short": short,
    "slow": delay(0.05),
    "SIGINT": stop(signal.SIGINT),
    "SIGTERM": stop(signal.SIGTERM),
}


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        call: Name of the call, or `any`.
        at: Which of these calls, from 1 on; 0: every one.
        action: What happens instead.
    """

    call: str
    at: int
    action: Action


class Injector:
    """Stands between the program and `os`, in all threads; counts calls and brings faults.

    Args:
        faults: What goes wrong.
    """

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.calls: list[str] = []
        self._faults = tuple(faults)
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._patches = ExitStack()

    @property
    def counts(self) -> Counter[str]:
        """How often each call was made."""
        return Counter(self.calls)

    def __enter__(self) -> Self:
        for name in CALLS:
            self._patches.enter_context(patch.object(os, name, self._wrapped(name)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._patches.close()

    def _wrapped(self, name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                self.calls.append(name)
                self._counts.update((name, ANY))
                due = [f for f in self._faults if self._is_due(f, name)]
            if not due:
                return real(*arguments, **options)
            return due[0].action(name, lambda *given: real(*given, **options), arguments)

        return call

    def _is_due(self, fault: Fault, name: str) -> bool:
        return fault.call in (name, ANY) and fault.at in (0, self._counts[fault.call])


def in_child(function: Callable[[], object]) -> int:
    """Run a function in a child; return its exit code, or the negative number of a signal.

    A child that raises leaves with 1. It shares nothing with this process but the disk.
    """
    with warnings.catch_warnings():
        # from 3.12 on Python warns of other threads; those of a test runner hold nothing we need
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        function()
        code = 0
    finally:
        os._exit(code)


def main(argv: Sequence[str]) -> int:
    """Run the command line with a fault."""
    from aiter_prep.cli import main as run

    call, at, action, separator, *arguments = argv
    assert separator == "--", argv
    with Injector([Fault(call, int(at), ACTIONS[action])]):
        return run(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
