"""JSON as this program reads and writes it: strict on the way in, canonical on the way out."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from aiter_prep.errors import BadSource

MAX_DEPTH = 100  # no config, header, index or manifest comes near; our own writer copes with it
# A text of brackets alone becomes Python objects of 25 times its size. The densest honest text, a
# header of empty tensors, has a bracket every 17 bytes.
BYTES_PER_BRACKET = 12
SMALL_BYTES = 1024 * 1024
MAX_SHOWN = 20
_CONTAINERS = frozenset({dict, list})


class JsonFault(ValueError):
    """The text is JSON to a lenient reader, but not to us."""


def parse(text: bytes | str, what: str, *, allow_nan: bool = False) -> Any:
    """Parse one JSON document; a key that stands twice in an object is an error.

    Args:
        text: UTF-8 bytes or text.
        what: What the text is, for the message, such as "`config.json`".
        allow_nan: Take `NaN`, `Infinity` and `-Infinity`, which are no JSON, but what Python and
            transformers write and read.

    Raises:
        BadSource: Not UTF-8, not JSON, nested too deeply, a duplicate key or a non-finite number.
    """
    try:
        _check_density(text)
        # left to itself, `json` also takes UTF-16, and halves of surrogates
        decoded = text if isinstance(text, str) else text.decode("utf-8")
        constant = float if allow_nan else _refuse_constant
        document = json.loads(decoded, parse_constant=constant, parse_float=_finite)
        if not _has_all_keys(decoded, _count_keys(document)):
            json.loads(decoded, object_pairs_hook=_refuse_twins)
    except (ValueError, RecursionError) as fault:
        reason = "nested too deeply" if isinstance(fault, RecursionError) else str(fault)
        raise BadSource(f"{what} is not valid JSON: {printable(reason)}") from None
    return document


def parse_object(text: bytes | str, what: str, *, allow_nan: bool = False) -> dict[str, Any]:
    """Parse one JSON object.

    Raises:
        BadSource: As `parse`, or the document is not an object.
    """
    document = parse(text, what, allow_nan=allow_nan)
    if not isinstance(document, dict):
        raise BadSource(f"{what} is a JSON {type(document).__name__}, not an object")
    return document


def canonical(document: Any, *, allow_nan: bool = False) -> bytes:
    """Return the one text of a document: sorted keys, no spaces, ASCII."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=allow_nan)
    return text.encode()


def readable(document: Any) -> bytes:
    """Return the same content for people: sorted keys, two spaces, one newline at the end."""
    return (json.dumps(document, sort_keys=True, indent=2, allow_nan=False) + "\n").encode()


def printable(text: str, limit: int = 200) -> str:
    """Return text that is safe on a terminal: control characters escaped, long text cut."""
    safe = text
    if not text.isprintable():
        safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return safe if len(safe) <= limit else f"{safe[:limit]}… ({len(safe)} characters)"


def shown(value: Any, limit: int = 200) -> str:
    """Return a value of a JSON document as text for a message, whatever and however large it is."""
    if isinstance(value, (dict, list)) and len(value) > MAX_SHOWN:
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    return printable(repr(value), limit)


def _check_density(text: bytes | str) -> None:
    if len(text) <= SMALL_BYTES:
        return
    if isinstance(text, str):
        brackets = text.count("[") + text.count("{")
    else:
        brackets = text.count(b"[") + text.count(b"{")
    if brackets * BYTES_PER_BRACKET > len(text):
        raise JsonFault(f"{brackets} brackets in {len(text)} bytes")


def _count_keys(document: Any) -> int:
    """Return how many keys all objects of a document have together.

    Raises:
        JsonFault: It is nested too deeply.
    """
    keys = 0
    level = [document] if type(document) in _CONTAINERS else []
    for _ in range(MAX_DEPTH):
        if not any(level):
            return keys
        keys += sum(len(value) for value in level if type(value) is dict)
        level = [
            child
            for value in level
            for child in (value.values() if type(value) is dict else value)
            if type(child) in _CONTAINERS
        ]
    raise JsonFault(f"nested more than {MAX_DEPTH} deep")


def _has_all_keys(text: str, keys: int) -> bool:
    """Return whether a document's keys are surely as many as its text has: none stands twice.

    Each has a colon behind it. Most texts have no other colons, and hardly any has others that
    follow a quote or a space.
    """
    return keys == text.count(":") or keys == sum(text.count(mark + ":") for mark in '" \t\r\n')


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise JsonFault(f"{printable(text, 40)} is too large a number")
    return number


def _refuse_twins(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise JsonFault(f"the key `{printable(key)}` stands twice")
            seen.add(key)


def _refuse_constant(name: str) -> NoReturn:
    raise JsonFault(f"{name} is not a JSON number")
