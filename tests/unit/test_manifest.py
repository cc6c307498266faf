"""The manifest says everything, comes back from JSON as it was, and keeps to its schema."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import tiny
from aiter_prep.errors import DataMismatch
from aiter_prep.layouts.permutation import Layout
from aiter_prep.layouts.table import LAYOUTS
from aiter_prep.manifest import Manifest, describe_layout, parse_manifest, read_manifest
from documents import Place, at, changed, distinct, kind_of, places, without
from prepared import canonical, digest, load, prepare, sealed

REAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16": ({"kind": "bf16"}, {"tp": 2}),
    "padded MXFP4 with biases": (
        {"kind": "mxfp4_gpt_oss", "hidden": 64, "intermediate": 96},
        {"tp": 4},
    ),
    "fnuz with negative zeros": ({"kind": "fp8_block_f32"}, {"gfx": "gfx942"}),
    "MXFP8 in a nested prefix": ({"kind": "mxfp8", "prefix": "language_model.model."}, {"tp": 4}),
    "some ranks": ({"kind": "mxfp4_v4", "layers": 2}, {"tp": 4, "ranks": [1, 2]}),
    "many shards": ({"kind": "mxfp4_ct", "layers": 2}, {"max_shard_bytes": 1}),
    "whole experts": (
        {"kind": "fp8_channel_n1", "experts": 5},
        {"ep": 2, "placement": "round_robin"},
    ),
    "merged": ({"kind": "fp8_tensor"}, {"tp": 2}),
    "packed int4": (
        {"kind": "int4"},
        {"target": "vllm", "options": {"moe_backend": "flydsl"}},
    ),
    "interleaved for vllm": ({"kind": "mxfp4_v4", "hidden": 256}, {"target": "vllm"}),
}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], bytes]:
    """Return the text of a manifest that a real conversion wrote."""

    @cache
    def written(case: str) -> bytes:
        model, options = REAL[case]
        folder = tmp_path_factory.mktemp("manifest")
        source = tiny.write(folder / "source", spread="layers", **model)
        (source / "tokenizer.json").write_text("{}", "utf-8")
        index = json.loads((source / tiny.INDEX).read_text("utf-8"))
        del index["weight_map"][f"{tiny.Model(**model).prefix}norm.weight"]  # one is skipped
        (source / tiny.INDEX).write_text(json.dumps(index), "utf-8")
        prepare(source, folder / "out", **options)
        return (folder / "out" / "aiter_prep.json").read_bytes()

    return written


@cache
def validator(part: str = "") -> jsonschema.Draft202012Validator:
    """Return what validates a whole manifest, or one of its definitions."""
    text = files("aiter_prep").joinpath("manifest.schema.json").read_text("utf-8")
    schema = json.loads(text)
    if part:
        schema = {"$ref": f"#/$defs/{part}", "$defs": schema["$defs"]}
    return jsonschema.Draft202012Validator(schema)


def keeps_to_the_schema(document: Any, path: Place) -> bool:
    """Return whether a document is valid after a change at a place; looks at that tensor alone."""
    if path[:1] == ("tensors",) and len(path) > 1:
        return bool(validator("tensor").is_valid(at(document, path[:2])))
    return bool(validator().is_valid(document))


def parsed(document: Any) -> Manifest:
    """Parse a document whose self digest is made to fit."""
    return parse_manifest(sealed(document))


# --- round trip ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", REAL)
def test_a_manifest_comes_back_from_json_as_it_was(case: str, real: Callable[[str], bytes]) -> None:
    text = real(case)
    manifest = parse_manifest(text)
    assert manifest.to_json() == text
    assert parse_manifest(manifest.to_json()) == manifest


@pytest.mark.parametrize("case", REAL)
def test_the_text_is_sorted_and_made_for_people(case: str, real: Callable[[str], bytes]) -> None:
    text = real(case)
    document = json.loads(text)
    assert text == (json.dumps(document, sort_keys=True, indent=2) + "\n").encode()
    assert text.isascii()


@pytest.mark.parametrize("case", REAL)
def test_the_self_digest_is_that_of_the_canonical_rest(
    case: str, real: Callable[[str], bytes]
) -> None:
    document = json.loads(real(case))
    assert document.pop("self_digest") == digest(canonical(document))


def test_the_manifest_holds_no_path_and_no_time(real: Callable[[str], bytes]) -> None:
    text = real("bf16").decode()
    assert "/tmp" not in text  # noqa: S108 - not a use
    assert os.uname().nodename not in text


@pytest.mark.parametrize("case", REAL)
def test_layouts_are_described_well_enough_to_be_undone(
    case: str, real: Callable[[str], bytes]
) -> None:
    manifest = parse_manifest(real(case))
    used = {record.layout for record in manifest.tensors if record.layout is not None}
    assert manifest.layouts.keys() == used
    for name in used:
        assert manifest.layout(name) == LAYOUTS[name]


def test_a_layout_that_the_manifest_does_not_describe_is_damage(
    real: Callable[[str], bytes],
) -> None:
    with pytest.raises(DataMismatch, match="does not describe layout `tile_8x8`"):
        parse_manifest(real("bf16")).layout("tile_8x8")


def test_a_layout_comes_from_the_manifest_and_not_from_our_table(
    real: Callable[[str], bytes],
) -> None:
    document = json.loads(real("bf16"))
    document["layouts"]["tile_16x16"]["rows"] = [-1, 8]
    assert parsed(document).layout("tile_16x16").rows == (-1, 8)


def test_every_layout_can_be_described_in_json() -> None:
    for layout in LAYOUTS.values():
        text = json.dumps(describe_layout(layout))
        entry: Any = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in json.loads(text).items()
        }
        assert Layout(name=layout.name, **entry) == layout


# --- the file -----------------------------------------------------------------------------------


def test_a_folder_without_a_manifest_is_not_prepared(tmp_path: Path) -> None:
    with pytest.raises(DataMismatch, match=r"it has no `aiter_prep\.json`"):
        read_manifest(tmp_path)


def test_a_manifest_larger_than_its_limit_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiter_prep.manifest.MAX_MANIFEST_BYTES", 3)
    (tmp_path / "aiter_prep.json").write_bytes(b"{  }")
    with pytest.raises(DataMismatch, match="is larger than 3 bytes"):
        read_manifest(tmp_path)


def test_a_folder_for_a_manifest_is_damage(tmp_path: Path) -> None:
    (tmp_path / "aiter_prep.json").mkdir()
    with pytest.raises(DataMismatch, match="is not a prepared folder"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"null", b'{"format_version":1,"format_version":1}', b"\xff", b"{" * 50_000],
)
def test_a_text_that_is_no_json_object_is_damage(text: bytes) -> None:
    with pytest.raises(DataMismatch, match=r"aiter_prep\.json"):
        parse_manifest(text)


@pytest.mark.parametrize("version", [0, 2, "1", None, [1], "\x1b[2J", 10**4000])
def test_another_format_version_is_refused_and_said(
    version: Any, real: Callable[[str], bytes]
) -> None:
    document = {**json.loads(real("bf16")), "format_version": version}
    with pytest.raises(DataMismatch, match="this program knows 1") as caught:
        parsed(document)
    assert caught.value.message.isprintable()
    assert "use the version of aiter-prep that wrote it" in caught.value.hint


@pytest.mark.parametrize("version", [1.0, True])
def test_a_format_version_that_is_only_equal_to_one_is_refused(
    version: Any, real: Callable[[str], bytes]
) -> None:
    with pytest.raises(DataMismatch):
        parsed({**json.loads(real("bf16")), "format_version": version})


@pytest.mark.parametrize("promised", [None, "", "xxh3-128:" + "0" * 32, 5, "\x1b[2J", ["x"]])
def test_a_self_digest_that_does_not_fit_is_damage(
    promised: Any, real: Callable[[str], bytes]
) -> None:
    document = {**json.loads(real("bf16")), "self_digest": promised}
    with pytest.raises(DataMismatch, match="was changed: its digest is") as caught:
        parse_manifest(json.dumps(document).encode())
    assert caught.value.message.isprintable()


def test_a_missing_self_digest_is_damage(real: Callable[[str], bytes]) -> None:
    document = json.loads(real("bf16"))
    del document["self_digest"]
    with pytest.raises(DataMismatch, match="was changed"):
        parse_manifest(json.dumps(document).encode())


def test_other_spaces_and_another_order_are_the_same_manifest(
    real: Callable[[str], bytes],
) -> None:
    text = real("bf16")
    backwards = dict(reversed(json.loads(text).items()))
    assert parse_manifest(json.dumps(backwards).encode()) == parse_manifest(text)


# --- each field ---------------------------------------------------------------------------------


def mutable(text: bytes) -> Iterator[tuple[Any, Place, Any]]:
    """Yield small manifests with the places to change: each with one tensor, of another kind.

    Places outside of tensors are alike in all manifests: those of one with options are enough.
    """
    document = json.loads(text)
    document["shards"], document["skipped"] = document["shards"][:1], document["skipped"][:1]
    kinds = {
        (t["rank"] is None, t["form"], t["lost"] is None, not t["pads"], not t["source"]): t
        for t in document["tensors"]
    }
    for number, tensor in enumerate(kinds.values()):
        if tensor["lost"] is not None and tensor["lost"]["positions"]:
            tensor["lost"]["positions"] = tensor["lost"]["positions"][:2]
        one = {**document, "tensors": [tensor]}
        for path, value in distinct(one):
            outside = path[:1] != ("tensors",)
            if not outside or (not number and document["options"]["engine"]):
                yield one, path, value


def is_map(path: Place) -> bool:
    return bool(path) and path[-1] in {"layouts", "conversions", "engine"}


ALL_CASES = ["fnuz with negative zeros", "padded MXFP4 with biases", "packed int4"]


@pytest.mark.parametrize("case", REAL)
def test_a_real_manifest_keeps_to_the_schema(case: str, real: Callable[[str], bytes]) -> None:
    validator().validate(json.loads(real(case)))


def test_the_schema_is_a_schema_and_lets_no_unknown_field_in() -> None:
    schema = validator().schema
    assert isinstance(schema, dict)
    jsonschema.Draft202012Validator.check_schema(schema)
    for _, value in places(schema):
        if isinstance(value, dict) and value.get("type") == "object":
            assert "additionalProperties" in value
            # written by backend aiter only, and where a source was compared with its digest only
            optional = {"aiter_commit", "aiter_fingerprint", "sha256"}
            assert sorted(value.get("properties", {}).keys() - optional) == value.get(
                "required", []
            )


@pytest.mark.parametrize("case", ALL_CASES)
def test_the_schema_misses_every_field_that_is_taken_away(
    case: str, real: Callable[[str], bytes]
) -> None:
    for document, path, value in mutable(real(case)):
        if isinstance(value, dict):
            for key in value if not is_map(path) else ():
                mutated = without(document, (*path, key))
                assert not keeps_to_the_schema(mutated, path), (*path, key)


@pytest.mark.parametrize("case", ALL_CASES)
def test_the_schema_refuses_a_field_more(case: str, real: Callable[[str], bytes]) -> None:
    for document, path, value in mutable(real(case)):
        if isinstance(value, dict):
            extra = {**value, "Extra-": 1}
            mutated = changed(document, path, extra) if path else extra
            assert not keeps_to_the_schema(mutated, path), path


WRONG: tuple[Any, ...] = (None, True, -2, 0.5, "\0", [[]], {"a": 1})


@pytest.mark.parametrize("case", ALL_CASES)
def test_the_schema_refuses_a_value_of_another_kind(
    case: str, real: Callable[[str], bytes]
) -> None:
    for document, path, value in mutable(real(case)):
        if not path or kind_of(path)[-2:] in {("blocks", "*"), ("engine", "*")}:
            continue
        for wrong in WRONG:
            is_nullable = value is None and isinstance(wrong, str)
            if type(wrong) is type(value) or is_nullable or accepts(path, wrong):
                continue
            mutated = changed(document, path, wrong)
            assert not keeps_to_the_schema(mutated, path), (path, wrong)


def accepts(path: Place, value: Any) -> bool:
    """Return whether the schema allows a value of this kind at a place, besides the one there."""
    if value is None:
        return path[-1] in {
            "aiter_version",
            "revision",
            "shared",
            "conversion",
            "merge",
            "packing",
            "lost",
            "positions",
            "rank",  # with the other fields of a common tensor only, or of a shard
        }
    return False


# --- the parser ---------------------------------------------------------------------------------

# Objects that become dataclasses, so that their fields are checked one by one.
RECORDS = {
    (),
    ("shards", "*"),
    ("files", "*"),
    ("tensors", "*"),
    ("tensors", "*", "source", "*"),
    ("tensors", "*", "lost"),
}
PADS = ("tensors", "*", "pads", "*")
SECTIONS = ("created_by", "source", "target", "model", "options")


@pytest.mark.parametrize("case", ALL_CASES)
def test_each_field_that_is_missing_from_a_record_is_refused(
    case: str, real: Callable[[str], bytes]
) -> None:
    for document, path, value in mutable(real(case)):
        if kind_of(path) in {*RECORDS, PADS} and isinstance(value, dict):
            for key in value:
                if key != "self_digest":
                    with pytest.raises(DataMismatch):
                        parsed(without(document, (*path, key)))


@pytest.mark.parametrize("case", ALL_CASES)
def test_each_field_more_in_a_record_is_refused(case: str, real: Callable[[str], bytes]) -> None:
    for document, path, value in mutable(real(case)):
        if kind_of(path) in RECORDS and isinstance(value, dict):
            extra = {**value, "extra": 1}
            with pytest.raises(DataMismatch, match="is not of format version 1"):
                parsed(changed(document, path, extra) if path else extra)


def test_a_field_more_in_a_pad_is_refused(real: Callable[[str], bytes]) -> None:
    document = json.loads(real("padded MXFP4 with biases"))
    number = next(n for n, tensor in enumerate(document["tensors"]) if tensor["pads"])
    document["tensors"][number]["pads"][0]["extra"] = 1
    with pytest.raises(DataMismatch):
        parsed(document)


@pytest.mark.parametrize("section", [*SECTIONS, "layouts", "skipped"])
@pytest.mark.parametrize("change", ["missing", "extra"])
def test_each_field_missing_or_more_in_a_section_is_refused(
    section: str, change: str, real: Callable[[str], bytes]
) -> None:
    document = json.loads(real("bf16"))
    entry = document[section]
    entry = entry[0] if isinstance(entry, list) else entry
    entry = entry["tile_16x16"] if section == "layouts" else entry
    keys = ["extra"] if change == "extra" else list(entry)
    for key in keys:
        mutated = copy.deepcopy(document)
        place = mutated[section]
        place = place[0] if isinstance(place, list) else place
        place = place["tile_16x16"] if section == "layouts" else place
        if change == "extra":
            place[key] = 1
        else:
            del place[key]
        with pytest.raises(DataMismatch):
            parsed(mutated)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("shards", 0, "file"), None),
        (("shards", 0, "size"), "many"),
        (("shards", 0, "file"), "../outside.safetensors"),
        (("files", 0, "name"), "../outside.json"),
        (("files", 0, "name"), "/etc/passwd"),
        (("files", 0, "size"), -1),
        (("tensors", 0, "rank"), "0"),
        (("tensors", 0, "experts"), [0, 2, 0]),
        (("tensors", 0, "matrix"), [2**40, 2**40, 2**40]),
        (("tensors", 0, "digest"), 5),
        (("tensors", 0, "fill"), "xyz"),
        (("target", "tp"), "two"),
        (("target", "ranks"), 3),
        (("layouts", "tile_16x16", "rows"), [0, 16]),
        (("layouts", "tile_16x16", "order"), [0, 0, 0, 9]),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_the_parser(
    path: Place, value: Any, real: Callable[[str], bytes]
) -> None:
    document = changed(json.loads(real("bf16")), path, value)
    assert validator().is_valid(document) is (path[-1] == "matrix")
    with pytest.raises(DataMismatch):
        parsed(document)


@pytest.mark.parametrize("case", ALL_CASES)
def test_whatever_stands_in_a_field_it_is_parsed_or_damage(
    case: str, real: Callable[[str], bytes]
) -> None:
    for document, path, _ in mutable(real(case)):
        for wrong in WRONG if path else ():
            with suppress(DataMismatch):
                parsed(changed(document, path, wrong))


def test_a_manifest_is_found_by_its_folder(tmp_path: Path) -> None:
    prepare(tiny.write(tmp_path / "source"), tmp_path / "out", 2)
    manifest = read_manifest(tmp_path / "out")
    assert manifest.source["name"] == "source"
    assert load(tmp_path / "out")["format_version"] == manifest.format_version == 1
