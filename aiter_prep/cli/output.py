"""Where words go: the result to stdout, everything else to stderr."""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TextIO, cast

from aiter_prep.errors import AiterPrepError, InvalidUsage
from aiter_prep.storage.jsontext import printable
from aiter_prep.storage.shell import command_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import TypeAlias

    from rich.console import Console
    from rich.text import Text

    from aiter_prep.cli.log import Log
    from aiter_prep.progress import Progress

    # pieces of a line, each with the colour behind it
    Styled: TypeAlias = Sequence[tuple[str, tuple[int, int, int] | None]]

PROGRAM = "aiter-prep"
MAX_LINE = 4000
TRUE_WORDS = frozenset({"1", "on", "t", "true", "y", "yes"})


class Output:
    """All that a command says; no control character of a name or a value reaches the terminal.

    Args:
        argv: The arguments of the program. Until a command has read its flags, they decide
            whether errors are JSON and whether a bug shows its traceback.

    Attributes:
        go_on: Returns the arguments of the command that goes on with what was stopped, or None
            where there is nothing to go on with; a command that can be gone on with sets it.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv = tuple(argv)
        self.as_json = _asks(argv, ("--json",), "AITER_PREP_JSON")
        self.verbose = _asks(argv, ("-v", "--verbose"), "AITER_PREP_VERBOSE")
        self.quiet = False
        self.go_on: Callable[[], tuple[str, ...] | None] = lambda: None
        self._form = "auto"
        self._log: Log | None = None
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # a name may hold what its encoding lacks
                stream.reconfigure(errors="backslashreplace")

    def configure(self, *, as_json: bool, quiet: bool, verbose: bool) -> Output:
        """Take over the flags of a command, once they are known."""
        self.as_json, self.quiet, self.verbose = as_json, quiet, verbose
        return self

    def follow(
        self,
        form: str,
        log_file: Path | None,
        *,
        apart_from: Sequence[Path | None] = (),
        others: Sequence[Path | None] = (),
    ) -> Output:
        """Take over the flags of a command that may take long.

        Args:
            form: How progress is shown; a name of `aiter_prep.cli.progress.FORMS`.
            log_file: Where all that is said is kept too, or None.
            apart_from: Folders that the command reads and writes, where it may not lie.
            others: Files that the command writes.

        Raises:
            InvalidUsage: There is no such form, or the file lies in such a folder.
            AiterPrepError: The file cannot be written.
        """
        from aiter_prep.cli.progress import FORMS

        if form not in FORMS:
            raise InvalidUsage(
                f"--progress {printable(form)} is not known", f"use one of {', '.join(FORMS)}"
            )
        self._form = form
        if log_file is not None:
            from aiter_prep.cli.log import Log
            from aiter_prep.storage.side_files import check_side_file

            check_side_file(log_file, filter(None, apart_from), filter(None, others))
            self._log = Log(log_file, self.warning)
            self._log.write(command_line(PROGRAM, *self.argv))
        return self

    def lines(self, *lines: str) -> None:
        """Print lines of the result; nothing where the result is JSON."""
        for line in lines:
            self._keep(line)
        if not self.as_json:
            self._write("".join(f"{printable(line, MAX_LINE)}\n" for line in lines))

    def styled(self, lines: Iterable[Styled]) -> None:
        """Print lines of the result with colours behind the text, where a terminal shows them."""
        if self.as_json or sys.stdout is None:
            return
        from rich.console import Console

        text = io.StringIO()
        console = Console(file=text, force_terminal=sys.stdout.isatty(), width=MAX_LINE)
        if console.color_system is None or console.no_color:
            self.lines(*("".join(piece for piece, _ in line).rstrip() for line in lines))
            return
        for line in lines:
            console.print(_coloured(line), soft_wrap=True)
        self._write(text.getvalue())

    def document(self, schema: str, body: Mapping[str, Any]) -> None:
        """Print the result as one JSON object, `schema` first; nothing where it is for people."""
        if self.as_json:
            self._write(json.dumps({"schema": schema, **body}, indent=2, allow_nan=False) + "\n")

    def warning(self, text: str) -> None:
        """Say what the user should know before using the result."""
        self._say("warning", "bold yellow", text)

    def note(self, text: str) -> None:
        """Say what the program decided; not when it is to be quiet."""
        if not self.quiet:
            self._say("note", "bold", text)

    def hint(self, text: str) -> None:
        """Say what to do next; not when it is to be quiet."""
        if not self.quiet:
            self._say("hint", "bold cyan", text)

    def next_command(self, what: str, *arguments: str | Path) -> None:
        """Hint at the next command, in a form that a shell takes."""
        self.hint(f"{what}: {command_line(PROGRAM, *arguments)}")

    def failure(self, message: str, hint: str, exit_code: int) -> None:
        """Say why there is no result: to stderr, or as the JSON object on stdout."""
        if self.as_json:
            self._keep(f"error: {message}")
            body = {"exit_code": exit_code, "error": message, "hint": hint}
            self.document("aiter-prep/error/1", body)
            return
        self._say("error", "bold red", message)
        if hint:
            self._say("hint", "bold cyan", hint)

    def trace(self, text: str) -> None:
        """Show the traceback of a bug."""
        for line in text.splitlines():
            self._say("", "", line)

    @contextmanager
    def progress(self, label: str) -> Iterator[Callable[[Progress], None] | None]:
        """Show how far a run is, on stderr and in the log, while the context is open."""
        from aiter_prep.cli.progress import Lines, all_of, showing

        shown: list[AbstractContextManager[Callable[[Progress], None] | None]] = []
        if sys.stderr is not None and not (self.quiet and self._form == "auto"):
            shown.append(showing(self._console(), label, form=self._form, verbose=self.verbose))
        if self._log is not None:
            shown.append(nullcontext(Lines(self._log.write, label, verbose=True)))
        with all_of(shown) as update:
            yield update

    def close(self, exit_code: int) -> int:
        """Bring the result out; return the exit code, or 1 where the result could not be written.

        A reader that has seen enough (`| head`) is no failure.
        """
        if self._log is not None:
            self._log.close()
            self._log = None
        try:
            if sys.stdout is not None:
                sys.stdout.flush()
        except BrokenPipeError:
            _silence(sys.stdout.fileno())
        except OSError as fault:
            failure = self._lost(fault)
            self.failure(failure.message, failure.hint, failure.exit_code)
            return exit_code or failure.exit_code
        return exit_code

    def _write(self, text: str) -> None:
        if sys.stdout is None:
            return
        try:
            sys.stdout.write(text)
        except BrokenPipeError:
            _silence(sys.stdout.fileno())
        except OSError as fault:
            raise self._lost(fault) from None

    def _lost(self, fault: OSError) -> AiterPrepError:
        """Give up stdout; return why."""
        _silence(sys.stdout.fileno())
        self.as_json = False  # what is left to say can only be said on stderr
        return AiterPrepError(f"cannot write the result to stdout: {fault.strerror}")

    def _keep(self, text: str) -> None:
        """Write a line to the log, if there is one."""
        if self._log is not None:
            self._log.write(printable(text, MAX_LINE))

    def _say(self, label: str, style: str, text: str) -> None:
        self._keep(f"{label}: {text}" if label else text)
        if sys.stderr is None:
            return
        from rich.text import Text

        line = Text(f"{label}: " if label else "", style=style)
        line.append(printable(text, MAX_LINE), style="not bold default")
        self._console().print(line, soft_wrap=True)

    def _console(self) -> Console:
        from rich.console import Console

        file = cast("TextIO", _Unheard(sys.stderr))
        return Console(file=file, markup=False, highlight=False, emoji=False)


class _Unheard:
    """A stream that does not mind if what is said cannot be heard; rich would end the program.

    Nobody reads the pipe any more, or the disk behind it is full: the result is what counts.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text, if it can be written."""
        try:
            return self._stream.write(text)
        except OSError:
            _silence(self._stream.fileno())
            return len(text)

    def flush(self) -> None:
        """Bring the text out, if it can be brought out."""
        try:
            self._stream.flush()
        except OSError:
            _silence(self._stream.fileno())


def _coloured(line: Styled) -> Text:
    """Return a line as rich prints it."""
    from rich.color import Color
    from rich.style import Style
    from rich.text import Text

    from aiter_prep.layouts.drawing import is_light

    text = Text()
    for piece, colour in line:
        if colour is None:
            text.append(printable(piece, MAX_LINE))
            continue
        ink = Color.parse("black" if is_light(colour) else "white")
        style = Style(color=ink, bgcolor=Color.from_rgb(*colour))
        text.append(printable(piece, MAX_LINE), style)
    return text


def _asks(argv: Sequence[str], flags: Sequence[str], variable: str) -> bool:
    """Return whether arguments hold a flag, before anything has parsed them."""
    own = argv[: argv.index("--")] if "--" in argv else argv
    is_default = os.environ.get(variable, "").strip().lower() in TRUE_WORDS
    return is_default or any(flag in own for flag in flags)


def _silence(descriptor: int) -> None:
    """Send what is still to be written nowhere: nobody reads it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
