"""Completes a prepared folder of which several processes have written the shards."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from aiter_prep.errors import AiterPrepError, DataMismatch
from aiter_prep.execution.bundles import Part, shares_of
from aiter_prep.execution.fingerprint import facts_of_run, fingerprint_of
from aiter_prep.execution.record import differing_fields, manifest_of
from aiter_prep.execution.run import promised, write_files
from aiter_prep.execution.sharing import Conversion, shared_conversion
from aiter_prep.execution.source import check_source_unchanged
from aiter_prep.manifest import read_manifest
from aiter_prep.plan.make import make_plan
from aiter_prep.storage.checkpoint import MANIFEST_FILE, Checkpoint, open_checkpoint
from aiter_prep.storage.files import local_path
from aiter_prep.storage.folder import JOURNAL_FILE, PARTS_FOLDER
from aiter_prep.storage.journal import differing_facts
from aiter_prep.storage.jsontext import printable
from aiter_prep.storage.output import OutputFolder, looks_like
from aiter_prep.storage.parts import (
    PartsFolder,
    forget_parts,
    key_of,
    pending_plans,
    place_of_parts,
)
from aiter_prep.storage.sources import open_streamed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiter_prep.manifest import Manifest
    from aiter_prep.plan.make import Plan
    from aiter_prep.plan.shards import Shard

MAX_SHOWN = 64
_LABEL = re.compile(r"part-(\d+)-of-(\d+)")


def seal(out: str | Path, *, source: Checkpoint | None = None) -> Manifest:
    """Complete a prepared folder whose shards `execute_part` has written.

    The plan is made again from the source, and must be the one that every part has followed. Every
    shard of it must be there, whole and noted. Then the shards get their place by a rename each,
    and the small files and the manifest are written. No tensor is read; of a source that lies
    elsewhere, headers and small files are. The folder is the one that `execute` would have
    written, byte for byte.

    A folder that is sealed already is left as it is.

    Args:
        out: The folder.
        source: The source, where it does not lie where the parts found it.

    Raises:
        DataMismatch: Parts are missing, or were made by another plan.
        BadSource: The source changed or cannot be read.
        OutputNotEmpty: Another process is sealing the folder.
        AiterPrepError: The disk is full or fails.
    """
    out = local_path(out, "the folder to write", "write to a local folder, then `push` it")
    place = place_of_parts(out)
    key, request = _only_plan(place)
    if request is None:
        return read_manifest(out)
    with TemporaryDirectory(prefix="aiter-prep-") as scratch:
        plan = _plan_again(request, source, Path(scratch))
        return _seal_request(replace(shared_conversion(plan, out), place=place), key, request)


def _seal_request(conversion: Conversion, key: str, request: Mapping[str, Any]) -> Manifest:
    place = conversion.place
    facts = conversion.request["facts"]
    if key_of(conversion.digest) != key:
        raise DataMismatch(
            f"the parts in `{printable(str(place))}` were made by another plan than their source "
            f"leads to now: {differing_facts(request['facts'], facts)} differ",
            "the source, or this program, was changed since: convert again into another folder",
        )
    if is_sealed(place):
        return _sealed_before(place, conversion.plan)
    return seal_conversion(conversion)


def seal_conversion(conversion: Conversion) -> Manifest:
    """Complete a folder that was written for this very conversion.

    Raises:
        As `seal`.
    """
    out, place = conversion.out, conversion.place
    if place != out and not (out / MANIFEST_FILE).exists():
        raise DataMismatch(
            f"`{printable(str(out))}`, which was to be replaced, is no prepared folder any more",
            f"rename `{printable(str(place))}`, where its parts wait, to that name; then seal it",
        )
    try:
        return _seal(conversion)
    except OSError as fault:
        raise AiterPrepError(
            f"cannot write `{printable(str(out))}`: {fault.strerror}",
            "mend the cause, and seal it again",
        ) from fault


def is_sealed(out: Path) -> bool:
    """Return whether a folder has a manifest, and was brought to its end."""
    return (out / MANIFEST_FILE).exists() and not (out / JOURNAL_FILE).exists()


def _only_plan(out: Path) -> tuple[str, Mapping[str, Any] | None]:
    """Return the only plan whose parts wait in a folder; None for a folder that is sealed."""
    name = printable(str(out))
    plans = pending_plans(out)
    if is_sealed(out) and not any(plans.values()):
        forget_parts(out)  # a kill may have left some of it
        return "", None
    if not plans:
        raise DataMismatch(
            f"`{name}` holds no part of a conversion",
            "run the parts first: `aiter-prep convert` with --part",
        )
    keys = list(plans)
    if len(plans) > 1:
        facts = [plan.get("facts", {}) for plan in plans.values()]
        raise DataMismatch(
            f"`{name}` holds parts of {len(plans)} conversions: "
            f"{differing_facts(facts[0], facts[1])} differ",
            "remove those that are not wanted: "
            + ", ".join(f"`{PARTS_FOLDER}/{key}`" for key in keys),
        )
    if not plans[keys[0]]:
        raise DataMismatch(f"no part has begun in `{name}`", "run the parts first")
    return keys[0], plans[keys[0]]


def _plan_again(request: Mapping[str, Any], source: Checkpoint | None, scratch: Path) -> Plan:
    place = request["source"]
    if source is None and place["folder"] is None:
        source = open_streamed(place["name"], place["revision"], scratch)
    elif source is None:
        source = open_checkpoint(place["folder"], name=place["name"], revision=place["revision"])
    elif source.remote is None and place["folder"] is not None:
        # a folder may be called something else where it lies now; what it holds is compared
        source = replace(source, name=place["name"], revision=place["revision"])
    return make_plan(source, **request["arguments"])


def _sealed_before(out: Path, plan: Plan) -> Manifest:
    """Return the manifest of a folder beside which parts are left, and remove these.

    Raises:
        DataMismatch: They are not of the conversion that the folder holds.
    """
    manifest = read_manifest(out)
    if differing_fields(plan, manifest):
        raise DataMismatch(
            f"`{printable(str(out))}` is a prepared folder, and holds parts of another conversion",
            f"remove its `{PARTS_FOLDER}` if they are not wanted",
        )
    forget_parts(out)
    return manifest


def _seal(conversion: Conversion) -> Manifest:
    out, plan, place = conversion.out, conversion.plan, conversion.place
    parts = PartsFolder(place, conversion.digest)
    is_begun = (place / JOURNAL_FILE).exists()
    missing = [
        shard
        for shard in plan.shards
        if parts.note_of(shard.layout) is None
        and not (is_begun and looks_like(place / shard.file, shard.layout))
    ]
    if missing:
        raise _incomplete(out, plan, parts, missing)
    with OutputFolder(
        out,
        fingerprint=fingerprint_of(plan),
        facts=facts_of_run(plan),
        resume=True,
        overwrite=place != out,
        sealing=True,
    ) as output:
        output.keep_only({shard.file: shard.layout for shard in plan.shards})
        left = [shard for shard in plan.shards if shard.file not in output.finished]
        notes = {shard.file: parts.note_of(shard.layout) for shard in left}
        found = {file: note for file, note in notes.items() if note is not None}
        if len(found) < len(left):
            gone = [shard for shard in left if shard.file not in found]
            raise _incomplete(out, plan, parts, gone)
        output.take_over({parts.folder / file: note.tensors for file, note in found.items()})
        check_source_unchanged(plan)
        files = list(write_files(plan, output))
        manifest = manifest_of(plan, _maker(plan, parts), output.finished, files)
        output.seal(manifest.to_json(), promised(manifest))
    forget_parts(out)
    return manifest


def _maker(plan: Plan, parts: PartsFolder) -> dict[str, Any]:
    """Return what wrote the shards; where parts had other backends, all of them."""
    notes = (parts.noted(shard.layout) for shard in plan.shards)
    makers = [note.maker for note in notes if note is not None]
    joined: dict[str, Any] = {}
    for key in dict.fromkeys(key for maker in makers for key in maker):
        values = {maker.get(key) for maker in makers}
        if len(values) == 1:
            joined[key] = values.pop()
        else:
            joined[key] = "-and-".join(sorted(str(v) for v in values if v is not None))
    return joined


def _incomplete(out: Path, plan: Plan, parts: PartsFolder, missing: list[Shard]) -> DataMismatch:
    files = {shard.file for shard in missing}
    what = f"{len(files)} of {len(plan.shards)} shards are missing in `{printable(str(out))}`"
    begun = {Part(int(m[2]), int(m[1])) for m in map(_LABEL.fullmatch, parts.labels()) if m}
    if not begun:
        return DataMismatch(what, "run what wrote the others again: it writes what is missing")
    count = Counter(part.count for part in begun).most_common(1)[0][0]
    named: list[str] = []
    for number, bundles in enumerate(shares_of(plan, count), 1):
        part = Part(count, number)
        own = [file for bundle in bundles for file in bundle.files]
        gone = len(files.intersection(own))
        if gone:
            state = f"{gone} of {len(own)} shards" if part in begun else "not begun"
            named.append(f"{part} ({state})")
    more = f" and {len(named) - MAX_SHOWN} more" if len(named) > MAX_SHOWN else ""
    return DataMismatch(
        f"{what}: those of part {', '.join(named[:MAX_SHOWN])}{more}",
        "run these parts again with the same --part, source and options, then seal again",
    )
