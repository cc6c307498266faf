"""Parts of a conversion, sealed, are the folder that one run writes; nothing else can be sealed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tiny
from aiter_prep.backends.cpu import CpuBackend
from aiter_prep.errors import (
    AiterPrepError,
    BadSource,
    DataMismatch,
    InvalidUsage,
    NoRule,
    OutputNotEmpty,
)
from aiter_prep.execution import Part, execute, execute_part, fingerprint, seal
from aiter_prep.execution.bundles import bundles_of, bundles_of_part, parse_part
from aiter_prep.execution.needed import differences
from aiter_prep.execution.sharing import Share
from aiter_prep.inspection import inspect_path
from aiter_prep.manifest import read_manifest
from aiter_prep.plan import Plan, make_plan
from aiter_prep.restoration import restore
from aiter_prep.storage.checkpoint import open_checkpoint
from aiter_prep.storage.journal import line_of
from aiter_prep.storage.parts import PartsFolder
from aiter_prep.verification import verify
from prepared import JOURNAL, MANIFEST, contents, flip, plan_of, prepare, problems_of, stamps

PARTS = ".aiter_prep.parts"
SHARD_BYTES = 10_000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small model over several shards."""
    folder = tiny.write(
        tmp_path / "source", kind="mxfp8", hidden=64, intermediate=128, layers=3, spread="layers"
    )
    (folder / "tokenizer.json").write_text('{"tiny": true}', "utf-8")
    return folder


def plan(source: Path, tp: int = 2, **options: Any) -> Plan:
    return plan_of(source, tp, max_shard_bytes=SHARD_BYTES, **options)


def part(source: Path, out: Path, number: int, count: int = 3, **options: Any) -> Share:
    """Write one part."""
    overwrite = options.pop("overwrite", False)
    share = Part(count, number)
    return execute_part(plan(source, **options), out, share, workers=1, overwrite=overwrite)


def parts(source: Path, out: Path, *numbers: int, count: int = 3, **options: Any) -> None:
    """Write some parts, one after the other."""
    for number in numbers:
        part(source, out, number, count, **options)


def refusal(act: Callable[[], object], kind: type[AiterPrepError] = DataMismatch) -> str:
    with pytest.raises(kind) as caught:
        act()
    assert type(caught.value) is kind
    assert (caught.value.message + caught.value.hint).isprintable()
    return caught.value.message


def notes_of(out: Path) -> list[Path]:
    return sorted(out.glob(f"{PARTS}/*/model-*.json"))


def rewrite(note: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a note and make its digest fit."""
    entry = json.loads(note.read_bytes().partition(b"\t")[0])
    change(entry)
    note.write_bytes(line_of(entry))


# --- sharing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100])
def test_every_shard_falls_to_one_part(count: int, source: Path) -> None:
    made = plan(source)
    shares = [bundles_of_part(made, Part(count, number + 1)) for number in range(count)]
    files = [file for share in shares for bundle in share for file in bundle.files]
    assert sorted(files) == sorted(shard.file for shard in made.shards)


def test_parts_differ_by_one_bundle_at_most(source: Path) -> None:
    made = plan(source)
    loads = [sum(b.total_bytes for b in bundles_of_part(made, Part(3, n))) for n in (1, 2, 3)]
    assert max(loads) - min(loads) <= bundles_of(made)[0].total_bytes


def test_a_bundle_holds_the_shards_of_all_ranks_that_read_the_same(source: Path) -> None:
    for bundle in bundles_of(plan(source)):
        assert len({shard.part for shard in bundle.shards}) == 1
        assert [s.rank for s in bundle.shards] in ([0, 1], [None])


@pytest.mark.parametrize(
    ("text", "expected"), [("1/1", Part(1, 1)), ("3/8", Part(8, 3)), ("08/8", Part(8, 8))]
)
def test_a_part_is_a_number_of_a_count(text: str, expected: Part) -> None:
    assert parse_part(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "3", "0/8", "9/8", "-1/8", "1/0", "a/b", "1/8/2", " 1/8", "1/1000000", "\u0661/\u0662"],
)
def test_what_is_no_part_is_refused(text: str) -> None:
    assert "is none" in refusal(lambda: parse_part(text), InvalidUsage)


# --- the same folder ----------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2), (2, 2, 3, 1, 1)])
def test_sealed_parts_are_what_one_run_writes(
    order: tuple[int, ...], source: Path, tmp_path: Path
) -> None:
    execute(plan(source), tmp_path / "one", workers=2)
    before = stamps(source)
    parts(source, tmp_path / "out", *order)
    manifest = seal(tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "one")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        path.name for path in (tmp_path / "one").iterdir()
    }
    assert manifest.to_json() == (tmp_path / "one" / MANIFEST).read_bytes()
    assert problems_of(tmp_path / "out", source) == ()
    assert stamps(source) == before


@pytest.mark.parametrize("kind", ["bf16", "fp8_block_f32", "mxfp4_gpt_oss", "fp8_tensor"])
@pytest.mark.parametrize("sharing", [{"tp": 1}, {"tp": 2, "gfx": "gfx942"}, {"tp": 1, "ep": 3}])
def test_every_kind_of_conversion_can_be_shared(
    kind: str, sharing: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny.Model(kind, hidden=256, intermediate=256, experts=4, layers=2)
    source = tiny.write(tmp_path / "source", model)
    execute(plan(source, **sharing), tmp_path / "one", workers=1)
    parts(source, tmp_path / "out", 1, 2, count=2, **sharing)
    seal(tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "one")


def test_more_parts_than_work_leave_some_with_nothing(source: Path, tmp_path: Path) -> None:
    shares = [part(source, tmp_path / "out", number, 50) for number in range(1, 51)]
    assert any(share == Share({}, 0, 0) for share in shares)
    seal(tmp_path / "out")
    execute(plan(source), tmp_path / "one")
    assert contents(tmp_path / "out") == contents(tmp_path / "one")


def test_parts_of_another_count_write_what_is_left(source: Path, tmp_path: Path) -> None:
    part(source, tmp_path / "out", 1, 3)
    share = part(source, tmp_path / "out", 1, 1)
    assert 0 < share.written_bytes < share.total_bytes
    seal(tmp_path / "out")
    execute(plan(source), tmp_path / "one")
    assert contents(tmp_path / "out") == contents(tmp_path / "one")


def test_a_part_that_is_repeated_writes_nothing(source: Path, tmp_path: Path) -> None:
    first = part(source, tmp_path / "out", 1)
    before = stamps(tmp_path / "out")
    again = part(source, tmp_path / "out", 1)
    assert first.written_bytes == first.total_bytes == again.total_bytes > 0
    assert again.written_bytes == 0
    assert stamps(tmp_path / "out") == before


def test_a_part_goes_on_behind_its_last_shard(source: Path, tmp_path: Path) -> None:
    whole = part(source, tmp_path / "out", 1)
    notes_of(tmp_path / "out")[0].unlink()
    again = part(source, tmp_path / "out", 1)
    assert 0 < again.written_bytes < whole.written_bytes


def test_sealing_twice_changes_nothing(source: Path, tmp_path: Path) -> None:
    parts(source, tmp_path / "out", 1, 2, 3)
    first = seal(tmp_path / "out")
    before = stamps(tmp_path / "out")
    assert seal(tmp_path / "out").to_json() == first.to_json()
    assert stamps(tmp_path / "out") == before


def test_a_folder_of_one_run_counts_as_sealed(source: Path, tmp_path: Path) -> None:
    manifest = prepare(source, tmp_path / "one")
    assert seal(tmp_path / "one").to_json() == manifest.to_json()


class OtherBackend(CpuBackend):
    """A backend of another name that brings the same bytes."""

    name = "torch"
    device = "cuda:0"


def test_parts_of_several_backends_name_them_all(source: Path, tmp_path: Path) -> None:
    parts(source, tmp_path / "out", 1, 2)
    execute_part(plan(source), tmp_path / "out", Part(3, 3), backend=OtherBackend())
    manifest = seal(tmp_path / "out")
    assert manifest.created_by["backend"] == "cpu-and-torch"
    assert manifest.created_by["device"] == "cpu-and-cuda:0"
    assert manifest.created_by["aiter_version"] is None
    assert problems_of(tmp_path / "out", source) == ()


def test_parts_of_one_backend_name_it_once(source: Path, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        execute_part(plan(source), tmp_path / "out", Part(3, number), backend=OtherBackend())
    assert seal(tmp_path / "out").created_by["backend"] == "torch"


# --- unsealed -----------------------------------------------------------------------------------


def test_a_folder_that_is_not_sealed_is_unfinished_to_everyone(
    source: Path, tmp_path: Path
) -> None:
    parts(source, tmp_path / "out", 1, 2, 3)
    with pytest.raises(DataMismatch) as caught:
        verify(tmp_path / "out")
    assert "is unfinished" in caught.value.message
    assert "aiter-prep seal" in caught.value.hint
    with pytest.raises(DataMismatch):
        restore(tmp_path / "out", tmp_path / "back")
    found = inspect_path(tmp_path / "out").to_json()
    assert (found["kind"], found["shards"]) == ("unfinished", len(plan(source).shards))
    assert [p for p in (tmp_path / "out").iterdir() if not p.name.startswith(".")] == []


def test_one_run_does_not_mix_with_parts(source: Path, tmp_path: Path) -> None:
    parts(source, tmp_path / "out", 1)
    choices: tuple[dict[str, Any], ...] = ({}, {"resume": True})
    for options in choices:
        with pytest.raises(OutputNotEmpty) as caught:
            execute(plan(source), tmp_path / "out", **options)
        assert caught.value.message.endswith("holds parts of a conversion that are not sealed")
    execute(plan(source), tmp_path / "out", overwrite=True)
    execute(plan(source), tmp_path / "one")
    assert contents(tmp_path / "out") == contents(tmp_path / "one")


def test_parts_do_not_mix_with_one_run(source: Path, tmp_path: Path) -> None:
    prepare(source, tmp_path / "out")
    before = stamps(tmp_path / "out")
    assert "is a prepared folder already" in refusal(
        lambda: part(source, tmp_path / "out", 1), OutputNotEmpty
    )
    assert stamps(tmp_path / "out") == before
    (tmp_path / "out" / MANIFEST).unlink()
    (tmp_path / "out" / JOURNAL).touch()
    assert "by another run" in refusal(lambda: part(source, tmp_path / "out", 1), OutputNotEmpty)


# --- replacing ----------------------------------------------------------------------------------

BESIDE = ".out.aiter_prep.partial"


def test_a_folder_is_replaced_when_its_parts_are_sealed(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(source, out, 1)
    before = stamps(out)
    parts(source, out, 1, 3, overwrite=True)
    assert "those of part 2/3" in refusal(lambda: seal(out))
    assert stamps(out) == before
    assert problems_of(out, source) == ()
    part(source, out, 2, overwrite=True)
    assert part(source, out, 1, overwrite=True).written_bytes == 0
    assert stamps(out) == before
    manifest = seal(out)
    execute(plan(source), tmp_path / "one")
    assert contents(out) == contents(tmp_path / "one")
    assert seal(out) == manifest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "out", "source"]


def test_where_nothing_is_to_be_replaced_parts_wait_in_the_folder(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    parts(source, out, 1, 2, overwrite=True)
    part(source, out, 3)
    assert len(notes_of(out)) == len(plan(source).shards)
    seal(out)
    execute(plan(source), tmp_path / "one")
    assert contents(out) == contents(tmp_path / "one")


def test_only_a_prepared_folder_is_replaced(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(source, out, 1)
    (out / "notes.txt").write_text("mine", "utf-8")
    before = stamps(out)
    act = partial(part, source, out, 1, overwrite=True)
    assert "holds `notes.txt`" in refusal(act, OutputNotEmpty)
    (out / "notes.txt").unlink()
    parts(source, out, 1, 2, 3, overwrite=True)
    (out / "notes.txt").write_text("mine", "utf-8")  # meanwhile
    assert "holds `notes.txt`" in refusal(lambda: seal(out), OutputNotEmpty)
    assert {name: stamp[2] for name, stamp in stamps(out).items()} == {
        name: stamp[2] for name, stamp in before.items()
    }
    (out / "notes.txt").unlink()
    (out / MANIFEST).unlink()
    (out / JOURNAL).touch()
    assert "by another run" in refusal(act, OutputNotEmpty)


def test_a_folder_that_went_away_is_not_replaced(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(source, out, 1)
    parts(source, out, 1, 2, 3, overwrite=True)
    shutil.rmtree(out)
    assert "no prepared folder any more" in refusal(lambda: seal(out))
    (tmp_path / BESIDE).rename(out)
    seal(out)
    execute(plan(source), tmp_path / "one")
    assert contents(out) == contents(tmp_path / "one")


def test_parts_in_two_places_are_told_apart(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(source, out, 1)
    part(source, out, 1, overwrite=True)
    shutil.rmtree(out)
    part(source, out, 1)
    assert "to replace it" in refusal(lambda: seal(out))
    shutil.rmtree(tmp_path / BESIDE)
    parts(source, out, 2, 3)
    assert seal(out).shards


def test_parts_of_another_plan_are_not_replaced(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(source, out, 1)
    part(source, out, 1, overwrite=True)
    other = partial(execute_part, plan(source, 4), out, Part(3, 1), overwrite=True)
    assert "holds parts of another conversion" in refusal(other, OutputNotEmpty)


@pytest.mark.parametrize("name", ["notes.txt", ".hidden", "config.json"])
def test_a_folder_of_others_is_never_touched(name: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine", "utf-8")
    before = stamps(tmp_path / "out")
    assert "not of our making" in refusal(lambda: part(source, tmp_path / "out", 1), OutputNotEmpty)
    assert stamps(tmp_path / "out") == before


def test_a_file_is_no_folder_for_parts(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    assert "is not a folder" in refusal(lambda: part(source, tmp_path / "out", 1), OutputNotEmpty)


def test_the_source_is_no_folder_for_parts(source: Path) -> None:
    assert "lie in each other" in refusal(lambda: part(source, source / "out", 1), InvalidUsage)


# --- what is missing ----------------------------------------------------------------------------


def test_sealing_names_the_missing_parts(source: Path, tmp_path: Path) -> None:
    parts(source, tmp_path / "out", 2)
    before = stamps(tmp_path / "out")
    message = refusal(lambda: seal(tmp_path / "out"))
    assert "those of part 1/3 (not begun), 3/3 (not begun)" in message
    assert stamps(tmp_path / "out") == before
    parts(source, tmp_path / "out", 1, 3)
    seal(tmp_path / "out")


def test_sealing_names_a_part_that_did_not_end(source: Path, tmp_path: Path) -> None:
    parts(source, tmp_path / "out", 1, 2, 3)
    own = bundles_of_part(plan(source), Part(3, 2))
    file = own[0].files[0]
    next(tmp_path.glob(f"out/{PARTS}/*/{file}.json")).unlink()
    count = sum(len(bundle.files) for bundle in own)
    message = refusal(lambda: seal(tmp_path / "out"))
    assert message.endswith(f"those of part 2/3 (1 of {count} shards)")


def test_an_empty_folder_is_not_sealed(tmp_path: Path) -> None:
    assert "holds no part" in refusal(lambda: seal(tmp_path))
    assert "holds no part" in refusal(lambda: seal(tmp_path / "missing"))
    assert list(tmp_path.iterdir()) == []


def damage_size(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def damage_header(path: Path) -> None:
    flip(path, 20)


def remove(path: Path) -> None:
    path.unlink()


def damage_note(path: Path) -> None:
    flip(path.with_name(f"{path.name}.json"), 20)


def cut_note(path: Path) -> None:
    damage_size(path.with_name(f"{path.name}.json"))


def forge(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    return lambda path: rewrite(path.with_name(f"{path.name}.json"), change)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a shard that is short": damage_size,
    "a shard with another header": damage_header,
    "no shard": remove,
    "a note with another byte": damage_note,
    "a note that is cut": cut_note,
    "a note of another plan": forge(lambda note: note.update(digest="xxh3-128:" + "0" * 32)),
    "a note of another shard": forge(lambda note: note.update(file="model-rank-7-part-0")),
    "a note without a tensor": forge(lambda note: note["tensors"].popitem()),
    "a note with a tensor too many": forge(lambda note: note["tensors"].update(x=["d", 0, []])),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_shard_that_is_not_as_noted_is_missing(what: str, source: Path, tmp_path: Path) -> None:
    parts(source, tmp_path / "out", 1, 2, 3)
    DAMAGE[what](min(tmp_path.glob(f"out/{PARTS}/*/model-rank-0-*.safetensors")))
    message = refusal(lambda: seal(tmp_path / "out"))
    assert message.startswith("1 of ")
    assert not (tmp_path / "out" / MANIFEST).exists()
    parts(source, tmp_path / "out", 1, 2, 3)
    seal(tmp_path / "out")
    execute(plan(source), tmp_path / "one")
    assert contents(tmp_path / "out") == contents(tmp_path / "one")


# --- another plan -------------------------------------------------------------------------------


def put_in(stale: Path, out: Path) -> None:
    """Put parts beside others, as where both began at the same moment."""
    for path in (stale / PARTS).iterdir():
        shutil.copytree(path, out / PARTS / path.name)


OTHER: dict[str, dict[str, Any]] = {
    "tp": {"tp": 1},
    "gfx": {"gfx": "gfx942"},
    "ranks": {"ranks": [0]},
    "target": {"target": "vllm"},
}


@pytest.mark.parametrize("what", OTHER)
def test_parts_with_other_options_are_refused(what: str, source: Path, tmp_path: Path) -> None:
    parts(source, tmp_path / "out", 1, 2, 3)
    before = stamps(tmp_path / "out")
    message = refusal(lambda: part(source, tmp_path / "out", 1, **OTHER[what]), OutputNotEmpty)
    assert "holds parts of another conversion" in message
    assert {k: v for k, v in stamps(tmp_path / "out").items() if k in before} == before


@pytest.mark.parametrize("what", OTHER)
def test_parts_of_two_plans_are_not_sealed(what: str, source: Path, tmp_path: Path) -> None:
    parts(source, tmp_path / "out", 1, 2, 3)
    part(source, tmp_path / "stale", 1, **OTHER[what])
    put_in(tmp_path / "stale", tmp_path / "out")
    message = refusal(lambda: seal(tmp_path / "out"))
    assert "holds parts of 2 conversions" in message
    assert what in message
    stale = next((tmp_path / "stale" / PARTS).iterdir()).name
    shutil.rmtree(tmp_path / "out" / PARTS / stale)
    seal(tmp_path / "out")
    execute(plan(source), tmp_path / "one")
    assert contents(tmp_path / "out") == contents(tmp_path / "one")


def test_a_stale_part_that_ends_late_touches_no_shard_of_another_plan(
    source: Path, tmp_path: Path
) -> None:
    """It began on other weights under the same headers, and was forgotten."""
    stale = plan(source)
    folder = PartsFolder(tmp_path / "out", "xxh3-128:" + "5" * 32)
    layout = stale.shards[0].layout
    with folder.begin("part-1-of-3", {"facts": {}}, {}):
        shard = folder.create(layout)
        shutil.rmtree(tmp_path / "out" / PARTS)  # the user starts anew
        parts(source, tmp_path / "out", 1, 2, 3)
        assert "is gone" in refusal(lambda: folder.finish(shard, {}), AiterPrepError)
    seal(tmp_path / "out")
    execute(plan(source), tmp_path / "one")
    assert contents(tmp_path / "out") == contents(tmp_path / "one")


def test_of_two_processes_of_one_part_the_later_one_goes_on(source: Path, tmp_path: Path) -> None:
    made = plan(source)
    early, late = (PartsFolder(tmp_path / "out", "xxh3-128:1") for _ in range(2))
    layout = made.shards[0].layout
    with early.begin("part-1-of-3", {"a": 1}, {}) as early:
        shard = early.create(layout)
        with late.begin("part-1-of-3", {"a": 1}, {}) as late:
            other = late.create(layout)
            assert "is gone" in refusal(lambda: early.finish(shard, {}), AiterPrepError)
            late.finish(other, {})
    assert sorted(p.name for p in late.folder.iterdir()) == sorted(
        ["part-1-of-3", "request.json", layout.file, f"{layout.file}.json"]
    )


def touch(folder: Path) -> None:
    """Change the time of the last change of a shard."""
    path = min(folder.glob("*.safetensors"))
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def change_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "more": 1}), "utf-8")


@pytest.mark.parametrize(("what", "change"), [("source", touch), ("config", change_config)])
def test_a_source_that_changed_is_not_mixed_with_itself(
    what: str, change: Callable[[Path], None], source: Path, tmp_path: Path
) -> None:
    parts(source, tmp_path / "out", 1, 2)
    kept = part(source, tmp_path / "out", 3)
    assert kept.digests
    change(source)
    refusal(lambda: part(source, tmp_path / "out", 3), OutputNotEmpty)
    message = refusal(lambda: seal(tmp_path / "out"))
    assert "were made by another plan" in message
    assert f": {what} differ" in message


def replace_with_its_times(folder: Path) -> None:
    """Put other weights in the place of a shard: same header, same size, same time."""
    path = min(folder.glob("*.safetensors"))
    before = path.stat().st_mtime_ns
    flip(path, path.stat().st_size - 1)
    os.utime(path, ns=(before, before))


@pytest.mark.parametrize(
    ("what", "change"),
    [("source", touch), ("source", replace_with_its_times), ("config", change_config)],
)
def test_a_source_that_changed_after_the_last_part_is_not_sealed(
    what: str, change: Callable[[Path], None], source: Path, tmp_path: Path
) -> None:
    parts(source, tmp_path / "out", 1, 2, 3)
    change(source)
    message = refusal(lambda: seal(tmp_path / "out"))
    assert "were made by another plan" in message
    assert f": {what} differ" in message
    assert not (tmp_path / "out" / MANIFEST).exists()


def test_a_source_that_changes_under_a_part_fails_it(source: Path, tmp_path: Path) -> None:
    made = plan(source)
    touch(source)
    with pytest.raises(BadSource):
        execute_part(made, tmp_path / "out", Part(1, 1))
    assert not (tmp_path / "out").exists()


def test_parts_of_another_version_are_not_sealed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts(source, tmp_path / "out", 1, 2)
    monkeypatch.setattr(fingerprint, "__version__", "9.9.9")
    assert "version 0.1.0 and 9.9.9 differ" in refusal(lambda: seal(tmp_path / "out"))
    refusal(lambda: part(source, tmp_path / "out", 3), OutputNotEmpty)


def test_parts_of_another_program_of_the_same_version_are_not_sealed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts(source, tmp_path / "out", 1, 2, 3)
    monkeypatch.setattr(fingerprint, "code_digest", lambda: "xxh3-128:" + "0" * 32)
    assert ": code differ" in refusal(lambda: seal(tmp_path / "out"))


def test_parts_that_plan_otherwise_under_one_version_are_told_apart(source: Path) -> None:
    made = plan(source)
    block = made.blocks[0]
    stack = block.stacks[0]
    step = stack.steps[0]
    piece = replace(step.pieces[0], to_row=step.pieces[0].to_row + 1)
    steps = (replace(step, pieces=(piece, *step.pieces[1:])), *stack.steps[1:])
    stacks = (replace(stack, steps=steps), *block.stacks[1:])
    other = replace(made, blocks=(replace(block, stacks=stacks), *made.blocks[1:]))
    assert fingerprint.facts_of(other) != fingerprint.facts_of(made)
    assert fingerprint.facts_of(made) == fingerprint.facts_of(plan(source))


def test_a_source_that_was_moved_can_be_named(source: Path, tmp_path: Path) -> None:
    parts(source, tmp_path / "out", 1, 2, 3)
    (tmp_path / "elsewhere").mkdir()
    moved = source.rename(tmp_path / "elsewhere" / "called otherwise")
    with pytest.raises(BadSource):
        seal(tmp_path / "out")
    seal(tmp_path / "out", source=open_checkpoint(moved))
    assert problems_of(tmp_path / "out", moved) == ()
    assert read_manifest(tmp_path / "out").source["name"] == source.name


def test_another_source_cannot_be_named(source: Path, tmp_path: Path) -> None:
    parts(source, tmp_path / "out", 1, 2, 3)
    other = tiny.write(
        tmp_path / "x" / "source",
        kind="mxfp8",
        hidden=64,
        intermediate=128,
        layers=3,
        spread="layers",
        seed=1,
    )
    message = refusal(lambda: seal(tmp_path / "out", source=open_checkpoint(other)))
    assert ": source differ" in message


def test_a_request_that_was_cut_is_no_plan(source: Path, tmp_path: Path) -> None:
    parts(source, tmp_path / "out", 1, 2, 3)
    request = next(tmp_path.glob(f"out/{PARTS}/*/request.json"))
    os.truncate(request, 10)
    assert "no part has begun" in refusal(lambda: seal(tmp_path / "out"))
    part(source, tmp_path / "out", 1)
    seal(tmp_path / "out")


# --- the end ------------------------------------------------------------------------------------


def test_parts_beside_the_folder_that_they_became_are_removed(source: Path, tmp_path: Path) -> None:
    parts(source, tmp_path / "out", 1, 2, 3)
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    seal(tmp_path / "out")
    shutil.copytree(tmp_path / "copy" / PARTS, tmp_path / "out" / PARTS)
    assert problems_of(tmp_path / "out", source) == ()
    seal(tmp_path / "out")
    assert not (tmp_path / "out" / PARTS).exists()


def test_parts_beside_another_folder_are_not_passed_over(source: Path, tmp_path: Path) -> None:
    parts(source, tmp_path / "parts", 1, 2, 3)
    prepare(source, tmp_path / "out", 1)
    shutil.copytree(tmp_path / "parts" / PARTS, tmp_path / "out" / PARTS)
    before = stamps(tmp_path / "out")
    assert "holds parts of another conversion" in refusal(lambda: seal(tmp_path / "out"))
    assert stamps(tmp_path / "out") == before


def test_a_full_disk_stops_a_part_before_it_writes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    assert "the disk has 10" in refusal(lambda: part(source, tmp_path / "out", 1), AiterPrepError)
    monkeypatch.undo()
    assert notes_of(tmp_path / "out") == []
    part(source, tmp_path / "out", 1)


def test_a_disk_that_fails_under_a_part_leaves_what_is_finished(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = os.fsync, [12]

    def failing(descriptor: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(5, "it is broken")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    assert "it is broken" in refusal(lambda: part(source, tmp_path / "out", 1, 1), AiterPrepError)
    monkeypatch.undo()
    assert notes_of(tmp_path / "out")
    assert list(tmp_path.glob(f"out/{PARTS}/*/part-1-of-1.*")) == []
    share = part(source, tmp_path / "out", 1, 1)
    assert 0 < share.written_bytes < share.total_bytes
    seal(tmp_path / "out")
    assert problems_of(tmp_path / "out", source) == ()


# --- only if needed -----------------------------------------------------------------------------


def same(source: Path, out: Path, **options: Any) -> tuple[str, ...]:
    return differences(plan(source, **options), out)


def test_a_folder_is_known_to_be_what_a_plan_leads_to(source: Path, tmp_path: Path) -> None:
    execute(plan(source), tmp_path / "out")
    assert same(source, tmp_path / "out") == ()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tp": 1}, "tp is 2, not 1"),
        ({"gfx": "gfx942"}, "gfx is gfx950, not gfx942"),
        ({"ranks": [0]}, "ranks is [0, 1], not [0]"),
        ({"as_common": ["x"]}, "as_common is [], not ['x']"),
    ],
)
def test_other_options_are_another_conversion(
    options: Mapping[str, Any], expected: str, source: Path, tmp_path: Path
) -> None:
    execute(plan(source), tmp_path / "out")
    assert expected in same(source, tmp_path / "out", **options)


def test_another_size_of_shards_is_another_conversion(source: Path, tmp_path: Path) -> None:
    prepare(source, tmp_path / "out", 2)
    assert "`shards` would be another" in same(source, tmp_path / "out")


def test_weights_that_changed_under_the_same_headers_are_another_source(
    source: Path, tmp_path: Path
) -> None:
    execute(plan(source), tmp_path / "out")
    path = min(source.glob("*.safetensors"))
    flip(path, path.stat().st_size - 1)
    os.utime(path, ns=(0, (tmp_path / "out" / MANIFEST).stat().st_mtime_ns + 1))
    assert same(source, tmp_path / "out") == (f"`{path.name}` of the source changed since",)


def test_a_source_of_another_name_is_another_source(source: Path, tmp_path: Path) -> None:
    execute(plan(source), tmp_path / "out")
    moved = source.rename(tmp_path / "other")
    assert same(moved, tmp_path / "out") == ("name of the source is source, not other",)


def test_another_commit_of_the_hub_is_another_source(source: Path, tmp_path: Path) -> None:
    one, other = (open_checkpoint(source, name="org/name", revision=r) for r in ("a", "b"))
    execute(make_plan(one, tp=2), tmp_path / "out")
    assert differences(make_plan(one, tp=2), tmp_path / "out") == ()
    found = differences(make_plan(other, tp=2), tmp_path / "out")
    assert found == ("revision of the source is a, not b",)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_other_small_files_are_another_conversion(name: str, source: Path, tmp_path: Path) -> None:
    execute(plan(source), tmp_path / "out")
    config = json.loads((source / "config.json").read_text("utf-8"))
    (source / name).write_text(json.dumps({**config, "changed": 1}), "utf-8")
    assert f"`{name}` would be another" in same(source, tmp_path / "out")


def test_a_file_more_in_the_source_is_another_conversion(source: Path, tmp_path: Path) -> None:
    execute(plan(source), tmp_path / "out")
    (source / "chat_template.jinja").write_text("{{ x }}", "utf-8")
    assert same(source, tmp_path / "out") == ("`chat_template.jinja` would be another",)


def test_what_has_no_manifest_is_no_conversion(source: Path, tmp_path: Path) -> None:
    refusal(lambda: same(source, tmp_path / "missing"))


def test_a_part_of_an_unknown_backend_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(NoRule):
        execute_part(plan(source), tmp_path / "out", Part(1, 1), backend="abacus")
    assert not (tmp_path / "out").exists()
