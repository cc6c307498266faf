"""`aiter-prep env`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from aiter_prep.cli import words
from aiter_prep.cli.convert_flags import Device
from aiter_prep.cli.flags import Json, Quiet, Verbose, output_of
from aiter_prep.errors import AiterPrepError, InvalidUsage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from aiter_prep.backends.probe import AiterProbe, LayoutProbe
    from aiter_prep.environment import Environment

SCHEMA = "aiter-prep/env/1"


def env(
    context: typer.Context,
    *,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="Also let AITER lay out a few bytes, and fail unless they are where ours are.",
        ),
    ] = False,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Print versions for a bug report; --probe tests AITER."""
    from aiter_prep.backends.probe import probe_aiter
    from aiter_prep.environment import look_around

    output = output_of(context, as_json=as_json, quiet=quiet, verbose=verbose)
    source = context.get_parameter_source("device")
    if not probe and source is not None and source.name == "COMMANDLINE":
        raise InvalidUsage("--device has a meaning with --probe only", "add --probe")
    found = look_around()
    output.lines(*words.columns(list(_rows(found)), indent=0))
    body = found.to_json()
    if not probe:
        output.document(SCHEMA, body)
        return
    probed = probe_aiter(device)
    output.lines(*_probe_lines(probed))
    output.document(SCHEMA, {**body, "probe": probed.to_json()})
    if output.as_json and not probed.matches:  # the document says what the error would
        raise typer.Exit(AiterPrepError.exit_code)
    probed.require()


def _rows(found: Environment) -> Iterator[tuple[str, str]]:
    yield "aiter-prep", found.aiter_prep
    yield "Python", found.python
    yield "platform", found.platform
    for name, version in found.packages.items():
        yield name, version or "not installed"
    yield from _torch_rows(found.torch)
    yield "AITER", _aiter_words(found.aiter)
    yield "ROCm", found.rocm or "not found"
    yield "chips", ", ".join(found.chips) or "none that the ROCm driver knows"


def _torch_rows(torch: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "fault" in torch:
        yield "torch", f"{torch['version'] or 'installed'}, but it does not work: {torch['fault']}"
        return
    if torch["version"] is None:
        yield "torch", "not installed"
        return
    names = {"hip": "HIP", "cuda": "CUDA"}
    built = [f"{name} {torch[key]}" for key, name in names.items() if torch[key]]
    yield "torch", f"{torch['version']} ({', '.join(built) or 'CPU'})"
    for number, device in enumerate(torch["devices"]):
        gfx = f", {device['gfx']}" if device["gfx"] else ""
        yield f"device {number}", f"{device['name']}{gfx}, {words.size(device['total_bytes'])}"


def _aiter_words(found: Mapping[str, Any]) -> str:
    match found["kind"]:
        case "aiter":
            return f"{found['version'] or 'version unknown'} in {found['folder']}"
        case "another package":
            version = found["version"] or ""
            return (
                f"not installed: the `aiter` {version} here is another package, without "
                "`aiter.ops.shuffle.shuffle_weight`; PyPI has an asynchronous-iterator library of "
                "that name (AMD's is github.com/ROCm/aiter)"
            ).replace("  ", " ")
        case "broken":
            return f"cannot be looked at: {found['fault']}"
        case _:
            return "not installed"


def _probe_lines(found: AiterProbe) -> Iterator[str]:
    version = found.version or "of unknown version"
    commit = f", commit {found.commit}" if found.commit else ""
    yield f"probe of AITER {version}{commit} on {found.probe.device}"
    rows = [(entry.layout, _outcome(entry)) for entry in found.probe.layouts]
    yield from words.columns(
        [
            *rows,
            *((name, "this AITER has no function for it") for name in found.missing),
            ("fingerprint", found.probe.theirs),
        ]
    )


def _outcome(entry: LayoutProbe) -> str:
    if entry.matches:
        return "the same bytes"
    return entry.fault or "other bytes"
