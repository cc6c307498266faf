"""Writes to a repository of the Hub, commit by commit."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiter_prep.errors import AiterPrepError
from aiter_prep.storage.files import read_whole
from aiter_prep.storage.hub import HTTP_OUTAGE, network_faults
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

MAIN = "main"
GIT_FILES = frozenset({".gitattributes"})  # of the repository, not of what it holds
AGAIN = "what is complete stays on the Hub: the same command goes on from there"
MOVED = frozenset({409, 412})  # the parent of a commit is no longer the head


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository, as the Hub describes it.

    Attributes:
        size: Its bytes.
        sha256: SHA-256 of a large file's bytes, or None for a file that git itself holds.
        blob: Name of git's object: for a small file git's SHA-1 of its bytes.
    """

    size: int
    sha256: str | None
    blob: str


class HubRepository:
    """A repository of models, to be written.

    Args:
        repo_id: `org/name`.
        quiet: Show no progress of uploads.

    Raises:
        AiterPrepError: Of every method: the Hub refuses, or is out of reach.
    """

    def __init__(self, repo_id: str, *, quiet: bool = False) -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.utils.tqdm import disable_progress_bars

        if quiet:
            disable_progress_bars()
        self.repo_id = repo_id
        self._api = HfApi(library_name="aiter-prep")

    def create(self, *, private: bool = False) -> None:
        """Make the repository, if it is not there; a token that may not write fails here."""
        with self._faults():
            self._api.create_repo(self.repo_id, private=private, exist_ok=True)

    def branches(self) -> dict[str, str]:
        """Return the commits that the branches stand at, by name."""
        with self._faults():
            refs = self._api.list_repo_refs(self.repo_id)
            return {ref.name: ref.target_commit for ref in refs.branches}

    def first_commit(self) -> str:
        """Return the commit that the repository began with."""
        with self._faults():
            return self._api.list_repo_commits(self.repo_id, revision=MAIN)[-1].commit_id

    def create_branch(self, name: str, commit: str) -> str:
        """Make a branch that begins at a commit; return that commit."""
        with self._faults():
            self._api.create_branch(self.repo_id, branch=name, revision=commit)
            return commit

    def files(self, commit: str) -> dict[str, HubFile]:
        """Return the files of a commit by path, without git's own."""
        from huggingface_hub.hf_api import RepoFile

        with self._faults():
            entries = list(self._api.list_repo_tree(self.repo_id, recursive=True, revision=commit))
        found: dict[str, HubFile] = {}
        for entry in entries:
            if isinstance(entry, RepoFile) and entry.path not in GIT_FILES:
                sha256 = entry.lfs.sha256 if entry.lfs else None
                found[entry.path] = HubFile(entry.size, sha256, entry.blob_id)
        return found

    def read(self, path: str, commit: str, max_bytes: int) -> bytes:
        """Return the bytes of a small file of a commit."""
        from huggingface_hub import hf_hub_download

        with self._faults():
            local = hf_hub_download(self.repo_id, path, revision=commit)
            return read_whole(Path(local), max_bytes)

    def commit(
        self,
        branch: str,
        parent: str,
        message: str,
        *,
        add: Mapping[str, Path | bytes],
        delete: Sequence[str] = (),
    ) -> str:
        """Add and delete files in one commit; return it.

        Large files are uploaded first. What the Hub holds already is not sent again, so a call that
        was cut off goes on where it was.

        Args:
            branch: Where to.
            parent: The commit that the branch must still stand at.
            message: First line of the commit's message.
            add: Files by their path in the repository.
            delete: Paths of files to delete.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        removed = [CommitOperationDelete(path_in_repo=path) for path in delete]
        added = [CommitOperationAdd(path, data) for path, data in add.items()]
        with self._faults():
            done = self._api.create_commit(
                self.repo_id,
                [*removed, *added],
                commit_message=message,
                revision=branch,
                parent_commit=parent,
            )
            return str(done.oid)

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Turn what huggingface_hub raises into what a user can act upon."""
        try:
            yield
        except AiterPrepError:
            raise
        except Exception as fault:
            found = _explained(fault, printable(self.repo_id))
            if found is None:
                raise
            raise found from None


def card_metadata(card: str) -> dict[str, object]:
    """Return the front matter of a model card; nothing where it has none that can be read."""
    from huggingface_hub import RepoCard

    try:
        found: Any = vars(RepoCard(card, ignore_metadata_errors=True).data)
    except ValueError:  # no object, or no YAML
        return {}
    return dict(found)


_SIGN_IN = "`hf auth login` or set HF_TOKEN, with a token that may write there"
# status to what that means when writing, and what to do
_REFUSALS = {
    401: ("the Hub does not know who is writing to `{repo_id}`", _SIGN_IN),
    403: ("you may not write to `{repo_id}`", _SIGN_IN),
    404: ("`{repo_id}` is not a repository on the Hub that you may see", _SIGN_IN),
    **dict.fromkeys(MOVED, ("`{repo_id}` was changed by somebody else meanwhile", AGAIN)),
}


def _explained(fault: Exception, repo_id: str) -> AiterPrepError | None:
    from huggingface_hub import errors

    # an upload that fails in a thread is wrapped in a RuntimeError
    cause = fault.__cause__ if isinstance(fault.__cause__, Exception) else fault
    response = getattr(cause, "response", None)
    status = getattr(response, "status_code", HTTP_OUTAGE)
    if status in _REFUSALS:
        message, hint = _REFUSALS[status]
        return AiterPrepError(message.format(repo_id=repo_id), hint)
    known: tuple[type[Exception], ...] = (errors.HFValidationError, *network_faults())
    if isinstance(fault, known) or isinstance(cause, known):
        first_line = str(cause).strip().partition("\n")[0] or type(cause).__name__
        return AiterPrepError(f"cannot write to `{repo_id}`: {printable(first_line)}", AGAIN)
    return None
