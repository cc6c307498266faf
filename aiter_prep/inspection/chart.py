"""Draws where the bytes of a folder are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiter_prep.inspection.measures import PADDING
from aiter_prep.inspection.picture import Box, Picture, Text
from aiter_prep.quantities import percent, size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from aiter_prep.inspection.measures import Measures
    from aiter_prep.inspection.model import Outlook

WIDTH, EDGE, LABELS, VALUES = 760, 24, 190, 175
ROW, BAR, COLUMNS_HEIGHT, LEGEND_ROW = 26, 16, 170, 20
CHARACTER = 7.8  # of the font, about
MAX_LABELS = 24  # below the columns
SLOTS = 7


@dataclass(frozen=True, slots=True)
class Row:
    """A bar: what it is called, what it is made of, and what it comes to.

    Attributes:
        label: Before the bar.
        parts: Classes of colour and bytes.
        value: Behind the bar.
    """

    label: str
    parts: tuple[tuple[str, int], ...]
    value: str

    @property
    def total_bytes(self) -> int:
        """Bytes of all its parts."""
        return sum(part for _, part in self.parts)


def slots_of(roles: Iterable[str]) -> dict[str, str]:
    """Return a class of colour for each role; padding has its own."""
    named = [role for role in roles if role != PADDING]
    free = [f"c{n}" for n in range(SLOTS) if f"c{n}" not in map(_KNOWN.get, named)] or ["c6"]
    others = [role for role in named if role not in _KNOWN]
    found = {role: free[n % len(free)] for n, role in enumerate(others)}
    slots = {role: _KNOWN.get(role) or found[role] for role in named}
    return {**slots, PADDING: "pad"}


_KNOWN = {
    "expert weights": "c0",
    "expert scales": "c1",
    "common": "c2",
    "attention": "c2",
    "dense": "c3",
    "shared experts": "c4",
    "embeddings": "c6",
}


def role_rows(measures: Measures) -> list[Row]:
    """Return a bar for each role."""
    slots = slots_of(measures.roles)
    return [
        Row(role, ((slots[role], total),), f"{size(total)}, {percent(total, measures.total_bytes)}")
        for role, total in measures.roles.items()
    ]


def tp_rows(outlooks: Sequence[Outlook]) -> list[Row]:
    """Return a bar for each number of ranks that was forecast, padding apart."""
    rows: list[Row] = []
    seen: set[tuple[object, ...]] = set()
    for outlook in outlooks:
        key = (outlook.target, outlook.forecasts)
        if key in seen:  # another chip, of which the same would be made
            continue
        seen.add(key)
        for forecast in outlook.forecasts:
            experts = forecast.total_bytes - forecast.padding_bytes
            padding = percent(forecast.padding_bytes, forecast.total_bytes)
            value = f"{size(forecast.total_bytes)}, {padding} padding"
            parts = (("c0", experts), ("pad", forecast.padding_bytes))
            rows.append(Row(f"{outlook.target} --tp {forecast.tp}", parts, value))
    return rows


def chart(title: str, below: str, measures: Measures, more: Mapping[str, Sequence[Row]]) -> Picture:
    """Return a picture: bytes by role, bytes by layer, and other bars.

    Args:
        title: What is shown.
        below: What is said of it.
        measures: The bytes.
        more: Headings of further bars, and the bars.
    """
    drawing = _Drawing()
    limit = int((WIDTH - 2 * EDGE) / (1.35 * CHARACTER))
    drawing.text(EDGE, drawing.y, title if len(title) <= limit else f"{title[:limit]}…", "head")
    drawing.text(EDGE, drawing.y + 22, below, "soft")
    drawing.y += 58
    drawing.bars("Bytes by role", role_rows(measures))
    drawing.columns("Bytes by layer", measures)
    for heading, rows in more.items():
        if rows:
            drawing.bars(heading, rows)
    return Picture(title, WIDTH, drawing.y, tuple(drawing.shapes))


class _Drawing:
    """A picture that grows downwards."""

    def __init__(self) -> None:
        self.y = 36.0
        self.shapes: list[Text | Box] = []

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """Write some text."""
        self.shapes.append(Text(x, y, text, kind, anchor))

    def bars(self, heading: str, rows: Sequence[Row]) -> None:
        """Draw bars, one below the other, to the scale of the longest."""
        self._heading(heading)
        most = max((row.total_bytes for row in rows), default=0) or 1
        room = WIDTH - 2 * EDGE - LABELS - VALUES
        for row in rows:
            middle = self.y + BAR - 3
            limit = int((LABELS - 10) / CHARACTER)
            label = row.label if len(row.label) <= limit else f"{row.label[: limit - 1]}…"
            self.text(EDGE + LABELS - 10, middle, label, "", "end")
            x = float(EDGE + LABELS)
            for slot, part in row.parts:
                x = self._rectangle(x, self.y, room * part / most, BAR, slot)
            self.text(x + 8, middle, row.value, "soft")
            self.y += ROW
        self.y += 28

    def columns(self, heading: str, measures: Measures) -> None:
        """Draw a column for each layer, its roles one above the other, and what the colours are."""
        self._heading(heading)
        slots = slots_of(measures.roles)
        most = max((sum(roles.values()) for roles in measures.layers.values()), default=0) or 1
        left, base = EDGE + 70, self.y + COLUMNS_HEIGHT
        step = (WIDTH - EDGE - left) / max(1, len(measures.layers))
        for y, total in ((self.y, most), (base, 0)):
            self._rectangle(left, y - 0.5, WIDTH - EDGE - left, 1, "line")
            self.text(left - 8, y + 4, size(total), "soft", "end")
        every = -(-len(measures.layers) // MAX_LABELS)
        # numbers stay clear of the `rest` behind them
        clear = CHARACTER * len("rest00") / step if None in measures.layers else 0
        for number, (layer, roles) in enumerate(measures.layers.items()):
            x, y = left + step * number, base
            for role in slots:
                height = COLUMNS_HEIGHT * roles.get(role, 0) / most
                y -= height
                self._rectangle(x + step * 0.1, y, step * 0.8, height, slots[role])
            is_marked = number % every == 0 and number + clear <= len(measures.layers)
            if layer is None or is_marked:
                label = "rest" if layer is None else str(layer)
                self.text(x + step / 2, base + 18, label, "soft", "middle")
        self.y = base + 40
        self._legend({role: slots[role] for role in measures.roles})
        self.y += 20

    def _heading(self, text: str) -> None:
        self.text(EDGE, self.y, text, "title")
        self.y += 16

    def _rectangle(self, x: float, y: float, width: float, height: float, slot: str) -> float:
        if width > 0 and height > 0:
            self.shapes.append(Box(x, y, width, height, slot))
        return x + width

    def _legend(self, slots: Mapping[str, str]) -> None:
        x = float(EDGE)
        for role, slot in slots.items():
            width = 18 + CHARACTER * len(role) + 18
            if x + width > WIDTH - EDGE:
                x, self.y = float(EDGE), self.y + LEGEND_ROW
            self._rectangle(x, self.y - 10, 12, 12, slot)
            self.text(x + 18, self.y, role)
            x += width
        self.y += LEGEND_ROW
