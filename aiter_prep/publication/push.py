"""Pushes a prepared folder to the Hub: checked first, manifest last."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aiter_prep.errors import AiterPrepError, DataMismatch, InvalidUsage, OutputNotEmpty
from aiter_prep.inspection.prepared import inspect_prepared
from aiter_prep.manifest import MAX_MANIFEST_BYTES, read_manifest
from aiter_prep.publication.card import (
    BEGIN,
    CARD_FILE,
    END,
    default_branch,
    is_ours,
    new_card,
    with_conversion,
)
from aiter_prep.storage.checkpoint import MANIFEST_FILE
from aiter_prep.storage.files import read_whole
from aiter_prep.storage.folder import SHARD_NAME
from aiter_prep.storage.hub import is_hub_name
from aiter_prep.storage.hub_upload import MAIN, HubFile, HubRepository, card_metadata
from aiter_prep.storage.jsontext import printable
from aiter_prep.verification import verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from aiter_prep.execution import Progress
    from aiter_prep.inspection.prepared import PreparedInspection

CARDS = ("write", "leave", "replace")
COMMIT_FILES, COMMIT_BYTES = 20, 50_000_000_000  # of one commit, unless one file is larger
MAX_CARD_BYTES = 10_000_000

_BRANCH = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class Pushed:
    """What `push` did.

    Attributes:
        repo_id: The repository.
        branch: The branch that holds the folder.
        commit: The commit that the branch stands at: the folder, whole.
        files: Files of the folder.
        total_bytes: Their bytes.
        uploaded_files: How many of them were not there yet.
        uploaded_bytes: Their bytes.
        card: What became of the card: `written`, `unchanged` or `left`.
    """

    repo_id: str
    branch: str
    commit: str
    files: int
    total_bytes: int
    uploaded_files: int
    uploaded_bytes: int
    card: str


def push(
    folder: str | Path,
    repo_id: str,
    *,
    branch: str | None = None,
    private: bool = False,
    card: str = "write",
    overwrite: bool = False,
    quiet: bool = False,
    files: Mapping[str, HubFile] | None = None,
) -> Pushed:
    """Push a prepared folder to a branch of a repository of the Hub.

    The folder is verified first, every byte. The branch then holds exactly its files; the manifest
    comes in the last commit, so that a push that was cut off left no prepared folder. What is there
    already is not sent again. The card, a list of the conversions, is on `main`.

    Args:
        folder: A prepared folder.
        repo_id: `org/name`; made if it is not there.
        branch: The branch; named after target, ranks and chip by default.
        private: Whether a repository that is made is private.
        card: `write` adds to our card, and refuses another's; `leave` touches none; `replace`
            writes ours in its place.
        overwrite: Replace another conversion on that branch.
        quiet: Show no progress of uploads.
        files: What `check_folder` returned; without it the folder is checked now.

    Raises:
        DataMismatch: The folder is unfinished or damaged.
        OutputNotEmpty: The branch holds something else.
        AiterPrepError: The Hub refuses, or is out of reach.
        InvalidUsage: A name is none.
    """
    folder = Path(folder)
    check_place(repo_id, branch, card)
    manifest = read_manifest(folder)  # before all bytes are read: it decides on the branch
    branch = branch or default_branch(manifest.target)
    check_place(repo_id, branch, card)
    files = check_folder(folder) if files is None else files
    hub = open_place(repo_id, private=private, card=card, quiet=quiet)
    head = hub.branches().get(branch) or hub.create_branch(branch)
    task = _task(files, hub.files(head), folder, repo_id, branch, overwrite=overwrite)
    for number, step in enumerate(task.commits(), 1):
        head = hub.commit(
            branch,
            head,
            f"{step.what} ({number})",
            add={name: folder / name for name in step.add},
            delete=step.delete,
        )
    _check_arrived(hub.files(head), files, repo_id)
    return Pushed(
        repo_id=repo_id,
        branch=branch,
        commit=head,
        files=len(files),
        total_bytes=sum(file.size for file in files.values()),
        uploaded_files=len(task.add),
        uploaded_bytes=sum(files[name].size for name in task.add),
        card=_write_card(hub, card, branch, folder),
    )


def check_place(repo_id: str, branch: str | None = None, card: str = "write") -> None:
    """Check the names of a repository and a branch, and what is to become of the card.

    Raises:
        InvalidUsage: One of them is none.
    """
    if not is_hub_name(repo_id):
        raise InvalidUsage(f"`{printable(repo_id)}` is no repository", "give it as org/name")
    if branch is not None and (not _BRANCH.fullmatch(branch) or ".." in branch):
        raise InvalidUsage(
            f"`{printable(branch)}` is no name for a branch",
            "use letters, digits, `.`, `_` and `-`, at most 100 of them",
        )
    if branch == MAIN:
        raise InvalidUsage(
            f"branch `{MAIN}` holds the card, and no conversion",
            "choose another name, or none: it is then named after target, ranks and chip",
        )
    if card not in CARDS:
        raise InvalidUsage(f"--card {printable(card)} is not known", f"use {', '.join(CARDS)}")


def open_place(
    repo_id: str, *, private: bool = False, card: str = "write", quiet: bool = False
) -> HubRepository:
    """Make a repository if it is not there, and check that a push may write to it.

    Raises:
        OutputNotEmpty: Its card is not ours.
        AiterPrepError: The Hub refuses, or is out of reach.
    """
    hub = HubRepository(repo_id, quiet=quiet)
    hub.create(private=private)
    text = _card_of(hub) if card == "write" else None
    if text is not None and not is_ours(text):
        raise OutputNotEmpty(
            f"the card of `{printable(hub.repo_id)}` is not ours",
            f"put the lines `{BEGIN}` and `{END}` where the list of conversions is to stand, or "
            "push with --card leave, or --card replace",
        )
    return hub


def check_folder(
    folder: Path, progress: Callable[[Progress], None] | None = None
) -> dict[str, HubFile]:
    """Check every byte of a folder; return its files as the Hub would describe them.

    Raises:
        DataMismatch: It is unfinished or damaged.
    """
    report = verify(folder, sha256=True, progress=progress)
    if not report.is_clean:
        first = report.problems[0]
        raise DataMismatch(
            f"`{printable(str(folder))}` is not what its manifest says: "
            f"`{printable(first.file)}` {first.what} ({len(report.problems)} such)",
            "nothing was pushed: convert again, or copy it again",
        )
    return {
        name: HubFile((folder / name).stat().st_size, sha256, "")
        for name, sha256 in sorted(report.sha256.items())
    }


@dataclass(frozen=True, slots=True)
class _Step:
    """One commit."""

    what: str
    add: tuple[str, ...] = ()
    delete: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Task:
    """What is left to do on a branch.

    Attributes:
        add: Files that are not there yet, or with other bytes.
        delete: Files that are there and do not belong to the folder.
        replaces: Whether another manifest is there, which goes first.
        sizes: Bytes of the files to add.
    """

    add: tuple[str, ...]
    delete: tuple[str, ...]
    replaces: bool
    sizes: Mapping[str, int]

    def commits(self) -> Iterator[_Step]:
        """Yield the commits: another's manifest goes first, ours comes last."""
        shards = [name for name in self.add if SHARD_NAME.fullmatch(name)]
        others = tuple(name for name in self.add if name not in set(shards))
        if self.replaces:
            yield _Step("Take away the manifest of another conversion", delete=(MANIFEST_FILE,))
        for names in self._batches(shards):
            yield _Step("Add shards", add=names)
        delete = tuple(name for name in self.delete if name != MANIFEST_FILE)
        if others or delete:
            yield _Step("Add the manifest and small files", add=others, delete=delete)

    def _batches(self, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
        batch: list[str] = []
        filled = 0
        for name in names:
            if batch and (len(batch) == COMMIT_FILES or filled + self.sizes[name] > COMMIT_BYTES):
                yield tuple(batch)
                batch, filled = [], 0
            batch.append(name)
            filled += self.sizes[name]
        if batch:
            yield tuple(batch)


def _task(
    files: Mapping[str, HubFile],
    there: Mapping[str, HubFile],
    folder: Path,
    repo_id: str,
    branch: str,
    *,
    overwrite: bool,
) -> _Task:
    """Compare a folder with a branch.

    Raises:
        OutputNotEmpty: The branch holds something else, and may not be overwritten.
    """
    add = tuple(name for name in files if not _is_there(folder / name, files[name], there, name))
    delete = tuple(sorted(there.keys() - files.keys()))
    replaces = MANIFEST_FILE in there and MANIFEST_FILE in add
    foreign = [name for name in delete if not SHARD_NAME.fullmatch(name)]
    where = f"branch `{branch}` of `{printable(repo_id)}`"
    if replaces and not overwrite:
        raise OutputNotEmpty(
            f"{where} holds another conversion",
            "choose another --revision, or replace it with --overwrite",
        )
    if foreign and not overwrite:
        raise OutputNotEmpty(
            f"{where} holds `{printable(foreign[0])}`, which is not of this folder "
            f"({len(foreign)} such)",
            "choose another --revision, or remove it with --overwrite",
        )
    if replaces and len(add) == 1 and not delete:
        replaces = False  # one commit does it
    return _Task(add, delete, replaces, {name: files[name].size for name in add})


def _is_there(path: Path, file: HubFile, there: Mapping[str, HubFile], name: str) -> bool:
    """Return whether the Hub holds the same bytes under the same name."""
    found = there.get(name)
    if found is None or found.size != file.size:
        return False
    if found.sha256 is not None:
        return found.sha256 == file.sha256
    return found.blob == _blob(path, file.size)


def _blob(path: Path, size: int) -> str:
    """Return what git calls a file: the SHA-1 of its size and its bytes."""
    digest = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    digest.update(read_whole(path, size))
    return digest.hexdigest()


def _check_arrived(there: Mapping[str, HubFile], files: Mapping[str, HubFile], repo: str) -> None:
    """Check that the Hub now says of every file what we know of it."""
    for name, file in files.items():
        found = there.get(name)
        digests = {file.sha256, found.sha256 if found else None} - {None}
        if found is None or found.size != file.size or len(digests) > 1:
            raise AiterPrepError(
                f"`{printable(repo)}` does not hold `{printable(name)}` as it was sent",
                "push again; if it stays so, a `.gitignore` of the repository may leave it out",
            )


def _card_of(hub: HubRepository) -> str | None:
    head = hub.branches()[MAIN]
    if CARD_FILE not in hub.files(head):
        return None
    return hub.read(CARD_FILE, head, MAX_CARD_BYTES).decode("utf-8", "replace")


def _write_card(hub: HubRepository, card: str, branch: str, folder: Path) -> str:
    if card == "leave":
        return "left"
    found = inspect_prepared(folder)
    digest = json.loads(read_whole(folder / MANIFEST_FILE, MAX_MANIFEST_BYTES))["self_digest"]
    old = _card_of(hub)
    base = (
        old if old is not None and is_ours(old) else new_card(hub.repo_id, found, _metadata(found))
    )
    text = with_conversion(base, hub.repo_id, branch, found, digest)
    if text == old:
        return "unchanged"
    parent = hub.branches()[MAIN]
    hub.commit(MAIN, parent, f"List {branch}", add={CARD_FILE: text.encode()})
    return "written"


def _metadata(found: PreparedInspection) -> Mapping[str, object]:
    """Return the front matter of the source's own card, which the folder holds."""
    try:
        text = read_whole(found.folder / CARD_FILE, MAX_CARD_BYTES).decode("utf-8", "replace")
    except OSError:
        return {}
    return card_metadata(text)
