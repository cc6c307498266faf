"""What a prepared folder promises, to and from JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiter_prep.errors import AiterPrepError, BadSource, DataMismatch
from aiter_prep.layouts.permutation import Layout
from aiter_prep.manifest_rules import check_manifest
from aiter_prep.storage import jsontext
from aiter_prep.storage.checkpoint import MANIFEST_FILE
from aiter_prep.storage.collector import collector_paused
from aiter_prep.storage.digest import digest_of
from aiter_prep.storage.files import check_files, read_whole
from aiter_prep.storage.jsontext import printable, shown
from aiter_prep.storage.schema import compile_schema

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiter_prep.storage.schema import Check

FORMAT_VERSION = 1
MAX_MANIFEST_BYTES = 2_000_000_000
SCHEMA_FILE = Path(__file__).with_name("manifest.schema.json")


@dataclass(frozen=True, slots=True)
class SourceSlice:
    """A rectangle of each expert's source matrix, and where it went.

    Attributes:
        pattern: Names of the source tensors, with `{expert}` for the id unless fused.
        dtype: safetensors dtype of the source.
        shape: Shape of one source tensor.
        fused: One tensor holds all experts.
        shared: Name of the last expert's source tensor, where that is a shared expert, or None.
        rows: Start, stop and step of the rows of an expert's matrix.
        columns: First byte and the byte after the last of each of these rows.
        row_bytes: Bytes of a whole row of the matrix.
        transposed: The matrix lies `[columns, rows]` in the file.
        conversion: Change of values on the way, or None.
        to_row: Row of the stored matrix, before it is laid out, at which they begin.
    """

    pattern: str
    dtype: str
    shape: tuple[int, ...]
    fused: bool
    shared: str | None
    rows: tuple[int, int, int]
    columns: tuple[int, int]
    row_bytes: int
    transposed: bool
    conversion: str | None
    to_row: int


@dataclass(frozen=True, slots=True)
class Pad:
    """Padding along one axis of an expert's matrix, or at the end of a folded tensor.

    Attributes:
        axis: `rows`, `columns` and `layout_columns` (of an expert's matrix, in elements; the last
            is what the layout itself adds), or `stored_rows` (of a folded tensor).
        start: Size without padding; JSON calls it `from`.
        stop: Size with it; JSON calls it `to`.
        fill: One element of it in hexadecimal digits, or the one byte that all consists of.
    """

    axis: str
    start: int
    stop: int
    fill: str


@dataclass(frozen=True, slots=True)
class Lost:
    """Bytes of the source that a conversion has no place for.

    Attributes:
        source: The byte that they were.
        stored: The byte that they became.
        count: How many there are.
        positions: Where they are: offsets in the tensor before it was laid out, all experts'
            stored matrices one after the other; None where they are too many to list.
    """

    source: int
    stored: int
    count: int
    positions: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor of a shard.

    Attributes:
        name: Its name.
        rank: Its rank, or None for a common tensor.
        file: The shard that holds it.
        dtype: Stored safetensors dtype.
        runtime_dtype: torch dtype that an engine views it as; None: what the dtype says.
        shape: Stored shape.
        logical_shape: Shape without padding.
        layout: Name of the layout, a key of `Manifest.layouts`; None for a common tensor.
        is_shuffled: Whether AITER's flag belongs on it.
        merge: A value computed from more than one source tensor, or None; it cannot be undone.
        packing: Change of width after the layout, or None.
        experts: Start, stop and step of the global ids, in the order in which they are stored.
        matrix: Rows, bytes per row, and bytes per row without the layout's own padding, of one
            expert's matrix before it is packed.
        form: `matrices`, `folded` (experts folded into rows), `flat`, `row_blocks` (32 rows in
            one), `rows`, `values`, `scalar`; None for a common tensor.
        pads: Its padding.
        fill: One element of padding in hexadecimal digits, or the one byte that all consists of.
        lost: What the conversion lost, or None.
        source: What it is made of; empty where a rank holds padding alone, and for common ones.
        digest: Digest of its bytes.
    """

    name: str
    rank: int | None
    file: str
    dtype: str
    runtime_dtype: str | None
    shape: tuple[int, ...]
    logical_shape: tuple[int, ...]
    layout: str | None
    is_shuffled: bool
    merge: str | None
    packing: str | None
    experts: tuple[int, int, int] | None
    matrix: tuple[int, int, int] | None
    form: str | None
    pads: tuple[Pad, ...]
    fill: str
    lost: Lost | None
    source: tuple[SourceSlice, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """One shard.

    Attributes:
        file: Its name.
        rank: Its rank, or None for common tensors.
        part: Its number among the shards of that rank.
        size: Bytes of the file.
        header_digest: Digest of its header.
        digest: Tree digest over the header and the tensors, in the order of the file.
    """

    file: str
    rank: int | None
    part: int
    size: int
    header_digest: str
    digest: str


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file beside the shards.

    Attributes:
        name: Its name.
        size: Its bytes.
        digest: Digest of its bytes.
    """

    name: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a prepared folder promises.

    Attributes:
        created_by: Name, version, backend, device, AITER version or None.
        source: Name, revision and files (name, size, header digest) of the source.
        target: Name, engine, engine version, gfx, tp, ep, ranks, row order.
        model: Architecture, model type, and each experts module with its sizes.
        options: What was asked for.
        layouts: Name to description of every layout in use.
        conversions: Name to meaning of every conversion, merge and packing in use.
        shards: The shards.
        files: The files beside them.
        tensors: Every tensor of every shard.
        skipped: Source tensors that were left out: name and reason.
        format_version: Version of the format.
    """

    created_by: Mapping[str, Any]
    source: Mapping[str, Any]
    target: Mapping[str, Any]
    model: Mapping[str, Any]
    options: Mapping[str, Any]
    layouts: Mapping[str, Mapping[str, Any]]
    conversions: Mapping[str, str]
    shards: tuple[ShardRecord, ...]
    files: tuple[FileRecord, ...]
    tensors: tuple[TensorRecord, ...]
    skipped: tuple[Mapping[str, str], ...]
    format_version: int = FORMAT_VERSION

    @property
    def lossy(self) -> tuple[TensorRecord, ...]:
        """Tensors that the source cannot be had back from."""
        return tuple(r for r in self.tensors if r.merge is not None or r.form == "scalar")

    def layout(self, name: str) -> Layout:
        """Return a layout as this manifest describes it, whatever our own table says.

        Raises:
            DataMismatch: The manifest does not describe it.
        """
        try:
            entry: dict[str, Any] = dict(self.layouts[name])
            for key in ("rows", "columns", "order"):
                entry[key] = tuple(entry[key])
            return Layout(name=name, **entry)
        except (KeyError, TypeError):
            raise DataMismatch(f"the manifest does not describe layout `{name}`") from None

    def to_json(self) -> bytes:
        """Return the text of `aiter_prep.json`, its own digest included."""
        document = {
            **_entry(self),
            "shards": [_entry(shard) for shard in self.shards],
            "files": [_entry(file) for file in self.files],
            "tensors": [_tensor_entry(record) for record in self.tensors],
        }
        document["self_digest"] = digest_of(jsontext.canonical(document))
        return jsontext.readable(document)


def describe_layout(layout: Layout) -> dict[str, Any]:
    """Return a layout as manifests describe it."""
    return {
        field.name: _plain(getattr(layout, field.name))
        for field in fields(Layout)
        if field.name != "name"
    }


def read_manifest(folder: Path, *, with_links: bool = False) -> Manifest:
    """Read and check the manifest of a prepared folder, and where the files are that it names.

    Args:
        folder: The prepared folder.
        with_links: Leave links that lead out of the folder to the caller.

    Raises:
        DataMismatch: It is missing, damaged, or of a format version that we do not know; or a file
            is a link that leads out of the folder.
        AiterPrepError: A file may not be read by us.
    """
    path = folder / MANIFEST_FILE
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise DataMismatch(f"`{MANIFEST_FILE}` is larger than {MAX_MANIFEST_BYTES} bytes")
        check_files(folder, [MANIFEST_FILE], with_links=False)
        text = read_whole(path, MAX_MANIFEST_BYTES)
    except OSError as fault:
        raise _unreadable(folder, fault) from None
    manifest = parse_manifest(text)
    names = [entry.file for entry in manifest.shards] + [entry.name for entry in manifest.files]
    check_files(folder, names, with_links=with_links)
    return manifest


def _unreadable(folder: Path, fault: OSError) -> AiterPrepError:
    """Return why a folder has no manifest that we can read."""
    name = printable(str(folder))
    if isinstance(fault, PermissionError):
        return AiterPrepError(
            f"cannot read the manifest of `{name}`: {fault.strerror}", "mend its permissions"
        )
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        return DataMismatch(f"`{name}` {what}", "give a prepared folder")
    if isinstance(fault, FileNotFoundError):
        return DataMismatch(
            f"`{name}` is not a prepared folder: it has no `{MANIFEST_FILE}`",
            "prepare a checkpoint with `aiter-prep convert`",
        )
    return DataMismatch(f"`{name}` is not a prepared folder: `{MANIFEST_FILE}`: {fault.strerror}")


@collector_paused()
def parse_manifest(text: bytes) -> Manifest:
    """Return the manifest that a text holds.

    Raises:
        DataMismatch: The text is damaged, or of a format version that we do not know.
    """
    try:
        document = jsontext.parse_object(text, f"`{MANIFEST_FILE}`")
    except BadSource as fault:
        raise DataMismatch(fault.message) from None
    version = document.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise DataMismatch(
            f"`{MANIFEST_FILE}` has format version {shown(version)}, this program knows "
            f"{FORMAT_VERSION}",
            "use the version of aiter-prep that wrote it",
        )
    promised = document.pop("self_digest", None)
    found = digest_of(jsontext.canonical(document))
    if promised != found:
        raise DataMismatch(
            f"`{MANIFEST_FILE}` was changed: its digest is {found}, it says {shown(promised)}"
        )
    try:
        _schema()({**document, "self_digest": found}, "the manifest")
        manifest = _manifest(document)
        check_manifest(manifest)
    except ValueError as fault:
        raise DataMismatch(
            f"`{MANIFEST_FILE}` is not of format version {FORMAT_VERSION}: {printable(str(fault))}"
        ) from None
    return manifest


@lru_cache(maxsize=1)
def _schema() -> Check:
    return compile_schema(json.loads(SCHEMA_FILE.read_text("utf-8")))


def _manifest(document: dict[str, Any]) -> Manifest:
    return Manifest(
        **{
            **document,
            "shards": tuple(ShardRecord(**entry) for entry in document["shards"]),
            "files": tuple(FileRecord(**entry) for entry in document["files"]),
            "tensors": tuple(_tensor(entry) for entry in document["tensors"]),
            "skipped": tuple(document["skipped"]),
        }
    )


def _tensor(entry: dict[str, Any]) -> TensorRecord:
    pads = tuple(Pad(p["axis"], p["from"], p["to"], p["fill"]) for p in entry.pop("pads"))
    source = tuple(
        SourceSlice(
            **{
                **item,
                "shape": tuple(item["shape"]),
                "rows": tuple(item["rows"]),
                "columns": tuple(item["columns"]),
            }
        )
        for item in entry.pop("source")
    )
    for key in ("shape", "logical_shape", "experts", "matrix"):
        entry[key] = _tuple(entry[key])
    lost = entry.pop("lost")
    if lost is not None:
        lost = Lost(**{**lost, "positions": _tuple(lost["positions"])})
    return TensorRecord(**entry, pads=pads, source=source, lost=lost)


def _entry(record: Any) -> dict[str, Any]:
    """Return the fields of one of the dataclasses above; JSON writes tuples as lists."""
    return {name: getattr(record, name) for name in record.__slots__}


def _tensor_entry(record: TensorRecord) -> dict[str, Any]:
    return {
        **_entry(record),
        "pads": [
            {"axis": pad.axis, "from": pad.start, "to": pad.stop, "fill": pad.fill}
            for pad in record.pads
        ],
        "lost": None if record.lost is None else _entry(record.lost),
        "source": [_entry(item) for item in record.source],
    }


def _tuple(values: list[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)


def _plain(value: Any) -> Any:
    """Return a value as JSON would bring it back: tuples as lists."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
