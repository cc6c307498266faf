"""JSON as this program reads and writes it: strict on the way in, canonical on the way out."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NoReturn

from aiter_prep.errors import BadSource

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_DEPTH = 100  # no config, header, index or manifest comes near; our own writer copes with it
# A text of brackets alone becomes Python objects of 25 times its size. The densest honest text, a
# header of empty tensors, has a bracket every 17 bytes.
BYTES_PER_BRACKET = 12
SMALL_BYTES = 1024 * 1024
MAX_SHOWN = 20


class JsonFault(ValueError):
    """The text is JSON to a lenient reader, but not to us."""


def parse(text: bytes | str, what: str) -> Any:
    """Parse one JSON document; a key that stands twice in an object is an error.

    Args:
        text: UTF-8 bytes or text.
        what: What the text is, for the message, such as "`config.json`".

    Raises:
        BadSource: Not UTF-8, not JSON, nested too deeply, a duplicate key or a non-finite number.
    """
    try:
        _check_density(text)
        document = json.loads(
            # left to itself, `json` also takes UTF-16, and halves of surrogates
            text if isinstance(text, str) else text.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
        _check_depth(document)
    except (ValueError, RecursionError) as fault:
        reason = "nested too deeply" if isinstance(fault, RecursionError) else str(fault)
        raise BadSource(f"{what} is not valid JSON: {printable(reason)}") from None
    return document


def parse_object(text: bytes | str, what: str) -> dict[str, Any]:
    """Parse one JSON object.

    Raises:
        BadSource: As `parse`, or the document is not an object.
    """
    document = parse(text, what)
    if not isinstance(document, dict):
        raise BadSource(f"{what} is a JSON {type(document).__name__}, not an object")
    return document


def canonical(document: Any) -> bytes:
    """Return the one text of a document: sorted keys, no spaces, ASCII."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


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


def _check_depth(document: Any) -> None:
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for value in level
            if isinstance(value, (dict, list))
            for child in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return
    raise JsonFault(f"nested more than {MAX_DEPTH} deep")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise JsonFault(f"{printable(text, 40)} is too large a number")
    return number


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    pairs = list(pairs)
    unique = dict(pairs)
    if len(unique) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise JsonFault(f"the key `{printable(key)}` stands twice")
            seen.add(key)
    return unique


def _refuse_constant(name: str) -> NoReturn:
    raise JsonFault(f"{name} is not a JSON number")
