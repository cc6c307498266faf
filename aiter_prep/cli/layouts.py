"""`aiter-prep layouts`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from aiter_prep.cli import words
from aiter_prep.cli.flags import Json, Quiet, Verbose, output_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SCHEMA = "aiter-prep/layouts/1"


def layouts(
    context: typer.Context,
    *,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """List the known layouts and targets."""
    output = output_of(context, as_json=as_json, quiet=quiet, verbose=verbose)
    output.lines(*_layout_lines(), *_target_lines())
    output.document(SCHEMA, _body())


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
