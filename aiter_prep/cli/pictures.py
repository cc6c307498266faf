"""Writes pictures and pages beside what a command says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiter_prep.errors import AiterPrepError, InvalidUsage
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from pathlib import Path

    from aiter_prep.cli.output import Output
    from aiter_prep.inspection import Inspection


def write_text(path: Path, text: str) -> None:
    """Write a file.

    Raises:
        AiterPrepError: It cannot be written.
    """
    try:
        path.write_text(text, "utf-8")
    except OSError as fault:
        raise AiterPrepError(f"cannot write `{printable(str(path))}`: {fault.strerror}") from None


def check_suffixes(plot: Path | None, html: Path | None) -> None:
    """Check that files are called what they will be.

    Raises:
        InvalidUsage: One is not.
    """
    for flag, path, suffix in (("--plot", plot, ".svg"), ("--html", html, ".html")):
        if path is not None and path.suffix.lower() != suffix:
            raise InvalidUsage(
                f"{flag} {printable(str(path))}: it writes {suffix} alone",
                f"give a name that ends in {suffix}; any browser shows it",
            )


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
        write_text(html, page(path))
        output.note(f"the page is in {html}")
    if plot is not None:
        write_text(plot, plot_of(found, path))
        output.note(f"the picture is in {plot}")
