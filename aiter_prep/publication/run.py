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
from aiter_prep.publication.store import push_to_store
from aiter_prep.publication.task import task_of
from aiter_prep.storage.checkpoint import MANIFEST_FILE
from aiter_prep.storage.files import read_whole
from aiter_prep.storage.hub import is_hub_name
from aiter_prep.storage.hub_upload import MAIN, HubFile, HubRepository, card_metadata
from aiter_prep.storage.jsontext import printable
from aiter_prep.storage.object_store import ObjectFolder, is_store_url
from aiter_prep.verification import verify

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiter_prep.inspection.prepared import PreparedInspection
    from aiter_prep.progress import Progress

CARDS = ("write", "leave", "replace")
MAX_CARD_BYTES = 10_000_000

_BRANCH = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class Pushed:
    """What `push` did.

    Attributes:
        repo_id: The repository, or the address in an object store.
        branch: The branch that holds the folder; None in a store, as are the next and the last.
        commit: The commit that the branch stands at: the folder, whole.
        files: Files of the folder.
        total_bytes: Their bytes.
        uploaded_files: How many of them were not there yet.
        uploaded_bytes: Their bytes.
        card: What became of the card: `written`, `unchanged` or `left`.
    """

    repo_id: str
    branch: str | None
    commit: str | None
    files: int
    total_bytes: int
    uploaded_files: int
    uploaded_bytes: int
    card: str | None


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
    """Push a prepared folder to a branch of a repository of the Hub, or to an object store.

    The folder is verified first, every byte. The branch then holds exactly its files; the manifest
    comes in the last commit, so that a push that was cut off left no prepared folder. What is there
    already is not sent again. The card, a list of the conversions, is on `main`.

    Args:
        folder: A prepared folder.
        repo_id: `org/name`, made if it is not there; or an address such as `s3://bucket/folder`,
            for which `branch`, `private` and `card` mean nothing.
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
    if is_store_url(repo_id):
        files = check_folder(folder) if files is None else files
        sent = push_to_store(folder, repo_id, files, overwrite=overwrite)
        return _pushed(repo_id, files, sent)
    manifest = read_manifest(folder)  # before all bytes are read: it decides on the branch
    branch = branch or default_branch(manifest.target)
    check_place(repo_id, branch, card)
    files = check_folder(folder) if files is None else files
    hub = open_place(repo_id, private=private, card=card, quiet=quiet)
    first = hub.first_commit()  # nothing of ours: the Hub's own files, so no card
    head = hub.branches().get(branch) or hub.create_branch(branch, first)
    there, begun = hub.files(head), hub.files(first)
    task = task_of(
        {name: file.size for name, file in files.items()},
        there,
        lambda name: _is_same(folder / name, files[name], there.get(name)),
        f"branch `{branch}` of `{printable(repo_id)}`",
        removable={name for name, file in there.items() if begun.get(name) == file},
        overwrite=overwrite,
    )
    for number, change in enumerate(task.changes(), 1):
        head = hub.commit(
            branch,
            head,
            f"{change.what} ({number})",
            add={name: folder / name for name in change.add},
            delete=change.delete,
        )
        arrived = hub.files(head) if change.add else {}
        for name in change.add:
            _check_arrived(folder / name, files[name], arrived.get(name), repo_id)
    card = _write_card(hub, card, branch, folder)
    return _pushed(repo_id, files, task.add, branch=branch, commit=head, card=card)


def _pushed(
    place: str,
    files: Mapping[str, HubFile],
    sent: Sequence[str],
    *,
    branch: str | None = None,
    commit: str | None = None,
    card: str | None = None,
) -> Pushed:
    return Pushed(
        repo_id=place,
        branch=branch,
        commit=commit,
        files=len(files),
        total_bytes=sum(file.size for file in files.values()),
        uploaded_files=len(sent),
        uploaded_bytes=sum(files[name].size for name in sent),
        card=card,
    )


def check_place(repo_id: str, branch: str | None = None, card: str = "write") -> None:
    """Check the names of a repository and a branch, and what is to become of the card.

    Raises:
        InvalidUsage: One of them is none.
    """
    if is_store_url(repo_id):
        ObjectFolder(repo_id)
        if branch is not None or card != "write":
            raise InvalidUsage("--revision and --card mean nothing in an object store")
        return
    if not is_hub_name(repo_id):
        raise InvalidUsage(
            f"`{printable(repo_id)}` is no repository",
            "give it as org/name, or an address such as s3://bucket/folder",
        )
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


def _is_same(path: Path, file: HubFile, found: HubFile | None) -> bool:
    """Return whether the Hub holds the bytes that were verified."""
    if found is None or found.size != file.size:
        return False
    if found.sha256 is not None:
        return found.sha256 == file.sha256
    data = read_whole(path, file.size)
    return (hashlib.sha256(data).hexdigest(), _blob(data)) == (file.sha256, found.blob)


def _blob(data: bytes) -> str:
    """Return what git calls a file: the SHA-1 of its size and its bytes."""
    digest = hashlib.sha1(f"blob {len(data)}\0".encode(), usedforsecurity=False)
    digest.update(data)
    return digest.hexdigest()


def _check_arrived(path: Path, file: HubFile, found: HubFile | None, repo_id: str) -> None:
    """Check that the Hub now says of a file what we know of it; the manifest is not there yet."""
    if not _is_same(path, file, found):
        raise AiterPrepError(
            f"`{printable(repo_id)}` does not hold `{printable(path.name)}` as it was verified",
            "the folder may have changed, or a `.gitignore` of the repository leaves the file out; "
            "verify the folder and push again",
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
