"""Holds a JSON document to a JSON Schema, as far as our own schemas go."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from aiter_prep.storage.jsontext import printable, shown

MAX_INTEGER = 2**63 - 1
_TYPES: dict[str, type] = {
    "array": list,
    "boolean": bool,
    "integer": int,
    "null": type(None),
    "object": dict,
    "string": str,
}
_NOTES = frozenset({"$schema", "$id", "$defs", "title", "description"})

# a name, or a place and what leads on from it: joined into text only where there is a fault
Place: TypeAlias = "str | tuple[Place, str | int]"
Check: TypeAlias = Callable[[Any, Place], None]
# what a keyword asks, and of values of which type; None: of all
_Rule: TypeAlias = tuple[type | None, Check]
_KEY_OF = -1  # in the stead of an item's number


class SchemaFault(ValueError):
    """A value is not what the schema says; many are caught, so it is put into words late."""

    def __init__(self, where: Place, says: str, *value: Any) -> None:
        super().__init__(where, says, *value)
        self._where, self._says, self._value = where, says, value

    def __str__(self) -> str:
        seen = f"is {shown(self._value[0], 60)}, " if self._value else ""
        return f"{_spelled(self._where)} {seen}{self._says}"


def _spelled(where: Place) -> str:
    if isinstance(where, str):
        return where
    parent, step = _spelled(where[0]), where[1]
    if step == _KEY_OF:
        return f"a key of {parent}"
    return f"{parent}[{step}]" if isinstance(step, int) else f"{parent}.{printable(step, 40)}"


def compile_schema(schema: Mapping[str, Any]) -> Check:
    """Return a function that checks a document.

    It takes the document and what to call it, and raises `SchemaFault` with the place of the first
    value that does not fit. An integer is one of 64 bits: `1.0` and `true` are none.

    Args:
        schema: A schema with the keywords of draft 2020-12 that this module knows.
    """
    return _Compiler(schema).check_of(schema)


class _Compiler:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._named: dict[str, Check] = {}

    def check_of(self, schema: Mapping[str, Any]) -> Check:
        """Return the check of a schema: that of all its keywords, its type first."""
        rules: list[_Rule] = []
        for keyword, value in sorted(schema.items(), key=lambda item: item[0] != "type"):
            if keyword in _NOTES or keyword in {"properties", "then", "else"}:
                continue  # the last three go with others
            rules.append(self._keyword(keyword, value, schema))
        if "properties" in schema:
            rules.append(self._properties(schema["properties"]))
        sure = _TYPES.get(schema.get("type", ""))  # what comes after the type's own check
        parts = tuple(c if kind in {None, sure} else _where(kind, c) for kind, c in rules)
        return parts[0] if len(parts) == 1 else _all_of(parts)

    def _keyword(self, keyword: str, value: Any, schema: Mapping[str, Any]) -> _Rule:
        if keyword in _SIMPLE:
            return _SIMPLE[keyword](value)
        nested: dict[str, Callable[[], _Rule]] = {
            "$ref": lambda: (None, self._reference(value)),
            "additionalProperties": lambda: self._others(
                value, frozenset(schema.get("properties", ()))
            ),
            "anyOf": lambda: _any_of([self.check_of(item) for item in value]),
            "if": lambda: _if_then_else(
                *(self.check_of(schema[n]) for n in ("if", "then", "else"))
            ),
            "items": lambda: self._items(value, len(schema.get("prefixItems", ()))),
            "prefixItems": lambda: _prefix([self.check_of(item) for item in value]),
            "propertyNames": lambda: _each_key(self.check_of(value)),
        }
        return nested[keyword]()

    def _reference(self, name: str) -> Check:
        if name not in self._named:
            self._named[name] = self.check_of(self._root["$defs"][name.removeprefix("#/$defs/")])
        return self._named[name]

    def _properties(self, properties: Mapping[str, Any]) -> _Rule:
        checks = [(name, self.check_of(value)) for name, value in properties.items()]

        def check(value: Any, where: Place) -> None:
            for name, part in checks:
                if name in value:
                    part(value[name], (where, name))

        return dict, check

    def _others(self, schema: Any, known: frozenset[str]) -> _Rule:
        part = None if schema is False else self.check_of(schema)

        def check(value: Any, where: Place) -> None:
            for name in value.keys() - known:
                if part is None:
                    raise SchemaFault(where, f"has the unknown field `{printable(name, 40)}`")
                part(value[name], (where, name))

        return dict, check

    def _items(self, schema: Any, first: int) -> _Rule:
        part = None if schema is False else self.check_of(schema)

        def check(value: Any, where: Place) -> None:
            if part is None and len(value) > first:
                raise SchemaFault(where, f"has {len(value)} items, not {first}")
            if part is not None:
                for number in range(first, len(value)):
                    part(value[number], (where, number))

        return list, check


def _where(kind: type, check: Check) -> Check:
    """Return a check that looks at values of one type only, as most keywords do."""
    return lambda value, where: check(value, where) if type(value) is kind else None


def _all_of(parts: Sequence[Check]) -> Check:
    def check(value: Any, where: Place) -> None:
        for part in parts:
            part(value, where)

    return check


def _any_of(parts: Sequence[Check]) -> _Rule:
    def check(value: Any, where: Place) -> None:
        for part in parts:
            try:
                part(value, where)
            except SchemaFault:
                continue
            return
        parts[0](value, where)  # once more, for its words

    return None, check


def _if_then_else(condition: Check, then: Check, other: Check) -> _Rule:
    def check(value: Any, where: Place) -> None:
        try:
            condition(value, where)
        except SchemaFault:
            other(value, where)
        else:
            then(value, where)

    return None, check


def _each_key(part: Check) -> _Rule:
    def check(value: Any, where: Place) -> None:
        for key in value:
            part(key, (where, _KEY_OF))

    return dict, check


def _prefix(parts: Sequence[Check]) -> _Rule:
    def check(value: Any, where: Place) -> None:
        for number, (part, item) in enumerate(zip(parts, value, strict=False)):
            part(item, (where, number))

    return list, check


def _type(name: str) -> _Rule:
    kind = _TYPES[name]

    def check(value: Any, where: Place) -> None:
        if type(value) is not kind:
            raise SchemaFault(where, f"not of type {name}", value)
        if type(value) is int and abs(value) > MAX_INTEGER:
            raise SchemaFault(where, "is an integer of more than 64 bits")

    return None, check


def _only(kind: type, holds: Callable[[Any], bool], what: str) -> _Rule:
    def check(value: Any, where: Place) -> None:
        if not holds(value):
            raise SchemaFault(where, what, value)

    return kind, check


def _const(wanted: Any) -> _Rule:
    return _enum([wanted])


def _enum(wanted: Sequence[Any]) -> _Rule:
    def check(value: Any, where: Place) -> None:
        if not any(type(value) is type(one) and value == one for one in wanted):
            raise SchemaFault(where, "which is not known", value)

    return None, check


def _pattern(text: str) -> _Rule:
    assert text.endswith("$"), text
    regex = re.compile(text[:-1] + r"\Z", re.ASCII)  # `$` would let a newline follow
    return _only(
        str,
        lambda value: regex.search(value) is not None,
        "which has another form",
    )


def _required(names: Sequence[str]) -> _Rule:
    needed = frozenset(names)

    def check(value: Any, where: Place) -> None:
        if missing := needed - value.keys():
            raise SchemaFault(where, f"lacks `{min(missing)}`")

    return dict, check


def _unique(_is_asked: Any) -> _Rule:
    return _only(
        list, lambda value: len(set(map(repr, value))) == len(value), "with one item twice"
    )


_SIMPLE: dict[str, Callable[[Any], _Rule]] = {
    "type": _type,
    "const": _const,
    "enum": _enum,
    "pattern": _pattern,
    "required": _required,
    "uniqueItems": _unique,
    "minimum": lambda least: _only(int, lambda value: value >= least, f"less than {least}"),
    "maximum": lambda most: _only(int, lambda value: value <= most, f"more than {most}"),
    "minLength": lambda least: _only(str, lambda value: len(value) >= least, "which is too short"),
    "minItems": lambda least: _only(list, lambda value: len(value) >= least, f"less than {least}"),
    "maxItems": lambda most: _only(list, lambda value: len(value) <= most, f"more than {most}"),
    "minProperties": lambda n: _only(dict, lambda value: len(value) >= n, f"less than {n}"),
}
