"""Walks through JSON documents and changes them place by place."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

Place = tuple[str | int, ...]


def places(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield every value of a document and where it stands; of lists the first and the last item."""
    yield place, value
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*place, key))
    elif isinstance(value, list):
        for number in sorted({0, len(value) - 1}) if value else ():
            yield from places(value[number], (*place, number))


def kind_of(place: Place) -> Place:
    """Return a place with a star for every number, the same for all items of a list."""
    return tuple("*" if isinstance(step, int) else step for step in place)


def distinct(document: Any) -> list[tuple[Place, Any]]:
    """Return the places of a document; of those of one kind, one for every type of value."""
    seen: dict[tuple[Place, type], tuple[Place, Any]] = {}
    for place, value in places(document):
        seen.setdefault((kind_of(place), type(value)), (place, value))
    return list(seen.values())


def at(document: Any, place: Place) -> Any:
    """Return the value that stands at a place."""
    for step in place:
        document = document[step]
    return document


def changed(document: Any, place: Place, value: Any) -> Any:
    """Return a copy of a document with another value at a place."""
    document = copy.deepcopy(document)
    at(document, place[:-1])[place[-1]] = value
    return document


def without(document: Any, place: Place) -> Any:
    """Return a copy of a document without the value at a place."""
    document = copy.deepcopy(document)
    del at(document, place[:-1])[place[-1]]
    return document
