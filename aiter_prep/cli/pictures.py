"""Writes pictures and pages beside what a command says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiter_prep.errors import InvalidUsage
from aiter_prep.storage.jsontext import printable
from aiter_prep.storage.side_files import check_side_file, is_written_in_place, write_side_file

if TYPE_CHECKING:
    from pathlib import Path

    from aiter_prep.cli.output import Output
    from aiter_prep.inspection import Inspection
    from aiter_prep.inspection.picture import Picture

PLOT_SUFFIXES = (".svg", ".png")


def check_pictures(path: Path, plot: Path | None, html: Path | None) -> None:
    """Check that files are called what they will be, and may be written where they are wanted.

    Raises:
        InvalidUsage: One is not, or would lie in the folder that it is about.
        AiterPrepError: One has no folder to lie in, or what draws it is not installed.
    """
    for flag, file, suffixes in (("--plot", plot, PLOT_SUFFIXES), ("--html", html, (".html",))):
        if file is None:
            continue
        check_side_file(file, [path])
        if file.suffix.lower() not in suffixes and not is_written_in_place(file):
            kinds = " and ".join(suffixes)
            raise InvalidUsage(
                f"{flag} {printable(str(file))}: it writes {kinds} alone",
                f"give a name that ends in {' or '.join(suffixes)}",
            )
    if plot is not None and plot.suffix.lower() == ".png":
        from aiter_prep.inspection.raster import check_can_draw

        check_can_draw()


def write_pictures(
    output: Output, found: Inspection, path: Path, plot: Path | None, html: Path | None
) -> None:
    """Write a picture and a page of what was found in a folder, where they are wanted.

    Raises:
        InvalidUsage: The folder is none of which there is such a thing.
        AiterPrepError: A file cannot be written.
    """
    if plot is None and html is None:
        return
    from aiter_prep.inspection import PreparedInspection
    from aiter_prep.inspection.page import page
    from aiter_prep.inspection.plot import plot_of

    if html is not None:
        if not isinstance(found, PreparedInspection):
            raise InvalidUsage(
                f"`{printable(str(path))}` is no prepared folder: --html shows what was done",
                "convert it first, or draw it with --plot",
            )
        write_side_file(html, page(path).encode())
        output.note(f"the page is in {html}")
    if plot is not None:
        write_side_file(plot, _drawn(plot_of(found, path), plot.suffix.lower()))
        output.note(f"the picture is in {plot}")


def _drawn(picture: Picture, suffix: str) -> bytes:
    if suffix == ".png":
        from aiter_prep.inspection.raster import png

        return png(picture)
    from aiter_prep.inspection.picture import svg

    return svg(picture).encode()
