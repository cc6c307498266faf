"""Command lines that a shell takes as they are printed."""

from __future__ import annotations

import os
import shlex
from pathlib import Path


def command_line(*words: str | Path) -> str:
    """Return a command line that is safe on a terminal and means the same in a shell.

    Args:
        words: The program and its arguments. A `Path` is never taken for a flag, whatever its
            first letter.
    """
    return " ".join(map(_quoted, words))


def _quoted(word: str | Path) -> str:
    text = str(word)
    if isinstance(word, Path) and text.startswith("-"):
        text = f"./{text}"
    if text.isprintable():
        return shlex.quote(text)
    # no quotes hold control characters, or bytes that are no text, so that they could be shown
    return f"$'{''.join(map(_escaped, os.fsencode(text)))}'"


def _escaped(byte: int) -> str:
    char = chr(byte)
    return char if char.isascii() and char.isprintable() and char not in "\\'" else f"\\x{byte:02x}"
