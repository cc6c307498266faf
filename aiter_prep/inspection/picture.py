"""A picture as data, and as SVG that reads well on light and on dark."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# class of a shape to its colour on light, and on dark where that is another
COLOURS: Mapping[str, tuple[str, str]] = {
    "paper": ("#ffffff", "#14181d"),
    "": ("#1f2328", "#e6edf3"),
    "head": ("#1f2328", "#e6edf3"),
    "title": ("#1f2328", "#e6edf3"),
    "soft": ("#59636e", "#9aa5b1"),
    "line": ("#d1d9e0", "#3d444d"),
    "c0": ("#2f7ea3", "#2f7ea3"),
    "c1": ("#8cc2d9", "#8cc2d9"),
    "c2": ("#4f8a5b", "#4f8a5b"),
    "c3": ("#b3cf9f", "#b3cf9f"),
    "c4": ("#b8732f", "#b8732f"),
    "c5": ("#e3b778", "#e3b778"),
    "c6": ("#8d86a8", "#8d86a8"),
    "pad": ("#c3c8ce", "#59616b"),
}
SIZES: Mapping[str, int] = {"": 13, "soft": 13, "title": 13, "head": 18}  # of text, in pixels
BOLD = frozenset({"head", "title"})


@dataclass(frozen=True, slots=True)
class Text:
    """A line of text.

    Attributes:
        x: Where it is anchored, in pixels from the left.
        y: Its base line, in pixels from the top.
        text: What it says.
        kind: A key of `SIZES`.
        anchor: Its `start`, `middle` or `end`.
    """

    x: float
    y: float
    text: str
    kind: str = ""
    anchor: str = "start"


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle; a line is a thin one.

    Attributes:
        x: Its left edge, in pixels from the left.
        y: Its upper edge, in pixels from the top.
        width: Pixels.
        height: Pixels.
        kind: A key of `COLOURS`.
    """

    x: float
    y: float
    width: float
    height: float
    kind: str


@dataclass(frozen=True, slots=True)
class Picture:
    """What is drawn, from the lowest shape to the topmost.

    Attributes:
        title: What it shows.
        width: Pixels.
        height: Pixels.
        shapes: Its shapes.
    """

    title: str
    width: float
    height: float
    shapes: tuple[Text | Box, ...]


def svg(picture: Picture) -> str:
    """Return a picture as SVG that follows the reader's light or dark."""
    size = f'width="{picture.width:.5g}" height="{picture.height:.5g}"'
    box = f'viewBox="0 0 {picture.width:.5g} {picture.height:.5g}" {size}'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img">',
            f"<title>{_escaped(picture.title)}</title>",
            "<style>",
            *_style(),
            "</style>",
            f'<rect class="paper" {size}/>',
            *map(_element, picture.shapes),
            "</svg>",
            "",
        ]
    )


def _style() -> Iterator[str]:
    yield "text { font-family: system-ui, sans-serif }"
    for kind, pixels in SIZES.items():
        weight = "; font-weight: 600" if kind in BOLD else ""
        yield f"text{_class(kind)} {{ font-size: {pixels}px{weight} }}"
    yield from (_rule(kind, light) for kind, (light, _) in COLOURS.items())
    yield "@media (prefers-color-scheme: dark) {"
    yield from (_rule(kind, dark) for kind, (light, dark) in COLOURS.items() if dark != light)
    yield "}"


def _rule(kind: str, colour: str) -> str:
    return f"{_class(kind) or 'text'} {{ fill: {colour} }}"


def _class(kind: str) -> str:
    return f".{kind}" if kind else ""


def _element(shape: Text | Box) -> str:
    where = f'x="{shape.x:.5g}" y="{shape.y:.5g}" class="{shape.kind}"'
    if isinstance(shape, Text):
        return f'<text {where} text-anchor="{shape.anchor}">{_escaped(shape.text)}</text>'
    return f'<rect {where} width="{shape.width:.5g}" height="{shape.height:.5g}"/>'


def _escaped(text: str) -> str:
    return escape(printable(text), quote=True)
