"""JSON as this program reads and writes it: strict on the way in, canonical on the way out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn

from aiter_prep.errors import BadSource

if TYPE_CHECKING:
    from collections.abc import Iterable


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
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as fault:
        reason = "nested too deeply" if isinstance(fault, RecursionError) else str(fault)
        raise BadSource(f"{what} is not valid JSON: {printable(reason)}") from None


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
    if len(text) <= limit and text.isprintable():
        return text
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return safe if len(safe) <= limit else f"{safe[:limit]}… ({len(safe)} characters)"


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
