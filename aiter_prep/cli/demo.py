"""`aiter-prep demo`."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aiter_prep.cli import words
from aiter_prep.cli.flags import PUSH, Json, Quiet, Verbose, local, output_of
from aiter_prep.cli.output import PROGRAM
from aiter_prep.errors import AiterPrepError
from aiter_prep.storage.jsontext import printable
from aiter_prep.storage.shell import command_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiter_prep.demo import DemoStep

SCHEMA = "aiter-prep/demo/1"


def demo(
    context: typer.Context,
    out: Annotated[
        Path | None,
        typer.Argument(
            metavar="OUT",
            parser=local("OUT", PUSH),
            help="An empty folder, which is kept; by default a temporary one, which is removed.",
        ),
    ] = None,
    *,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Try it all on a small checkpoint.

    It is made on the spot: random MXFP4 weights, 7 MB. Then it is inspected, converted, verified
    and restored.
    """
    from aiter_prep.demo import run_demo

    output = output_of(context, as_json=as_json, quiet=quiet, verbose=verbose)
    done: list[dict[str, Any]] = []
    with _folder(out) as folder:
        try:
            for step in run_demo(folder):
                output.lines(*_lines(step, folder))
                done.append({"name": step.name, "seconds": round(step.seconds, 3), **step.facts})
        except OSError as fault:
            raise AiterPrepError(
                f"cannot write `{printable(str(folder))}`: {fault.strerror}", "mend the cause"
            ) from fault
    kept = None if out is None else str(out)
    output.document(SCHEMA, {"folder": kept, "steps": done})
    if out is None:
        output.next_command("keep the folders with", "demo", "OUT")
    else:
        output.next_command("look around with", "inspect", _prepared(out))


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="aiter-prep-demo-") as folder:
        yield Path(folder)


def _prepared(out: Path) -> Path:
    from aiter_prep.demo import prepared_folder

    return prepared_folder(out)


def _lines(step: DemoStep, folder: Path) -> Iterator[str]:
    yield f"{_command(step, folder)}  [{words.duration(step.seconds)}]"
    yield f"  {_sentence(step)}"


def _command(step: DemoStep, folder: Path) -> str:
    """Return what a user would type for a step; `#` before what no command does."""
    from aiter_prep.demo import TP, prepared_folder, restored_folder, source_folder

    source, prepared, restored = (
        place(folder) for place in (source_folder, prepared_folder, restored_folder)
    )
    commands: dict[str, tuple[str | Path, ...]] = {
        "inspect": ("inspect", source),
        "convert": ("convert", source, prepared, "--tp", str(TP)),
        "verify": ("verify", prepared, "--source", source),
        "restore": ("restore", prepared, restored),
    }
    if step.name in commands:
        return f"$ {command_line(PROGRAM, *commands[step.name])}"
    return "# a checkpoint to try it on" if step.name == "make" else "# the restored tensors"


def _sentence(step: DemoStep) -> str:
    facts = step.facts
    match step.name:
        case "make":
            return (
                f"{words.count(facts['tensors'], 'tensor')}, {words.size(facts['total_bytes'])}, "
                f"random weights, in {step.folder}"
            )
        case "inspect":
            return (
                f"{facts['architecture']}: {words.count(facts['modules'], 'layer')} of "
                f"{facts['num_experts']} {facts['scheme']} experts; --tp "
                f"{', '.join(map(str, facts['workable_tp']))} would work"
            )
        case "convert":
            return (
                f"{words.count(facts['shards'], 'shard')} for {facts['tp']} ranks on "
                f"{facts['gfx']}, {words.size(facts['total_bytes'])}; "
                f"{facts['intermediate_per_rank']} columns per rank were padded to "
                f"{facts['padded_intermediate_per_rank']}"
            )
        case "verify":
            return (
                f"every byte of {words.count(facts['tensors'], 'tensor')} is as promised, and the "
                "source comes back from them"
            )
        case "restore":
            return f"{words.count(facts['tensors'], 'tensor')} under their old names again"
        case _:
            return f"all {facts['tensors']} are equal to the original, byte for byte"
