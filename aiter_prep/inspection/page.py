"""One page about a prepared folder: a single file of HTML that fetches nothing."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aiter_prep.inspection.html import bars, code, facts, fold, layer_columns, table, text
from aiter_prep.inspection.measures import measure_prepared
from aiter_prep.inspection.prepared import inspect_prepared, padding_of
from aiter_prep.inspection.serving import needs, serving_lines, sharing_words
from aiter_prep.layouts import drawing
from aiter_prep.layouts.table import LAYOUTS
from aiter_prep.manifest import read_manifest
from aiter_prep.quantities import count, percent, size
from aiter_prep.storage.dtypes import bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiter_prep.inspection.prepared import PreparedInspection
    from aiter_prep.manifest import Manifest, TensorRecord

STYLE_FILE = Path(__file__).with_name("page.css")
# nothing is fetched and nothing runs, whatever stands in the page
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
MAX_GROUPS, MAX_SHARDS = 200, 5000

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)", re.ASCII)


def page(folder: Path) -> str:
    """Return a page of HTML about a prepared folder, from its manifest alone.

    Raises:
        DataMismatch: The manifest is damaged.
    """
    manifest, found = read_manifest(folder), inspect_prepared(folder)
    name = folder.resolve().name
    body = [
        *_head(found, name),
        *_bytes(manifest),
        *_use(found, name),
        *_experts(found),
        *_layouts(manifest),
        *_tensors(manifest),
        *_files(manifest),
        f"<footer>{text(_author(found))}</footer>",
    ]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{text(name)}</title>",
            f"<style>\n{STYLE_FILE.read_text('utf-8')}</style></head>",
            "<body><main>",
            *body,
            "</main></body></html>",
            "",
        ]
    )


def _head(found: PreparedInspection, name: str) -> Iterator[str]:
    target = found.target
    yield f"<header><h1>{text(name)}</h1>"
    yield (
        f'<p class="soft">{text(found.source["name"])}, prepared for {text(target["engine"])} '
        f"{text(target['engine_version'])} on {text(target['gfx'])}, "
        f"{text(sharing_words(target))}</p>"
    )
    ranks = [entry for entry in found.ranks if entry.rank is not None]
    tiles = (
        (size(found.total_bytes), "on disk"),
        (size(max((entry.total_bytes for entry in ranks), default=0)), "experts of a rank"),
        (percent(found.padding_bytes, found.total_bytes), "padding"),
        (f"{sum(entry.tensors for entry in found.ranks):,}", "tensors"),
    )
    yield '<div class="tiles">'
    yield from (f"<div><b>{text(value)}</b><span>{text(of)}</span></div>" for value, of in tiles)
    yield "</div></header>"
    yield "<h2>What was done</h2>"
    revision = found.source["revision"]
    yield from facts(
        [
            ("Source", code(found.source["name"])),
            ("Commit", code(revision) if revision else ""),
            ("Model", f"{code(found.architecture)} ({text(found.model_type)})"),
            ("Target", f"{code(target['name'])} on {code(target['gfx'])}"),
            ("Ranks", text(sharing_words(target))),
            *(("Values changed", f"{code(n)}: {text(m)}") for n, m in found.conversions.items()),
            ("Way back", text(_way_back(found))),
        ]
    )
    if found.skipped:
        rows = [[code(e.get("name", "")), text(e.get("reason", ""))] for e in found.skipped]
        yield from fold(
            f"{count(len(rows), 'tensor')} of the source left out", table(["tensor", "why"], rows)
        )


def _way_back(found: PreparedInspection) -> str:
    if found.is_lossy:
        return "none: values were rounded as the engine does, so keep the source"
    return "every tensor of the source comes back, byte for byte"


def _bytes(manifest: Manifest) -> Iterator[str]:
    measures = measure_prepared(manifest)
    yield "<h2>Where the bytes are</h2>"
    yield from bars(measures)
    yield "<h3>By layer</h3>"
    yield from layer_columns(measures)


def _use(found: PreparedInspection, name: str) -> Iterator[str]:
    shown = shlex.quote(name)
    yield "<h2>How to use it</h2>"
    yield "<p>Check every byte, after any copy:</p>"
    yield f"<pre>aiter-prep verify {text(shown)}</pre>"
    yield f"<p>Serve it. {text(needs(found.target)).replace('`', '')}</p>"
    yield f"<pre>{text(chr(10).join(serving_lines(found.target, name)))}</pre>"
    if not found.is_lossy:
        yield "<p>Have the checkpoint back:</p>"
        yield f"<pre>aiter-prep restore {text(shown)} {text(shlex.quote(f'{name}-restored'))}</pre>"
    yield (
        '<p class="soft">A loader that does not know the format would shuffle the weights a second '
        "time and say nothing. Load them with one that does.</p>"
    )


def _experts(found: PreparedInspection) -> Iterator[str]:
    yield "<h2>Experts</h2>"
    for group in found.groups:
        kept = group.facts
        yield f"<h3>{code(group.experts)}</h3>"
        yield from facts(
            [
                ("Layers", text(group.layers)),
                ("Experts", text(kept["num_experts"])),
                ("Scheme", code(kept["scheme"])),
                ("Named like", code(kept["family"])),
                ("Hidden size", _padded(kept["hidden"], kept["padded_hidden"], "")),
                (
                    "Intermediate size",
                    _padded(
                        kept["intermediate"], kept["padded_intermediate_per_rank"], " for each rank"
                    ),
                ),
                ("Rows of gate and up", text(kept["row_order"])),
            ]
        )


def _padded(plain: object, stored: object, where: str) -> str:
    return text(f"{plain}, stored as {stored}{where}" if plain != stored else plain)


def _layouts(manifest: Manifest) -> Iterator[str]:
    """Yield each layout: drawn where it is one of ours, else in its digits."""
    yield "<h2>Layouts</h2>"
    yield (
        '<p class="soft">Where the bytes of a matrix go. Each cell holds the numbers of the bytes '
        "of storage that this part of the matrix becomes; the later in storage, the darker.</p>"
    )
    for name in sorted(manifest.layouts):
        layout = manifest.layout(name)
        yield f"<h3>{code(name)}</h3>"
        digits = (("Rows", layout.rows), ("Columns", layout.columns), ("Order", layout.order))
        yield from facts(
            [
                *((of, code(list(radices))) for of, radices in digits),
                ("The same in AITER", code(layout.aiter_call)),
            ]
        )
        if LAYOUTS.get(name) == layout and layout.is_shuffled:
            picture = drawing.svg(drawing.draw(layout))
            yield f'<figure><div class="picture">{picture}</div></figure>'


@dataclass
class _Group:
    """Tensors that differ in layer and rank alone."""

    count: int = 0
    total_bytes: int = 0
    padding_bytes: int = 0


def _tensors(manifest: Manifest) -> Iterator[str]:
    groups: dict[tuple[str, ...], _Group] = defaultdict(_Group)
    for record in manifest.tensors:
        group = groups[_kind_of(record)]
        group.count += 1
        group.total_bytes += bytes_of(record.dtype, record.shape) or 0
        group.padding_bytes += padding_of(record)
    rows = [
        [
            code(name),
            f"{group.count:,}",
            text(dtype),
            text(shape),
            text(layout),
            size(group.total_bytes),
            percent(group.padding_bytes, group.total_bytes),
        ]
        for (name, dtype, shape, layout), group in list(groups.items())[:MAX_GROUPS]
    ]
    yield "<h2>Tensors</h2>"
    head = ["name", "#how many", "dtype", "shape of one", "layout", "#bytes", "#padding"]
    yield from table(head, rows)
    if len(groups) > MAX_GROUPS:
        yield f'<p class="soft">and {len(groups) - MAX_GROUPS:,} more kinds of names</p>'


def _kind_of(record: TensorRecord) -> tuple[str, str, str, str]:
    name = _NUMBER.sub("{n}", record.name)
    dtype = record.runtime_dtype or record.dtype
    return name, dtype, " x ".join(map(str, record.shape)) or "one value", record.layout or ""


def _files(manifest: Manifest) -> Iterator[str]:
    yield "<h2>Files and digests</h2>"
    yield "<p>The manifest holds the digest of every tensor, too.</p>"
    shards = manifest.shards[:MAX_SHARDS]
    rows = [
        [
            code(shard.file),
            "all" if shard.rank is None else str(shard.rank),
            size(shard.size),
            code(shard.digest),
        ]
        for shard in shards
    ]
    more = f", the first {MAX_SHARDS:,}" if len(manifest.shards) > MAX_SHARDS else ""
    yield from fold(
        f"{count(len(manifest.shards), 'shard')}{more}",
        table(["file", "#rank", "#bytes", "digest"], rows),
    )
    files = [[code(f.name), size(f.size), code(f.digest)] for f in manifest.files]
    yield from fold(
        f"{count(len(files), 'other file')}", table(["file", "#bytes", "digest"], files)
    )
    source = [
        [code(f["name"]), size(f["size"]), code(f.get("sha256", "not compared"))]
        for f in manifest.source["files"][:MAX_SHARDS]
    ]
    yield from fold(
        f"{count(len(manifest.source['files']), 'shard')} of the source",
        table(["file", "#bytes", "SHA-256"], source),
    )


def _author(found: PreparedInspection) -> str:
    by = found.created_by
    return f"Written by {by['name']} {by['version']}, backend {by['backend']} on {by['device']}."
