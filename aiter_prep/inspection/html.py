"""Pieces of HTML; whatever a name or a value holds, it is text."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from aiter_prep.inspection.chart import slots_of
from aiter_prep.quantities import percent, size
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from aiter_prep.inspection.measures import Measures

MAX_TEXT = 2000


def text(value: object) -> str:
    """Return a value as text of HTML, control characters made visible; lines stay lines."""
    lines = str(value).split("\n")
    return "\n".join(escape(printable(line, MAX_TEXT), quote=True) for line in lines)


def code(value: object) -> str:
    """Return a value set as code."""
    return f"<code>{text(value)}</code>"


def facts(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield a list of labels and values, which are HTML; a label without a value is left out."""
    yield "<dl>"
    yield from (f"<dt>{text(label)}</dt><dd>{value}</dd>" for label, value in rows if value)
    yield "</dl>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield a table that scrolls by itself.

    Args:
        head: Headings; one that begins with `#` is of numbers, set flush right.
        rows: Cells, which are HTML.
    """
    classes = [' class="n"' if title.startswith("#") else "" for title in head]
    cells = (f"<th{c}>{text(t.lstrip('#'))}</th>" for c, t in zip(classes, head, strict=True))
    yield '<div class="scroll" tabindex="0"><table>'
    yield f"<tr>{''.join(cells)}</tr>"
    for row in rows:
        cells = (f"<td{c}>{cell}</td>" for c, cell in zip(classes, row, strict=True))
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</table></div>"


def fold(summary: str, content: Iterable[str]) -> Iterator[str]:
    """Yield content that opens on demand."""
    yield f"<details><summary>{text(summary)}</summary>"
    yield from content
    yield "</details>"


def bars(measures: Measures) -> Iterator[str]:
    """Yield a bar for each role."""
    slots = slots_of(measures.roles)
    most = max(measures.roles.values(), default=0) or 1
    yield '<div class="rows">'
    for role, total in measures.roles.items():
        value = f"{size(total)}, {percent(total, measures.total_bytes)}"
        yield f'<div><div class="label"><span>{text(role)}</span><span>{value}</span></div>'
        yield f'<div class="bar">{_block(slots[role], "width", total, most)}</div></div>'
    yield "</div>"


def layer_columns(measures: Measures) -> Iterator[str]:
    """Yield a column for each layer, its roles one above the other, padding on top."""
    slots = slots_of(measures.roles)
    most = max((sum(roles.values()) for roles in measures.layers.values()), default=0) or 1
    yield '<div class="layers">'
    for layer, roles in measures.layers.items():
        name = "tensors of no layer" if layer is None else f"layer {layer}"
        yield f'<span title="{text(f"{name}: {size(sum(roles.values()))}")}">'
        yield from _column(roles, slots, most)
        yield "</span>"
    yield "</div>"
    numbers = [layer for layer in measures.layers if layer is not None]
    ends = [f"layer {n}" for n in dict.fromkeys((min(numbers, default=0), max(numbers, default=0)))]
    rest = ["no layer"] if None in measures.layers else []
    labels = "".join(f"<span>{text(label)}</span>" for label in (*ends, *rest))
    yield f'<div class="axis">{labels}</div>'
    keys = "".join(f'<span><i class="{slots[r]}"></i>{text(r)}</span>' for r in measures.roles)
    yield f'<div class="legend">{keys}</div>'


def _column(roles: Mapping[str, int], slots: Mapping[str, str], most: int) -> Iterator[str]:
    for role, slot in slots.items():
        if roles.get(role):
            # of a column as high as the picture, so that the parts add up
            yield f'<i class="{slot}" style="height:{9 * roles[role] / most:.4f}rem"></i>'


def _block(slot: str, axis: str, part: int, whole: int) -> str:
    return f'<i class="{slot}" style="{axis}:{100 * part / whole:.2f}%"></i>'
