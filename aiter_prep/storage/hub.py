"""Finds the checkpoint that a user names: a local folder, or a repository of the Hub."""

from __future__ import annotations

import re
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from aiter_prep.errors import AiterPrepError, BadSource, InvalidUsage
from aiter_prep.storage.checkpoint import (
    CONFIG_FILE,
    INDEX_FILE,
    MANIFEST_FILE,
    SINGLE_FILE,
    Checkpoint,
    open_checkpoint,
    prepared_already,
    read_json_file,
)
from aiter_prep.storage.jsontext import printable
from aiter_prep.storage.object_store import is_store_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

INDEX_SUFFIX = ".safetensors.index.json"
HTTP_OUTAGE = 500  # from this status on, the Hub itself is at fault
SMALL_SUFFIXES = frozenset({".json", ".txt", ".jinja", ".model", ".tiktoken", ".py", ".md"})

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# no separator, no leading dot, and nothing that a pattern of huggingface_hub would expand
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@=-]*")


def is_hub_name(text: str) -> bool:
    """Return whether a text has the form of a repository's name, `org/name`."""
    return _HUB_ID.fullmatch(text) is not None


def is_hub_id(source: str) -> bool:
    """Return whether a source is meant as `org/name` of the Hub: no folder, and no path either."""
    return is_hub_name(source) and not Path(source).exists()


def local_folder(source: str) -> Path | None:
    """Return the folder that a source is read from, or None where it is read from no folder.

    Args:
        source: A folder, `org/name` of the Hub, which is read from huggingface_hub's cache, or the
            address of an object store. Nothing need be there.
    """
    if is_store_url(source):
        return None
    if is_hub_id(source):
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        name = repo_folder_name(repo_id=source, repo_type="model")
        return Path(constants.HF_HUB_CACHE) / name
    try:
        return Path(source).expanduser()
    except RuntimeError:  # `~name` of nobody
        return Path(source)


def name_of(source: str) -> str:
    """Return the last part of what a user calls a source, without looking at it."""
    if is_hub_id(source):
        return source.rpartition("/")[2]
    try:
        return Path(source).expanduser().resolve().name or "root"
    except (OSError, RuntimeError):
        return Path(source).name


def open_source(source: str, revision: str | None = None, *, quiet: bool = False) -> Checkpoint:
    """Open a checkpoint by what a user calls it, downloading it where it is a Hub id.

    Args:
        source: A folder, or `org/name`.
        revision: Branch, tag or commit of a Hub repository.
        quiet: Show no progress of the download.

    Raises:
        BadSource: There is no such folder or repository, or what it holds is not whole.
        NoRule: It is prepared already, or holds a dtype that is not known.
        InvalidUsage: A revision of a local folder.
    """
    if is_hub_id(source):
        folder, commit = download(source, revision, quiet=quiet)
        return open_checkpoint(folder, name=source, revision=commit)
    if is_store_url(source):
        raise InvalidUsage(
            f"`{printable(source)}` lies in an object store, where only `convert` reads",
            "fetch it with the store's own tools first",
        )
    if revision is not None:
        raise InvalidUsage(f"`{printable(source)}` is a local folder: --revision means nothing")
    try:
        return open_checkpoint(Path(source).expanduser())
    except (OSError, RuntimeError) as fault:  # RuntimeError: `~name` of nobody
        reason = getattr(fault, "strerror", None) or str(fault)
        raise BadSource(f"cannot read `{printable(source)}`: {printable(reason)}") from None


def download(repo_id: str, revision: str | None = None, *, quiet: bool = False) -> tuple[Path, str]:
    """Fetch what a conversion needs of a repository into huggingface_hub's cache.

    `config.json` and the index come first: they say which shards are needed. Whatever is in the
    cache already is not fetched again, and what was interrupted goes on.

    Args:
        repo_id: `org/name`.
        revision: Branch, tag or commit; the default branch if None.
        quiet: Show no progress.

    Returns:
        The folder in the cache, and the commit that it holds.

    Raises:
        BadSource: The repository, the revision or a file is missing or out of reach.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    with hub_faults(repo_id, revision):
        if quiet:
            disable_progress_bars()
        # resolves the revision, and notes it in the cache for a time without a network
        config = hf_hub_download(repo_id, CONFIG_FILE, revision=revision)
        folder = Path(config).parent
        names = _names(repo_id, folder.name)
        if names is not None:
            _fetch(repo_id, folder.name, names)
        return folder, folder.name


def _names(repo_id: str, commit: str) -> list[str] | None:
    """Return the names of a commit's files, or None if the Hub is out of reach."""
    from huggingface_hub import HfApi

    try:
        info = HfApi(library_name="aiter-prep").model_info(repo_id, revision=commit)
    except network_faults() as fault:
        response = getattr(fault, "response", None)
        if response is not None and response.status_code < HTTP_OUTAGE:
            raise
        return None
    return [file.rfilename for file in info.siblings or ()]


def network_faults() -> tuple[type[Exception], ...]:
    """Return what huggingface_hub and the HTTP client below it raise without an answer.

    The client changed twice (requests, httpx, httpx2); the root of its errors is always a base
    of `HfHubHTTPError`.
    """
    from huggingface_hub.errors import HfHubHTTPError

    return (OSError, *HfHubHTTPError.__bases__)


def _fetch(repo_id: str, commit: str, names: Sequence[str]) -> None:
    """Fetch the shards and the small files of a commit."""
    from huggingface_hub import hf_hub_download, snapshot_download

    shards = shard_names(
        repo_id, names, lambda index: Path(hf_hub_download(repo_id, index, revision=commit))
    )
    wanted = [*shards, *small_names(names)]
    snapshot_download(repo_id, revision=commit, allow_patterns=wanted)


def shard_names(
    repo_id: str, names: Sequence[str], fetch_index: Callable[[str], Path]
) -> list[str]:
    """Return the shards that count among the files of a repository or a remote folder.

    Args:
        repo_id: What to call it.
        names: Its files.
        fetch_index: Brings the index, and returns where it is.

    Raises:
        BadSource: It is not whole, or names what it may not name.
        NoRule: It is prepared already.
    """
    if MANIFEST_FILE in names:
        raise prepared_already(repo_id)
    index = _index_of(repo_id, names)
    if index is None:
        return [_single_file(repo_id, names)]
    return _shards_of_index(fetch_index(index), repo_id, names)


def small_names(names: Sequence[str]) -> list[str]:
    """Return the files to fetch beside the shards: tokenizer, templates, code and the like."""
    return [
        name
        for name in names
        if _PLAIN_NAME.fullmatch(name)
        and (PurePosixPath(name).suffix in SMALL_SUFFIXES or name.startswith("tokenizer"))
    ]


def _index_of(repo_id: str, names: Sequence[str]) -> str | None:
    if INDEX_FILE in names:
        return INDEX_FILE
    found = [n for n in names if n.endswith(INDEX_SUFFIX) and _PLAIN_NAME.fullmatch(n)]
    if len(found) > 1:
        shown = ", ".join(f"`{name}`" for name in sorted(found))
        raise BadSource(f"`{printable(repo_id)}` has more than one index: {shown}")
    return found[0] if found else None


def _single_file(repo_id: str, names: Sequence[str]) -> str:
    found = [n for n in names if n.endswith(".safetensors") and _PLAIN_NAME.fullmatch(n)]
    if SINGLE_FILE in found:
        return SINGLE_FILE
    if len(found) == 1:
        return found[0]
    what = f"{len(found)} safetensors files, but no index" if found else "no safetensors file"
    raise BadSource(
        f"`{printable(repo_id)}` has {what}",
        "choose a repository whose weights are safetensors shards with an index",
    )


def _shards_of_index(path: Path, repo_id: str, names: Sequence[str]) -> list[str]:
    """Return the shards that an index names, each checked to be the plain name of a file there."""
    weight_map = read_json_file(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadSource(f"`{printable(path.name)}` of `{printable(repo_id)}` has no `weight_map`")
    files: set[str] = set()
    for file in weight_map.values():
        is_plain = isinstance(file, str) and _PLAIN_NAME.fullmatch(file)
        if not is_plain or not file.endswith(".safetensors"):
            raise BadSource(
                f"`{printable(path.name)}` of `{printable(repo_id)}` names "
                f"{printable(repr(file))}, which is not the plain name of a safetensors file"
            )
        files.add(file)
    lost = sorted(files.difference(names))
    if lost:
        raise BadSource(
            f"`{printable(repo_id)}` has no `{lost[0]}`, which its index names",
            "the repository is incomplete: try another --revision",
        )
    return sorted(files)


@contextmanager
def hub_faults(repo_id: str, revision: str | None) -> Iterator[None]:
    """Turn what huggingface_hub raises into what a user can act upon."""
    try:
        yield
    except AiterPrepError:
        raise
    except Exception as fault:
        found = _explained(fault, printable(repo_id), revision)
        if found is None:
            raise
        raise found from None


# what huggingface_hub raises, the more special first; what that means, and what to do
_REFUSALS = (
    (
        "GatedRepoError",
        "access to `{repo_id}` is restricted, and you are not on its list",
        "accept its terms on the Hub, then `hf auth login` or set HF_TOKEN",
    ),
    (
        "RepositoryNotFoundError",
        "`{repo_id}` is neither a folder here nor a repository on the Hub that you may see",
        "check the spelling; for a private one `hf auth login` or set HF_TOKEN",
    ),
    (
        "RevisionNotFoundError",
        "`{repo_id}` has no revision `{revision}`",
        "give a branch, a tag or a full commit to --revision",
    ),
    (
        "LocalEntryNotFoundError",
        "`{repo_id}` is no folder here, the Hub cannot be reached, and its cache does not hold it",
        "check the network and HF_HUB_OFFLINE, or give a local folder",
    ),
    ("EntryNotFoundError", f"`{{repo_id}}` has no `{CONFIG_FILE}`", ""),
)


def _explained(fault: Exception, repo_id: str, revision: str | None) -> BadSource | None:
    from huggingface_hub import errors

    for kind, message, hint in _REFUSALS:
        if isinstance(fault, getattr(errors, kind)):
            shown = printable(revision or "main")
            return BadSource(message.format(repo_id=repo_id, revision=shown), hint)
    if isinstance(fault, (errors.HFValidationError, *network_faults())):
        first_line = str(fault).strip().partition("\n")[0] or type(fault).__name__
        return BadSource(
            f"cannot fetch `{repo_id}`: {printable(first_line)}",
            "what is complete stays in the cache: the same command goes on from there",
        )
    return None
