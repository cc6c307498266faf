"""Tells whether a prepared folder is what a plan would lead to, without reading a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiter_prep.execution.record import (
    differing_fields,
    options_of,
    source_of,
    target_of,
    wrapped_config,
)
from aiter_prep.execution.source import read_small_file
from aiter_prep.manifest import read_manifest
from aiter_prep.storage.checkpoint import CONFIG_FILE, MANIFEST_FILE
from aiter_prep.storage.digest import digest_of
from aiter_prep.storage.jsontext import printable, shown

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from aiter_prep.manifest import Manifest
    from aiter_prep.plan.make import Plan


def differences(plan: Plan, out: Path) -> tuple[str, ...]:
    """Return in what a prepared folder is not what a plan leads to; empty if it is.

    Compared are the name and the revision of the source, the names, sizes and headers of its
    shards, its small files, and all that the manifest says of options, layouts and tensors, digests
    apart. Weights may change under the same header, so a local source whose shards changed after
    the folder was sealed differs too.

    Args:
        plan: From `make_plan`.
        out: The prepared folder.

    Raises:
        DataMismatch: It has no manifest, or one that is damaged.
        BadSource: A small file of the source cannot be read.
    """
    return tuple(_differences(plan, out, read_manifest(out)))


def _differences(plan: Plan, out: Path, manifest: Manifest) -> Iterator[str]:
    for what, wanted, held in (
        ("", target_of(plan), manifest.target),
        ("", options_of(plan), manifest.options),
        (" of the source", source_of(plan), manifest.source),
    ):
        for key, value in wanted.items():
            if _comparable(key, value) != _comparable(key, held.get(key)):
                yield f"{key}{what} is {_shown(held.get(key))}, not {_shown(value)}"
    if plan.checkpoint.revision is None and plan.checkpoint.remote is not None:
        yield "the source is in an object store, and its weights cannot be compared by its headers"
    elif plan.checkpoint.revision is None:
        sealed = (out / MANIFEST_FILE).stat().st_mtime_ns
        later = [h.file for h in plan.checkpoint.headers if max(h.mtime_ns, h.ctime_ns) > sealed]
        if later:
            yield f"`{printable(later[0])}` of the source changed since"
    yield from (f"`{field}` would be another" for field in differing_fields(plan, manifest))
    copied = {file.name: file.digest for file in manifest.files}
    files = {CONFIG_FILE: digest_of(wrapped_config(plan.checkpoint.config))}
    files |= {name: digest_of(read_small_file(plan, name)) for name in plan.small_files}
    for name in sorted({*copied, *files}):
        if copied.get(name) != files.get(name):
            yield f"`{printable(name)}` would be another"


def _comparable(key: str, value: Any) -> Any:
    """Return a value without what is noted of a streamed source alone."""
    if key != "files" or not isinstance(value, list):
        return value
    return [{k: v for k, v in entry.items() if k != "sha256"} for entry in value]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else shown(value, 40)
