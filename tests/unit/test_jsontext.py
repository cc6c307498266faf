"""JSON is strict on the way in and has one text on the way out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiter_prep.errors import BadSource
from aiter_prep.storage.jsontext import canonical, parse, parse_object, printable, readable

DOCUMENTS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=15,
)


@given(DOCUMENTS)
def test_what_is_written_is_read_again(document: Any) -> None:
    assert parse(canonical(document), "it") == document
    assert parse(readable(document), "it") == document


@given(st.dictionaries(st.text(), st.integers(), max_size=6))
def test_the_order_of_keys_makes_no_difference(document: dict[str, int]) -> None:
    backwards = dict(reversed(document.items()))
    assert canonical(document) == canonical(backwards)
    assert readable(document) == readable(backwards)
    assert canonical(document).isascii()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_json_is_not_written(value: float) -> None:
    for write in (canonical, readable):
        with pytest.raises(ValueError, match="not JSON compliant"):
            write({"a": value})


@pytest.mark.parametrize("text", ["1e999", "-1e999", "[1e400]", '{"a": {"b": 1e309}}'])
def test_a_number_that_becomes_an_infinity_is_refused(text: str) -> None:
    with pytest.raises(BadSource, match="it is not valid JSON"):
        parse(text, "it")


@pytest.mark.parametrize("text", ["", "{", "{}x", "NaN", "Infinity", "[1,]", "'a'", "01", b"\xff"])
def test_what_is_no_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(BadSource, match="it is not valid JSON"):
        parse(text, "it")


@pytest.mark.parametrize(
    ("text", "kind"),
    [("[]", "list"), ("1", "int"), ("1.5", "float"), ("null", "NoneType"), ("true", "bool")],
)
def test_what_is_no_object_is_refused(text: str, kind: str) -> None:
    with pytest.raises(BadSource, match=f"^it is a JSON {kind}, not an object$"):
        parse_object(text, "it")


TWINS = [
    '{"a":1,"a":1}',
    '[{"b":{"a":1,"b":2,"a":3}}]',
    '{"":1,"":2}',
    '{"a":1,"a" :1}',
    '{"a"\n\t:1,"a"\r:":"}',
    '{"a":{"b":1},"a":":"}',
]


@pytest.mark.parametrize("text", TWINS)
def test_a_key_that_stands_twice_is_refused(text: str) -> None:
    with pytest.raises(BadSource, match="stands twice"):
        parse(text, "it")


def test_the_keys_of_different_objects_may_be_alike() -> None:
    assert parse('{"a":{"a":1},"b":{"a":2}}', "it") == {"a": {"a": 1}, "b": {"a": 2}}


@given(st.lists(st.tuples(st.sampled_from(["a", ":", '":', " :"]), st.text('":, ')), max_size=4))
def test_colons_in_keys_and_values_hide_no_key_and_make_none(pairs: list[tuple[str, str]]) -> None:
    text = "{" + ", ".join(f"{json.dumps(key)} : {json.dumps(item)}" for key, item in pairs) + "}"
    if len(dict(pairs)) == len(pairs):
        assert parse(text, "it") == dict(pairs)
    else:
        with pytest.raises(BadSource, match="stands twice"):
            parse(text, "it")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[" * 50_000 + "]" * 50_000])
def test_a_document_nested_too_deeply_is_refused(text: str) -> None:
    with pytest.raises(BadSource, match="it is not valid JSON: nested too deeply"):
        parse(text, "it")


@given(st.text(max_size=60))
def test_printable_text_has_no_control_character_and_keeps_what_is_printable(text: str) -> None:
    safe = printable(text, limit=10_000)
    assert safe.isprintable()
    if text.isprintable():
        assert safe == text


@given(st.text(st.characters(exclude_categories=["C", "Z"]), max_size=60), st.integers(1, 40))
def test_long_text_is_cut_and_says_how_long_it_was(text: str, limit: int) -> None:
    safe = printable(text, limit)
    assert (
        safe == text if len(text) <= limit else safe == f"{text[:limit]}… ({len(text)} characters)"
    )


@pytest.mark.parametrize(
    ("text", "safe"),
    [("\n", r"\n"), ("\x1b[2J", r"\x1b[2J"), ("\0", r"\x00"), ("\u202e", r"\u202e"), ("é", "é")],
)
def test_control_characters_are_escaped(text: str, safe: str) -> None:
    assert printable(text) == safe


def test_duplicate_keys_in_a_large_object_are_found_in_linear_time() -> None:
    text = json.dumps({str(number): number for number in range(50_000)})
    with pytest.raises(BadSource, match="the key `7` stands twice"):
        parse(text[:-1] + ',"7":0}', "it")
