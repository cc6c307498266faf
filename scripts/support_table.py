"""Writes the tables of the documents that follow from the program's own tables.

    scripts/support-table            prints every table
    scripts/support-table --check    exit code 1 where a document is out of date
    scripts/support-table --write    brings the documents up to date

A table stands between `<!-- NAME -->` and `<!-- end of NAME -->`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from aiter_prep.families.names import FAMILIES, Family
from aiter_prep.families.schemes import SCHEMES, Scheme, Unit
from aiter_prep.layouts.conversions import CONVERSIONS
from aiter_prep.layouts.merges import MERGES
from aiter_prep.layouts.packing import PACKINGS
from aiter_prep.layouts.table import LAYOUTS
from aiter_prep.targets.model import DEFAULT, OPTIONS, Alignment, Form, Refusal, Target, WeightPath
from aiter_prep.targets.table import TARGETS

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "docs/format.md", "docs/targets.md")
NEVER = "-"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell or NEVER for cell in line)} |" for line in lines)


def code(words: Iterable[str]) -> str:
    """Return words as code, with commas between them."""
    return ", ".join(f"`{word}`" for word in words)


def conditions(when: Mapping[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    """Return what a path asks of a checkpoint: its traits, without the chip and the options."""
    return {trait: when[trait] for trait in when if trait != "chip" and trait not in OPTIONS}


# --- the support table of the README ------------------------------------------------------------


def support_table() -> str:
    """Return the schemes and the targets that take them, then the families."""
    names = list(dict.fromkeys(scheme.name for scheme in SCHEMES))
    schemes = table(
        ("scheme", "weights and scales in the source", *(f"`{name}`" for name in TARGETS)),
        ([f"`{name}`", source_of(name), *support_of(name)] for name in names),
    )
    families = table(
        ("family", "tensors below `experts`", "written by"),
        ((f"`{family.name}`", spelling(family), family.meaning) for family in FAMILIES.values()),
    )
    return f"{schemes}\n\n{families}"


def source_of(name: str) -> str:
    """Return how a scheme lies in a checkpoint."""
    variants = [scheme for scheme in SCHEMES if scheme.name == name]
    weights = sorted({dtype for scheme in variants for dtype in scheme.weight_dtypes})
    return f"{' or '.join(weights)}{scales_of(variants[0])}"


def scales_of(scheme: Scheme) -> str:
    """Return the scales of a scheme, or nothing."""
    if not scheme.scale_dtypes:
        return ""
    unit = {
        Unit(0, 0): "one scale a tensor",
        Unit(1, 0): "one scale a row",
        Unit(1, 32): "one scale for 32 columns",
        Unit(128, 128): "one scale for 128 x 128",
    }[scheme.scale_unit]
    second = ", one factor a row" if "weight_scale_2" in scheme.roles else ""
    return f", {unit} ({', '.join(sorted(scheme.scale_dtypes))}){second}"


def support_of(scheme: str) -> Iterator[str]:
    """Yield the chips on which each target takes a scheme."""
    for target in TARGETS.values():
        cells = [chip_cell(target, scheme, chip) for chip in target.chips]
        one_way = any(is_one_way(path) for path in target.paths if path.scheme == scheme)
        text = ", ".join(cell for cell in cells if cell)
        yield f"{text}; one way" if text and one_way else text


def chip_cell(target: Target, scheme: str, chip: str) -> str:
    """Return a chip, with a star where not every checkpoint is taken as it is, or nothing."""
    refusals = [r for r in target.refusals if r.scheme == scheme and not r.otherwise]
    refusals = [refusal for refusal in refusals if chip in refusal.when.get("chip", target.chips)]
    paths = [path for path in target.paths if path.scheme == scheme]
    paths = [path for path in paths if chip in path.when.get("chip", target.chips)]
    if not paths or any(not set(refusal.when) - {"chip"} for refusal in refusals):
        return ""
    return chip if not refusals and any(map(takes_all, paths)) else f"{chip} *"


def takes_all(path: WeightPath) -> bool:
    """Return whether a path takes every checkpoint of its scheme with no option given."""
    options = [path.when[option] for option in OPTIONS if option in path.when]
    return not conditions(path.when) and all(DEFAULT in values for values in options)


def is_one_way(path: WeightPath) -> bool:
    """Return whether nothing leads back from what a path writes."""
    return any(any(form.merges) for form in path.forms.values())


def spelling(family: Family) -> str:
    """Return how a family names its tensors."""
    if family.fused:
        return code(family.fused)
    return ", ".join(f"`E.{key}.*`" for key in family.projections)


# --- options ------------------------------------------------------------------------------------


def options_table() -> str:
    """Return the values of each option, for each target that has some."""
    rows = [
        (f"`{flag}`", f"`{target.name}`", scheme, code(sorted(values)))
        for option, flag in OPTIONS.items()
        for target in TARGETS.values()
        for scheme, values in option_values(target, option).items()
    ]
    return table(("flag", "target", "schemes", "values"), rows)


def option_values(target: Target, option: str) -> dict[str, frozenset[str]]:
    """Return the values of an option by the schemes that it has them for."""
    found: dict[str, frozenset[str]] = {}
    for path in target.paths:
        values = path.when.get(option, frozenset()) - {DEFAULT}
        if values:
            found[path.scheme] = found.get(path.scheme, frozenset()) | values
    joined: dict[frozenset[str], list[str]] = {}
    for scheme, values in found.items():
        joined.setdefault(values, []).append(scheme)
    return {code(schemes): values for values, schemes in joined.items()}


# --- the paths of a target ----------------------------------------------------------------------


def paths_of(engine: str) -> str:
    """Return the tables of every target that was made for an engine."""
    targets = [target for target in TARGETS.values() if target.engine == engine]
    if not targets:
        return "This version has no such target."
    return "\n\n".join(map(paths_table, targets))


def paths_table(target: Target) -> str:
    """Return the paths of a target, then what it refuses."""
    paths = table(
        ("source", "chips", "option", "I of a rank", "H", "gate, up", "weights", "scales"),
        (path_row(target, path) for path in target.paths),
    )
    refusals = table(("refused", "reason"), map(refusal_row, target.refusals))
    notes = dict.fromkeys(f"- {path.scheme}: {path.note}" for path in target.paths if path.note)
    said = [known(target), paths, refusals if target.refusals else "", "\n".join(notes)]
    return "\n\n".join(part for part in said if part)


def known(target: Target) -> str:
    """Return what a target says of itself."""
    placements = f"`--placement` {code(target.placements)}"
    even = ", as many experts on each rank" if target.even_experts else ""
    engine = f"`{target.name}`: {target.engine} {target.engine_version}"
    return f"{engine}; chips {code(target.chips)}; {placements}{even}."


def path_row(target: Target, path: WeightPath) -> tuple[str, ...]:
    """Return the cells of a path."""
    chips = [chip for chip in target.chips if chip in path.when.get("chip", target.chips)]
    scale = path.forms.get("weight_scale")
    return (
        source_words(path.scheme, conditions(path.when)),
        ", ".join(chips),
        "<br>".join(option_words(path.when)),
        size_words(path.intermediate, path.intermediate_multiple, least=path.intermediate_least)
        + (f"; cut by `{path.split}`" if path.split else ""),
        size_words(path.hidden, path.hidden_multiple),
        path.row_order.replace("_", " "),
        form_words(path.forms["weight"]),
        "<br>".join([*([form_words(scale)] if scale else []), *more_words(path)]),
    )


def source_words(scheme: str, traits: Mapping[str, frozenset[str]]) -> str:
    """Return a scheme and what else must hold of the checkpoint."""
    more = [f"{trait}: {', '.join(sorted(values))}" for trait, values in sorted(traits.items())]
    return "<br>".join([f"`{scheme}`", *more])


def option_words(when: Mapping[str, frozenset[str]]) -> Iterator[str]:
    """Yield each option that has a say, with its values."""
    for option, flag in OPTIONS.items():
        if option in when:
            values = when[option]
            given = ", ".join(sorted(values - {DEFAULT}))
            yield f"`{flag}` {', '.join(filter(None, ('none' * (DEFAULT in values), given)))}"


def size_words(alignment: Alignment, multiple: int, *, least: int = 1) -> str:
    """Return what a size must be, and to what it is padded."""
    said = [f"a multiple of {multiple}"] if multiple > 1 else []
    said += [f"at least {least}"] if least > 1 else []
    padded = [
        f"to {step} up to {largest}" if largest else f"to {step}"
        for largest, step in alignment.steps
    ]
    if alignment.steps[-1][1] > 1:
        said.append(f"padded {', else '.join(padded)}")
    return "; ".join(said)


def form_words(form: Form) -> str:
    """Return how the tensors of a role are stored."""
    w13, w2 = form.layouts
    runtime = sorted({runtime for _, runtime, _ in form.dtypes.values()})
    said = [f"`{w13}`" if w13 == w2 else f"`{w13}`, w2 `{w2}`", f"as {', '.join(runtime)}"]
    said += [form.shape] if form.shape not in {"matrices", "values"} else []
    said += [f"`{merge}`" for merge in dict.fromkeys(form.merges) if merge]
    said += [f"packed `{form.packing}`"] if form.packing else []
    said += [f"fill {form.fill.hex()}"] if any(form.fill) else []
    return "; ".join(said)


def more_words(path: WeightPath) -> Iterator[str]:
    """Yield how a second tensor of a role is stored."""
    for form in path.forms.values():
        if form.made_of:
            yield f"and `{form.name}`: {form_words(form)}"


def refusal_row(refusal: Refusal) -> tuple[str, str]:
    """Return the cells of a refusal."""
    traits = {trait: refusal.when[trait] for trait in refusal.when if trait not in OPTIONS}
    source = "<br>".join([source_words(refusal.scheme, traits), *option_words(refusal.when)])
    otherwise = ", if no path applies" if refusal.otherwise else ""
    return source + otherwise, refusal.reason


# --- what the format names ----------------------------------------------------------------------


def layouts_table() -> str:
    """Return every layout as data."""
    return table(
        ("layout", "rows", "columns", "order", "pads", "the same bytes in AITER"),
        (
            (
                f"`{layout.name}`",
                f"`{list(layout.rows)}`",
                f"`{list(layout.columns)}`",
                f"`{list(layout.order)}`",
                pad_words(layout.row_pad, layout.column_pad, layout.pad_byte),
                f"`{layout.aiter_call}`",
            )
            for layout in LAYOUTS.values()
        ),
    )


def pad_words(rows: int, columns: int, byte: int) -> str:
    """Return the padding that a layout adds."""
    said = [f"rows to {rows}"] if rows > 1 else []
    said += [f"columns to {columns}"] if columns > 1 else []
    return f"{', '.join(said)}, 0x{byte:02X}" if said else ""


def conversions_table() -> str:
    """Return every change of values."""
    rows = [
        (f"`{c.name}`", c.meaning, f"{c.source_bytes}", f"{c.stored_bytes}", lost_words(c.lost))
        for c in CONVERSIONS.values()
    ]
    return table(("conversion", "meaning", "bytes before", "bytes stored", "lost"), rows)


def lost_words(lost: tuple[int, int] | None) -> str:
    """Return what does not come back by the inverse alone."""
    return "" if lost is None else f"0x{lost[0]:02X}, stored as 0x{lost[1]:02X}"


def merges_table() -> str:
    """Return every merge, then every packing."""
    rows = [(f"`{m.name}`", "merge", m.meaning) for m in MERGES.values()]
    rows += [(f"`{p.name}`", f"packing, {p.ratio} to 1", p.meaning) for p in PACKINGS.values()]
    return table(("name", "kind", "meaning"), rows)


# --- documents ----------------------------------------------------------------------------------


GENERATORS: dict[str, Callable[[], str]] = {
    "support table": support_table,
    "options": options_table,
    "layouts": layouts_table,
    "conversions": conversions_table,
    "merges and packings": merges_table,
    "paths of aiter": lambda: paths_of("aiter"),
    "paths of vllm": lambda: paths_of("vllm"),
    "paths of sglang": lambda: paths_of("sglang"),
    "paths of atom": lambda: paths_of("atom"),
}


def block(name: str) -> re.Pattern[str]:
    """Return what matches a table with its two markers."""
    return re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- end of {name} -->)", re.DOTALL)


def updated(text: str) -> str:
    """Return a document with every table that it has a place for."""
    for name, generate in GENERATORS.items():
        found = block(name).search(text)
        if found is not None:
            text = f"{text[: found.end(1)]}{generate()}{text[found.start(2) :]}"
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="support-table", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="say what is out of date")
    parser.add_argument("--write", action="store_true", help="bring it up to date")
    options = parser.parse_args(arguments)
    if not (options.check or options.write):
        for name, generate in GENERATORS.items():
            sys.stdout.write(f"<!-- {name} -->\n{generate()}\n<!-- end of {name} -->\n\n")
        return 0
    old = {path: path.read_text(encoding="utf-8") for path in map(ROOT.joinpath, DOCUMENTS)}
    stale = {path: new for path, text in old.items() if (new := updated(text)) != text}
    for path, text in stale.items():
        sys.stdout.write(f"{path.relative_to(ROOT)} {'is written' * options.write or 'is old'}\n")
        if options.write:
            path.write_text(text, encoding="utf-8")
    return 1 if stale and not options.write else 0


if __name__ == "__main__":
    sys.exit(main())
