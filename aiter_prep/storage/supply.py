"""Shards of a source that lies elsewhere: brought when they are needed, for as long as they are."""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiter_prep.errors import BadSource, InvalidUsage
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

DEFAULT_LIMIT_BYTES = 50_000_000_000
CHUNK_BYTES = 8 * 1024 * 1024
WAIT_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Promise:
    """What is promised of a shard that is not here yet.

    Attributes:
        size: Its bytes.
        algorithm: `sha256`; `git` for git's SHA-1 of a small file; empty where nothing is promised.
        digest: The digest in hexadecimal digits.
        version: What a store calls the state that it is in, or empty.
    """

    size: int
    algorithm: str = ""
    digest: str = ""
    version: str = ""

    def check(self, path: Path) -> None:
        """Read a whole file and compare it with the promise.

        Raises:
            BadSource: It has other bytes.
        """
        found = path.stat().st_size
        name = printable(path.name)
        if found != self.size:
            raise BadSource(
                f"`{name}` came with {found} bytes, {self.size} were promised",
                "nothing was made of it: convert again, with --resume",
            )
        if not self.algorithm:
            return
        digest = hashlib.sha256() if self.algorithm == "sha256" else _git_digest(self.size)
        buffer = memoryview(bytearray(CHUNK_BYTES))
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
        if digest.hexdigest() != self.digest:
            raise BadSource(
                f"`{name}` came with other bytes than were promised: {self.algorithm} "
                f"{digest.hexdigest()}, not {self.digest}",
                "nothing was made of it: convert again with --resume, or try another --revision",
            )


def _git_digest(size: int) -> hashlib._Hash:
    return hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)


@dataclass(frozen=True, slots=True)
class RemoteShards:
    """The shards of a source elsewhere: what is promised of each, and how they come.

    Attributes:
        folder: Where the other files of the source lie, and the shards where nothing else is said.
        promises: What is promised of each shard.
        fetch: Brings a shard into a folder; what it began there once, it goes on with.
        scratch: What `clear` deletes: the folder, or one around it.
        limit_bytes: Most bytes of shards that lie in a folder at a time.
    """

    folder: Path
    promises: Mapping[str, Promise]
    fetch: Callable[[str, Path], None]
    scratch: Path
    limit_bytes: int | None = None

    @property
    def states(self) -> dict[str, str]:
        """What tells the bytes of a shard from others with the same header, by name."""
        return {file: p.digest or p.version for file, p in self.promises.items()}

    @property
    def sha256(self) -> dict[str, str]:
        """The SHA-256 that each shard has, where one is promised, by name."""
        return {f: p.digest for f, p in self.promises.items() if p.algorithm == "sha256"}

    def supply(self, folder: Path | None = None) -> ShardSupply:
        """Return what brings the shards into a folder while a run needs them."""
        place = folder or self.folder
        place.mkdir(parents=True, exist_ok=True)
        return ShardSupply(
            place, self.promises, lambda file: self.fetch(file, place), self.limit_bytes
        )

    def clear(self) -> None:
        """Delete what is left of the source here: nobody needs it any more."""
        shutil.rmtree(self.scratch, ignore_errors=True)


class ShardSupply:
    """Keeps the shards of a source in a folder, never more than a number of bytes of them.

    Jobs say which shards they read. A shard is fetched for the first job that holds it, checked
    against its promise, and deleted behind the last. Jobs get their shards in the order of their
    plan, so that none waits for ever.

    Args:
        folder: Where the shards are put. It belongs to the supply.
        promises: What is promised of each shard.
        fetch: Brings a shard into the folder; what it began once, it goes on with.
        limit_bytes: Most bytes of shards at a time.
    """

    def __init__(
        self,
        folder: Path,
        promises: Mapping[str, Promise],
        fetch: Callable[[str], None],
        limit_bytes: int | None = None,
    ) -> None:
        self.folder = folder
        self.promises = promises
        self._fetch = fetch
        self._limit = limit_bytes
        self._changed = threading.Condition()
        self._jobs: list[frozenset[str]] = []
        self._next = 0  # the job whose turn it is
        self._left: Counter[str] = Counter()  # jobs that are not done, by shard
        self._users: Counter[str] = Counter()  # jobs that hold it now
        self._here: dict[str, threading.Lock] = {}
        self._ready: set[str] = set()
        self._forget: Callable[[str], None] = _nothing
        self.most_bytes = 0

    def begin(self, jobs: Sequence[frozenset[str]], forget: Callable[[str], None]) -> None:
        """Take the shards that each job will hold, in the order in which the jobs begin.

        Args:
            jobs: Names of shards.
            forget: Called before a shard is deleted, to close what is open of it.

        Raises:
            InvalidUsage: One job needs more than the limit.
        """
        needs = max((self._size(job) for job in jobs), default=0)
        if self._limit is not None and needs > self._limit:
            raise InvalidUsage(
                f"--stream-disk {self._limit} is too small: one layer is read from shards of "
                f"{needs} bytes in all",
                f"give at least {needs}",
            )
        self._limit = self._limit or max(DEFAULT_LIMIT_BYTES, needs)
        self._jobs, self._next, self._forget = list(jobs), 0, forget
        self._left = Counter(file for job in jobs for file in job)

    @contextmanager
    def holding(self, number: int, check: Callable[[], None]) -> Iterator[None]:
        """Have the shards of a job in the folder while the context is open.

        Args:
            number: The job, as in `begin`; those before it have their turn first.
            check: Called while waiting; raises if the run is to end.

        Raises:
            BadSource: A shard cannot be fetched, or came with other bytes.
        """
        files = self._jobs[number]
        self._take(number, files, check)
        try:
            for file in sorted(files):
                with self._here[file]:
                    if file not in self._ready:
                        self._fetch(file)
                        self._check(file)
                        self._ready.add(file)
            yield
        finally:
            self._give_back(files)

    def _take(self, number: int, files: frozenset[str], check: Callable[[], None]) -> None:
        with self._changed:
            while number != self._next or not self._has_room(files):
                check()
                self._changed.wait(WAIT_SECONDS)
            for file in files:
                self._here.setdefault(file, threading.Lock())
                self._users[file] += 1
            self.most_bytes = max(self.most_bytes, self._size(self._here))
            self._next += 1
            self._changed.notify_all()

    def _has_room(self, files: frozenset[str]) -> bool:
        """Return whether there is room for a job's shards, once those that can wait are gone."""
        assert self._limit is not None
        idle = [f for f in self._here if not self._users[f] and f not in files]
        idle.sort(key=self._next_use)
        while self._size(self._here.keys() | files) > self._limit:
            if not idle:
                return False
            self._delete(idle.pop())
        return True

    def _next_use(self, file: str) -> int:
        later = range(self._next, len(self._jobs))
        return next((n for n in later if file in self._jobs[n]), len(self._jobs))

    def _give_back(self, files: frozenset[str]) -> None:
        with self._changed:
            for file in files:
                self._users[file] -= 1
                self._left[file] -= 1
                if not self._left[file]:
                    self._delete(file)
            self._changed.notify_all()

    def _delete(self, file: str) -> None:
        self._forget(file)
        (self.folder / file).unlink(missing_ok=True)
        self._here.pop(file, None)
        self._ready.discard(file)

    def _check(self, file: str) -> None:
        try:
            self.promises[file].check(self.folder / file)
        except BadSource:
            (self.folder / file).unlink(missing_ok=True)
            raise
        except OSError as fault:
            raise BadSource(f"cannot read `{printable(file)}`: {fault.strerror}") from None

    def _size(self, files: Iterable[str]) -> int:
        return sum(self.promises[file].size for file in files)


def _nothing(_: str) -> None:
    """Close nothing."""
