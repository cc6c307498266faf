"""Where processes that share a conversion leave their shards until the folder is sealed."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiter_prep.errors import AiterPrepError, DataMismatch, OutputNotEmpty
from aiter_prep.storage.checkpoint import MANIFEST_FILE
from aiter_prep.storage.durable import sync_folder, write_whole
from aiter_prep.storage.files import read_whole
from aiter_prep.storage.folder import JOURNAL_FILE, LOCK_FILE, PARTS_FOLDER
from aiter_prep.storage.guards import check_ours, is_folder, not_of_ours
from aiter_prep.storage.journal import line_of, text_of_line
from aiter_prep.storage.jsontext import printable
from aiter_prep.storage.output import ShardFile, Written, looks_like, require_space, written_of
from aiter_prep.storage.swap import recover, work_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

    from typing_extensions import Self

    from aiter_prep.storage.shard import ShardLayout

REQUEST_FILE = "request.json"
MAX_NOTE_BYTES = 2_000_000_000


@dataclass(frozen=True, slots=True)
class ShardNote:
    """What is noted of a shard that waits to be sealed.

    Attributes:
        tensors: Its tensors.
        maker: What wrote it, as a manifest's `created_by`.
    """

    tensors: Mapping[str, Written]
    maker: Mapping[str, Any]


def place_for_parts(out: Path, *, overwrite: bool) -> Path:
    """Return where the parts of a folder wait: in it, or beside it where it is to be replaced.

    Args:
        out: The folder.
        overwrite: It may be replaced, if it is a prepared folder.

    Raises:
        OutputNotEmpty: It holds more than its manifest names.
    """
    recover(out)
    if not (overwrite and (out / MANIFEST_FILE).exists()):
        return out
    check_ours(out)
    return work_folder(out)


def place_of_parts(out: Path) -> Path:
    """Return where the parts of a folder do wait: in it, or beside it.

    Raises:
        DataMismatch: In both places.
    """
    recover(out)
    beside = work_folder(out)
    if not pending_plans(beside):
        return out
    if pending_plans(out):
        raise DataMismatch(
            f"parts of a conversion wait in `{printable(str(out))}`, and others in "
            f"`{printable(str(beside))}` to replace it",
            f"remove those that are not wanted: the `{PARTS_FOLDER}` of one of the two",
        )
    return beside


def pending_plans(out: Path) -> dict[str, Mapping[str, Any]]:
    """Return what was asked for by the parts that wait in a folder, by the digest of its facts.

    What cannot be read (a part was killed while it wrote it) is empty.
    """
    parts = out / PARTS_FOLDER
    if not parts.is_dir():
        return {}
    return {path.name: _request(path) for path in sorted(parts.glob("[!.]*")) if path.is_dir()}


def forget_parts(out: Path) -> None:
    """Remove what parts left in a folder."""
    shutil.rmtree(out / PARTS_FOLDER, ignore_errors=True)


class PartsFolder:
    """The shards of one plan that wait to be sealed; safe to share between threads.

    Each process writes into a folder of its own, brings a shard to the disk, gives it its name
    among those that wait, and notes it in a file of its own with the digests of its tensors. No
    two processes ever write to one file, so nothing depends on locks or on a common view of a
    file that is being written. Two that write the same shard write the same bytes, and each puts
    it in its place in one step.

    Args:
        out: Where they wait, by `place_for_parts`.
        digest: Stands for all that the processes must agree on.
    """

    def __init__(self, out: Path, digest: str) -> None:
        self.out = out
        self._digest = digest
        self.folder = out / PARTS_FOLDER / key_of(digest)
        self.finished: set[str] = set()
        self._own: Path | None = None
        self._label = ""
        self._made: list[Path] = []
        self._maker: Mapping[str, Any] = {}
        self._check_source: Callable[[], None] | None = None

    def begin(
        self,
        label: str,
        request: Mapping[str, Any],
        maker: Mapping[str, Any],
        check_source: Callable[[], None] | None = None,
    ) -> Self:
        """Take part.

        Args:
            label: What the process is called, such as `part-3-of-8`. What a killed process of the
                same name left is removed.
            request: How the plan was made; the same for all.
            maker: What writes the shards, as a manifest's `created_by`.
            check_source: Called before a shard is noted; raises where the source has changed.

        Raises:
            OutputNotEmpty: The folder holds something else, or parts of another plan.
        """
        self._check_room()
        self._maker = maker
        self._check_source = check_source
        self._label = label
        self._made = [path for path in (self.out, *self.out.parents) if not path.exists()]
        try:
            self._begin(label, request)
        except OSError:
            self._leave_nothing()
            raise
        self._check_room()  # another plan's part may have begun meanwhile: one of the two sees it
        return self

    def _begin(self, label: str, request: Mapping[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        sync_folder(self.out)
        with self._while_it_is_there():
            (self.folder / label).open("ab").close()
            for left in self.folder.glob(f"{label}.*"):
                shutil.rmtree(left, ignore_errors=True)
            self._own = Path(tempfile.mkdtemp(prefix=f"{label}.", dir=self.folder))
            self._own.chmod(0o755)
            if not _request(self.folder):
                self._put(REQUEST_FILE, line_of(request))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
        if fault is not None:
            self._leave_nothing()

    def _leave_nothing(self) -> None:
        """Remove what the process has made, where it is alone and no shard waits.

        Where others have begun, all of it stays. A process that begins at the same moment finds
        that what it writes is gone, and says so.
        """
        aside = self.folder.with_name(f".{self.folder.name}.{os.getpid()}")
        try:
            if self._own is not None:
                shutil.rmtree(self._own, ignore_errors=True)
            names = {path.name for path in self.folder.iterdir()}
            if names <= {REQUEST_FILE, self._label}:
                self.folder.rename(aside)
                shutil.rmtree(aside, ignore_errors=True)
                for folder in (aside.parent, *self._made):
                    folder.rmdir()
        except OSError:
            return  # the failure that led here is what the user must see

    @property
    def fetched(self) -> Path:
        """Where this process may put shards of the source that it fetches; it goes with it."""
        assert self._own is not None, "the process has not begun"
        return self._own / "source"

    def require_space(self, total_bytes: int) -> None:
        """Check that the disk has room.

        Raises:
            AiterPrepError: It has not.
        """
        require_space(self.out, total_bytes, self.out)

    def create(self, layout: ShardLayout) -> ShardFile:
        """Begin a shard.

        Raises:
            AiterPrepError: Another process of the same name has taken over.
        """
        assert self._own is not None, "the process has not begun"
        with self._while_it_is_there():
            return ShardFile(self._own, layout)

    def finish(self, shard: ShardFile, tensors: Mapping[str, Written]) -> None:
        """Bring a shard to the disk, give it its name among those that wait, and note it.

        Raises:
            AiterPrepError: Another process of the same name has taken over.
        """
        file = shard.layout.file
        note = {
            "digest": self._digest,
            "file": file,
            "maker": dict(self._maker),
            "tensors": {name: astuple(written) for name, written in tensors.items()},
        }
        try:
            if self._check_source is not None:
                self._check_source()
            with self._while_it_is_there():
                shard.finish(self.folder)
                sync_folder(self.folder)
                self._put(_note_file(file), line_of(note))
        except BaseException:
            shard.discard()
            raise
        self.finished.add(file)

    def note_of(self, layout: ShardLayout) -> ShardNote | None:
        """Return what is noted of a shard, or None if it is not there as noted and as planned."""
        note = self.noted(layout)
        return note if note is not None and looks_like(self.place_of(layout), layout) else None

    def noted(self, layout: ShardLayout) -> ShardNote | None:
        """Return what is noted of a shard, whether or not it is there."""
        entry = _read_note(self.folder / _note_file(layout.file))
        if (entry.get("digest"), entry.get("file")) != (self._digest, layout.file):
            return None
        tensors = {name: written_of(*noted) for name, noted in entry["tensors"].items()}
        return ShardNote(tensors, entry["maker"]) if tensors.keys() == layout.slots.keys() else None

    def place_of(self, layout: ShardLayout) -> Path:
        """Return where a shard waits."""
        return self.folder / layout.file

    def labels(self) -> list[str]:
        """Return the names of the processes that have begun."""
        return sorted(path.name for path in self.folder.iterdir() if path.name.startswith("part-"))

    @contextmanager
    def _while_it_is_there(self) -> Iterator[None]:
        """Say so where what this process writes was removed under it."""
        try:
            yield
        except FileNotFoundError:
            raise AiterPrepError(
                f"what was being written into `{printable(str(self.folder))}` is gone",
                "the same part was begun anew by another process, or the folder was sealed or "
                "removed",
            ) from None

    def _put(self, name: str, data: bytes) -> None:
        """Put a small file in its place, in one step."""
        assert self._own is not None, "the process has not begun"
        write_whole(self._own, name, data)
        (self._own / name).rename(self.folder / name)
        sync_folder(self.folder)

    def _check_room(self) -> None:
        """Check that the folder holds nothing but parts of this plan.

        Raises:
            OutputNotEmpty: It does.
        """
        check_room_for_parts(self.out)
        others = sorted(pending_plans(self.out).keys() - {self.folder.name})
        if others:
            raise OutputNotEmpty(
                f"`{printable(str(self.out))}` holds parts of another conversion, in "
                f"`{PARTS_FOLDER}/{others[0]}`",
                "all parts need the same source, options and version; remove that folder if it is "
                "not wanted, or choose another output folder",
            )


def check_room_for_parts(out: Path) -> None:
    """Check that a folder is empty, or holds parts alone.

    Raises:
        OutputNotEmpty: It does not.
    """
    if not is_folder(out):
        return
    name = printable(str(out))
    names = {path.name for path in out.iterdir()} - {LOCK_FILE, PARTS_FOLDER}
    if MANIFEST_FILE in names:
        raise OutputNotEmpty(
            f"`{name}` is a prepared folder already",
            "choose another output folder, replace it with --overwrite, or let --if-needed see "
            "whether it is the right one",
        )
    if JOURNAL_FILE in names:
        raise OutputNotEmpty(
            f"`{name}` is being written or sealed by another run", "choose another output folder"
        )
    if names:
        raise not_of_ours(out, names)


def key_of(digest: str) -> str:
    """Return the name of the folder that stands for a digest."""
    return digest.rpartition(":")[2]


def shards_waiting(out: Path) -> Iterator[Path]:
    """Yield every shard that waits in a folder to be sealed."""
    for key in pending_plans(out):
        yield from sorted((out / PARTS_FOLDER / key).glob("model-*.safetensors"))


def _note_file(file: str) -> str:
    return f"{file}.json"


def _request(folder: Path) -> Mapping[str, Any]:
    return _read_note(folder / REQUEST_FILE)


def _read_note(path: Path) -> dict[str, Any]:
    """Return a note, or an empty one where there is none that is whole."""
    try:
        text = text_of_line(read_whole(path, MAX_NOTE_BYTES))
    except OSError:
        return {}
    found: dict[str, Any] = {} if text is None else json.loads(text)
    return found
