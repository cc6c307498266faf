"""Kills conversions and looks at what they leave."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import tiny
from aiter_prep.errors import DataMismatch
from aiter_prep.execution import execute
from aiter_prep.plan import make_plan
from aiter_prep.storage import swap
from aiter_prep.storage.checkpoint import open_checkpoint
from aiter_prep.verification import verify
from faults import ANY, COMMITS, Fault, Injector, in_child, kill_after, kill_before
from prepared import JOURNAL, LOCK, MANIFEST, contents, stamps

WORKERS = 2
SHARD_BYTES = 20_000  # so that there are a dozen shards


@dataclass
class Scene:
    """A source, and what becomes of it.

    Attributes:
        folder: Where all of it lies.
        exchange: Whether two folders can be exchanged in one step.
        expected: Digest of every file of the prepared folder.
        before: Size, time and digest of every file of the source.
    """

    folder: Path
    exchange: bool = True
    expected: dict[str, str] = field(default_factory=dict)
    before: dict[str, tuple[int, int, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tiny.write(self.source, kind="mxfp4_quark", hidden=64, intermediate=64, layers=3)
        (self.source / "tokenizer.json").write_text('{"tiny": true}', "utf-8")
        self.before = stamps(self.source)
        self.convert()
        self.expected = contents(self.out)
        self.clear()

    @property
    def source(self) -> Path:
        """The source."""
        return self.folder / "source"

    @property
    def out(self) -> Path:
        """The prepared folder; alone in its own, so that nothing beside it is missed."""
        return self.folder / "place" / "out"

    def convert(self, *, resume: bool = False, overwrite: bool = False, tp: int = 2) -> None:
        """Convert the source."""
        plan = make_plan(open_checkpoint(self.source), tp=tp, max_shard_bytes=SHARD_BYTES)
        with patch.object(swap, "_exchange", self._exchange(swap._exchange)):
            execute(plan, self.out, workers=WORKERS, resume=resume, overwrite=overwrite)

    def _exchange(self, real: Callable[[Path, Path], bool]) -> Callable[[Path, Path], bool]:
        return lambda one, other: self.exchange and real(one, other)

    def clear(self) -> None:
        """Remove what was written."""
        import shutil

        shutil.rmtree(self.out.parent, ignore_errors=True)

    def calls(self, convert: Callable[[], None]) -> list[str]:
        """Return the system calls of a conversion, in their order."""
        with Injector() as injector:
            convert()
        return injector.calls


def points(calls: Sequence[str], count: int) -> Iterator[Fault]:
    """Yield kills: `count` spread over the calls, and before and after each that commits."""
    chosen = {1 + number * len(calls) // count for number in range(count)}
    for at, call in enumerate(calls, 1):
        if at in chosen or call in COMMITS:
            yield Fault(ANY, at, kill_before)
        if call in COMMITS:
            yield Fault(ANY, at, kill_after)


def some(faults: Iterator[Fault], count: int) -> list[Fault]:
    """Return some of many kills, evenly."""
    every = list(faults)
    return every[:: max(1, len(every) // count)]


def check_kill(scene: Scene, fault: Fault) -> bool:
    """Kill a conversion, look, go on, look again; return whether the kill came in time."""
    scene.clear()
    with_fault = in_child(lambda: _under(fault, scene.convert))
    assert with_fault in (0, -signal.SIGKILL), with_fault
    _check_left(scene)
    _finish(scene)
    _check_whole(scene)
    return with_fault != 0


def _under(fault: Fault, convert: Callable[[], None]) -> None:
    with Injector([fault]):
        convert()


def _finish(scene: Scene) -> None:
    """Go on with the run; what is sealed and clean is finished already."""
    if (scene.out / MANIFEST).exists() and not (scene.out / JOURNAL).exists():
        return
    scene.convert(resume=True)


def _check_left(scene: Scene) -> None:
    """Check what a kill left: whole files, and a manifest only with all of them."""
    found = contents(scene.out) if scene.out.exists() else {}
    final = {name: digest for name, digest in found.items() if not name.startswith(".")}
    assert final.items() <= scene.expected.items(), sorted(final.items() - scene.expected.items())
    if MANIFEST in final:
        assert final == scene.expected
        assert verify(scene.out).is_clean
    else:
        _check_unfinished(scene)
    assert stamps(scene.source) == scene.before


def _check_unfinished(scene: Scene) -> None:
    try:
        verify(scene.out)
    except DataMismatch:
        return
    raise AssertionError("a folder without a manifest was verified")


def _check_whole(scene: Scene) -> None:
    found = contents(scene.out)
    assert {n: d for n, d in found.items() if n != LOCK} == scene.expected
    assert verify(scene.out).is_clean
    assert [path.name for path in scene.out.parent.iterdir()] == [scene.out.name]
    assert stamps(scene.source) == scene.before


def check_kill_of_overwrite(scene: Scene, fault: Fault) -> bool:
    """Kill a conversion that replaces another folder; one of the two must be there, whole."""
    scene.clear()
    scene.convert(tp=1)
    old = contents(scene.out)
    code = in_child(lambda: _under(fault, lambda: scene.convert(overwrite=True)))
    assert code in (0, -signal.SIGKILL), code
    if scene.exchange:
        _check_old_or_new(scene, old)
    swap.recover(scene.out)  # what every run does first
    _check_old_or_new(scene, old)
    scene.convert(overwrite=True, resume=True)
    _check_whole(scene)
    return code != 0


def _check_old_or_new(scene: Scene, old: dict[str, str]) -> None:
    found = {n: d for n, d in contents(scene.out).items() if n not in (JOURNAL, LOCK)}
    assert found in (old, scene.expected)
    assert verify(scene.out).is_clean
