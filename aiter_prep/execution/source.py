"""Looks after the source of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiter_prep.errors import BadSource
from aiter_prep.storage.checkpoint import (
    CONFIG_FILE,
    HF_QUANT_CONFIG_FILE,
    read_config,
    read_optional_json,
)
from aiter_prep.storage.files import read_whole
from aiter_prep.storage.folder import MAX_SMALL_FILE_BYTES
from aiter_prep.storage.jsontext import canonical, printable

if TYPE_CHECKING:
    from aiter_prep.plan.make import Plan


def read_small_file(plan: Plan, name: str) -> bytes:
    """Read a file that is copied.

    Raises:
        BadSource: It cannot be read, or is no small file any more.
    """
    try:
        return read_whole(plan.checkpoint.folder / name, MAX_SMALL_FILE_BYTES)
    except OSError as fault:
        raise BadSource(f"cannot read `{printable(name)}`: {fault.strerror}") from None


def check_source_unchanged(plan: Plan) -> None:
    """Check that the source is as it was when the plan was made.

    What comes from elsewhere is compared with its promise when it comes, and is gone by now.

    Raises:
        BadSource: The size or a time of a change of a shard is another, a config says something
            else.
    """
    if plan.checkpoint.remote is not None:
        return
    folder = plan.checkpoint.folder
    for header in plan.checkpoint.headers:
        try:
            status = (folder / header.file).stat()
        except OSError as fault:
            raise BadSource(f"cannot read `{printable(header.file)}`: {fault.strerror}") from None
        # a file of the same size and time may have taken its place: the last one tells
        found = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if found != (header.file_bytes, header.mtime_ns, header.ctime_ns):
            raise _changed(header.file)
    texts = [
        canonical(config, allow_nan=True)  # NaN is not equal to NaN
        for config in (read_config(folder), plan.checkpoint.config)
    ]
    if texts[0] != texts[1]:
        raise _changed(CONFIG_FILE)
    if read_optional_json(folder / HF_QUANT_CONFIG_FILE) != plan.checkpoint.hf_quant_config:
        raise _changed(HF_QUANT_CONFIG_FILE)


def _changed(file: str) -> BadSource:
    return BadSource(
        f"`{printable(file)}` changed while it was read",
        "nothing was sealed: convert again when the source is at rest, with --overwrite",
    )
