"""`aiter-prep layouts`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from aiter_prep.cli import words
from aiter_prep.cli.flags import Json, Quiet, Verbose, exit_codes, local, output_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from aiter_prep.cli.output import Styled
    from aiter_prep.layouts.drawing import Cell, Drawing

SCHEMA = "aiter-prep/layouts/1"
SHOW_SCHEMA = "aiter-prep/layouts-show/1"

Name: TypeAlias = Annotated[str, typer.Argument(help="A layout, as the list calls it.")]
Svg: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--svg",
        metavar="FILE",
        parser=local("--svg"),
        help="Also write the drawing as an SVG picture.",
    ),
]


def commands() -> typer.Typer:
    """Return `layouts` with `layouts show` below it."""
    app = typer.Typer(
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode=None,
    )
    app.callback(invoke_without_command=True, epilog=exit_codes())(layouts)
    app.command("show", epilog=exit_codes(11))(show)
    return app


def layouts(
    context: typer.Context,
    *,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """List the known layouts and targets, or draw one layout."""
    if context.invoked_subcommand is not None:
        return
    output = output_of(context, as_json=as_json, quiet=quiet, verbose=verbose)
    output.lines(*_layout_lines(), *_target_lines())
    output.document(SCHEMA, _body())


def show(
    context: typer.Context,
    name: Name,
    *,
    svg: Svg = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Draw where the bytes of a small matrix go in a layout.

    Each cell holds the numbers of the bytes of storage that this part of the matrix becomes; the
    later in storage, the darker.
    """
    from aiter_prep.layouts import drawing
    from aiter_prep.layouts.table import layout_named
    from aiter_prep.storage.side_files import check_side_file, write_side_file

    output = output_of(context, as_json=as_json, quiet=quiet, verbose=verbose)
    layout = layout_named(name)
    if svg is not None:
        check_side_file(svg, ())
    drawn = drawing.draw(layout)
    if svg is not None:
        write_side_file(svg, drawing.svg(drawn).encode())
        output.note(f"the picture is in {svg}")
    output.lines(
        f"{name}: {drawn.rows} rows of {drawn.row_bytes} bytes",
        f"AITER: {layout.aiter_call}",
        "",
    )
    output.styled(_drawing_lines(drawn))
    output.document(SHOW_SCHEMA, _drawing_body(drawn, layout.aiter_call))


def _drawing_lines(drawn: Drawing) -> Iterator[Styled]:
    """Yield the lines of a drawing as pieces of text with their colours."""
    from aiter_prep.layouts.drawing import span

    head = [f"byte {span(cell.columns)}" for cell in drawn.cells[0]]
    width = max(len(_bytes(cell)) for line in drawn.cells for cell in line)
    width = max(width, *map(len, head)) + 2
    left = max(len(drawn.row_label(line[0].rows)) for line in drawn.cells) + 2
    yield [(" " * left, None), *((text.center(width), None) for text in head)]
    for line in drawn.cells:
        label = drawn.row_label(line[0].rows).rjust(left - 1)
        cells = [(_bytes(cell).center(width), drawn.colour(cell)) for cell in line]
        yield [(f"{label} ", None), *cells]


def _bytes(cell: Cell) -> str:
    from aiter_prep.layouts.drawing import span

    return span(range(cell.start, cell.stop))


def _drawing_body(drawn: Drawing, aiter_call: str) -> dict[str, Any]:
    return {
        "name": drawn.name,
        "aiter_call": aiter_call,
        "rows": drawn.rows,
        "row_bytes": drawn.row_bytes,
        "cells": [
            {
                "rows": [cell.rows.start, cell.rows.stop],
                "columns": [cell.columns.start, cell.columns.stop],
                "storage": [cell.start, cell.stop],
            }
            for line in drawn.cells
            for cell in line
        ],
    }


def _layout_lines() -> Iterator[str]:
    from aiter_prep.layouts.table import LAYOUTS

    yield "layouts"
    rows = [("name", "gate and up rows", "the same bytes in AITER")]
    rows += [(layout.name, layout.row_order, layout.aiter_call) for layout in LAYOUTS.values()]
    yield from words.columns(rows)


def _target_lines() -> Iterator[str]:
    from aiter_prep.targets.table import TARGETS

    for target in TARGETS.values():
        yield f"target {target.name} ({target.engine} {target.engine_version})"
        rows = [("scheme", "rows", "weights", "scales", "when")]
        for path in target.paths:
            scale = path.forms.get("weight_scale")
            rows.append(
                (
                    path.scheme,
                    path.row_order,
                    _pair(path.forms["weight"].layouts),
                    _pair(scale.layouts) if scale else "",
                    _conditions(path.when),
                )
            )
        yield from words.columns(rows)
        for refusal in target.refusals:
            conditions = _conditions(refusal.when)
            where = f" ({conditions})" if conditions else ""
            yield f"  no {refusal.scheme}{where}: {refusal.reason}"


def _conditions(when: Mapping[str, frozenset[str]]) -> str:
    return "; ".join(f"{trait} {' or '.join(sorted(values))}" for trait, values in when.items())


def _pair(names: tuple[str, str]) -> str:
    """Return the layouts of w13 and w2, once if they are the same."""
    return names[0] if names[0] == names[1] else f"{names[0]} (w13), {names[1]} (w2)"


def _body() -> dict[str, Any]:
    from aiter_prep.layouts.table import LAYOUTS
    from aiter_prep.manifest import describe_layout
    from aiter_prep.targets.table import TARGETS

    return {
        "layouts": {name: describe_layout(layout) for name, layout in LAYOUTS.items()},
        "targets": {
            target.name: {
                "aliases": list(target.aliases),
                "engine": target.engine,
                "engine_version": target.engine_version,
                "chips": list(target.chips),
                "paths": [
                    {
                        "scheme": path.scheme,
                        "when": {trait: sorted(values) for trait, values in path.when.items()},
                        "row_order": path.row_order,
                        "layouts": {role: list(f.layouts) for role, f in path.forms.items()},
                        "note": path.note,
                    }
                    for path in target.paths
                ],
                "refused": [
                    {
                        "scheme": refusal.scheme,
                        "when": {trait: sorted(v) for trait, v in refusal.when.items()},
                        "reason": refusal.reason,
                    }
                    for refusal in target.refusals
                ],
            }
            for target in TARGETS.values()
        },
    }
