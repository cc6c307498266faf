"""Opens sources whose shards come while they are converted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiter_prep.errors import InvalidUsage
from aiter_prep.storage.hub import is_hub_id
from aiter_prep.storage.hub_shards import HubFolder
from aiter_prep.storage.jsontext import printable
from aiter_prep.storage.object_store import ObjectSource, is_store_url
from aiter_prep.storage.remote import open_remote

if TYPE_CHECKING:
    from pathlib import Path

    from aiter_prep.storage.checkpoint import Checkpoint


def open_streamed(
    source: str, revision: str | None, scratch: Path, limit_bytes: int | None = None
) -> Checkpoint:
    """Open a source elsewhere by its headers; `execute` fetches the shards as it needs them.

    Args:
        source: `org/name` of the Hub, or an address such as `s3://bucket/folder`.
        revision: Branch, tag or commit.
        scratch: Where what is fetched lies for a while; see `scratch_folder`.
        limit_bytes: Most bytes of shards on the disk at a time.

    Raises:
        BadSource: It is missing, out of reach or not whole.
        NoRule: It is prepared already, or holds a dtype that is not known.
        InvalidUsage: It is a local folder.
    """
    if is_store_url(source):
        if revision is not None:
            raise InvalidUsage(f"`{printable(source)}` has no commits: --revision means nothing")
        return open_remote(ObjectSource(source), scratch, limit_bytes)
    if not is_hub_id(source):
        raise InvalidUsage(
            f"`{printable(source)}` is no Hub id: --stream has nothing to fetch",
            "give org/name, or leave out --stream",
        )
    return open_remote(HubFolder(source, revision), scratch, limit_bytes)
