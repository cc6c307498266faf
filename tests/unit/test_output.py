"""An output folder holds nothing under a final name before it is whole."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import tiny
from aiter_prep.errors import AiterPrepError, BadSource, DataMismatch, InvalidUsage, OutputNotEmpty
from aiter_prep.execution import execute
from aiter_prep.progress import Progress
from aiter_prep.restoration import restore
from aiter_prep.storage.output import OutputFolder, ShardFile, Written, is_unfinished
from aiter_prep.storage.shard import ShardLayout, lay_out_shard
from aiter_prep.verification import verify
from prepared import JOURNAL, LOCK, MANIFEST, contents, plan_of, prepare, problems_of, stamps

HELD = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(descriptor, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def layout(name: str = "model-rank-0-part-0.safetensors", size: int = 100) -> ShardLayout:
    return lay_out_shard(name, [("x", "U8", (size,))], {"format": "pt"})


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def shard_written(output: OutputFolder, shard: ShardLayout) -> ShardFile:
    file = output.create(shard)
    file.write(len(shard.header), np.full(shard.total_bytes - len(shard.header), 7, np.uint8))
    return file


# --- shards -------------------------------------------------------------------------------------


def test_a_shard_lies_under_a_temporary_name_until_it_is_whole(tmp_path: Path) -> None:
    shard = layout()
    with OutputFolder(tmp_path / "out", fingerprint="f") as output:
        file = shard_written(output, shard)
        assert names(tmp_path / "out") == {JOURNAL, LOCK, f".{shard.file}.partial"}
        assert is_unfinished(tmp_path / "out")
        output.finish(file, {"x": Written("d")})
        assert names(tmp_path / "out") == {JOURNAL, LOCK, shard.file}
        output.write_file("config.json", b"{}")
        output.seal(b"{}\n", [shard.file])
    assert names(tmp_path / "out") == {"config.json", MANIFEST, shard.file}
    assert not is_unfinished(tmp_path / "out")
    assert (tmp_path / "out" / shard.file).read_bytes() == shard.header + b"\7" * 100


def test_a_shard_has_its_full_size_from_the_start_and_takes_ranges_in_any_order(
    tmp_path: Path,
) -> None:
    shard = layout(size=50)
    file = ShardFile(tmp_path, shard)
    partial = tmp_path / f".{shard.file}.partial"
    assert partial.stat().st_size == shard.total_bytes
    start = len(shard.header)
    for at in (40, 0, 30, 10, 20):
        file.write(start + at, bytes(range(at, at + 10)))
    file.finish(tmp_path)
    assert (tmp_path / shard.file).read_bytes() == shard.header + bytes(range(50))
    file.close()


def test_a_discarded_shard_gives_its_space_back(tmp_path: Path) -> None:
    file = ShardFile(tmp_path, layout())
    file.discard()
    file.discard()
    assert names(tmp_path) == set()


@pytest.mark.parametrize("limit", [1, 7, 4096])
def test_short_writes_are_gone_on_with(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:limit], at))
    data = np.random.default_rng(0).integers(0, 256, 9999, dtype=np.uint8)
    shard = layout(size=9999)
    file = ShardFile(tmp_path, shard)
    file.write(len(shard.header), data)
    file.finish(tmp_path)
    assert (tmp_path / shard.file).read_bytes() == shard.header + bytes(data)


def test_short_writes_and_reads_change_nothing_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny.write(tmp_path / "source", kind="mxfp8")
    prepare(source, tmp_path / "plain", 2)
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:1001], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:77]], at))
    prepare(source, tmp_path / "short", 2)
    assert contents(tmp_path / "short") == contents(tmp_path / "plain")
    assert problems_of(tmp_path / "short", source) == ()


def test_a_short_write_of_the_journal_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:10]))
    with OutputFolder(tmp_path / "out", fingerprint="f"):
        monkeypatch.undo()
    with OutputFolder(tmp_path / "out", fingerprint="f", resume=True):
        pass


# --- what is in the way -------------------------------------------------------------------------


def refusal(folder: Path, **options: Any) -> OutputNotEmpty:
    with pytest.raises(OutputNotEmpty) as caught:
        OutputFolder(folder, fingerprint="f", **options)
    assert (caught.value.message + caught.value.hint).isprintable()
    return caught.value


def test_a_folder_that_does_not_exist_is_made_with_its_parents(tmp_path: Path) -> None:
    with OutputFolder(tmp_path / "a" / "b" / "c", fingerprint="f"):
        assert is_unfinished(tmp_path / "a" / "b" / "c")


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    with OutputFolder(tmp_path, fingerprint="f"):
        assert is_unfinished(tmp_path)


def test_a_lock_that_a_dead_process_left_does_not_block(tmp_path: Path) -> None:
    (tmp_path / LOCK).touch()
    with OutputFolder(tmp_path, fingerprint="f"):
        assert is_unfinished(tmp_path)


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}])
@pytest.mark.parametrize(
    "name", ["notes.txt", ".hidden", "config.json", "model-rank-0-part-0.safetensors", "folder"]
)
def test_a_folder_that_is_not_of_our_making_is_never_touched(
    name: str, options: dict[str, bool], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    if name == "folder":
        (out / name).mkdir()
    else:
        (out / name).write_text("mine", "utf-8")
    before = stamps(tmp_path)
    fault = refusal(out, **options)
    assert fault.message.endswith(f"is not empty and not of our making: it holds `{name}`")
    assert fault.hint == "move that away, or choose another output folder"
    assert stamps(tmp_path) == before
    assert names(out) == {name}


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}])
def test_a_file_is_no_output_folder(options: dict[str, bool], tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine", "utf-8")
    assert refusal(tmp_path / "out", **options).message.endswith("is not a folder")
    assert (tmp_path / "out").read_text("utf-8") == "mine"


def test_a_prepared_folder_is_not_replaced_unless_asked(tmp_path: Path) -> None:
    prepare(tiny.write(tmp_path / "source"), tmp_path / "out", 2)
    before = stamps(tmp_path / "out")
    for options in ({}, {"resume": True}):
        fault = refusal(tmp_path / "out", **options)
        assert fault.message.endswith("is a prepared folder already")
        assert "--overwrite" in fault.hint
    assert stamps(tmp_path / "out") == before


def test_an_unfinished_folder_is_gone_on_with_only_if_asked(tmp_path: Path) -> None:
    with OutputFolder(tmp_path / "out", fingerprint="f"):
        pass
    fault = refusal(tmp_path / "out")
    assert fault.message.endswith("holds an unfinished run")
    assert "--resume" in fault.hint
    with OutputFolder(tmp_path / "out", fingerprint="f", resume=True) as output:
        assert output.finished == {}


@pytest.mark.parametrize(
    ("place", "what"), [("source", "itself"), ("source/out", "below"), (".", "above")]
)
def test_nothing_is_ever_written_into_the_source(place: str, what: str, tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source")
    before = stamps(tmp_path)
    for overwrite in (False, True):
        with pytest.raises(InvalidUsage, match="lie in each other"):
            execute(plan_of(source), tmp_path / place, overwrite=overwrite)
    assert stamps(tmp_path) == before, what


def test_a_link_to_the_source_is_the_source(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source")
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(InvalidUsage, match="lie in each other"):
        execute(plan_of(source), tmp_path / "link" / "out")


# --- overwrite ----------------------------------------------------------------------------------


def test_a_prepared_folder_is_replaced_by_another(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source", kind="bf16", layers=2)
    (source / "tokenizer.json").write_text("{}", "utf-8")
    prepare(source, tmp_path / "out", 4, max_shard_bytes=10_000)
    other = tiny.write(tmp_path / "other", kind="mxfp8")
    prepare(other, tmp_path / "fresh", 2)
    execute(plan_of(other, 2), tmp_path / "out", overwrite=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")
    assert names(tmp_path) == {"source", "other", "out", "fresh"}


def test_the_old_folder_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source")
    prepare(source, tmp_path / "out", 2)
    before = stamps(tmp_path / "out")
    seen: list[bool] = []

    def look(_progress: Progress) -> None:
        seen.append(stamps(tmp_path / "out") == before)

    other = tiny.write(tmp_path / "other", kind="mxfp8")
    execute(plan_of(other, 2), tmp_path / "out", overwrite=True, progress=look)
    assert seen
    assert all(seen)
    assert stamps(tmp_path / "out") != before


def test_a_failure_while_replacing_leaves_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny.write(tmp_path / "source")
    prepare(source, tmp_path / "out", 2)
    before = stamps(tmp_path / "out")
    other = plan_of(tiny.write(tmp_path / "other", kind="mxfp8"), 2)
    monkeypatch.setattr(os, "pwrite", failing(errno.ENOSPC))
    with pytest.raises(AiterPrepError, match="No space left"):
        execute(other, tmp_path / "out", overwrite=True)
    monkeypatch.undo()
    assert stamps(tmp_path / "out") == before
    assert problems_of(tmp_path / "out", source) == ()
    execute(other, tmp_path / "out", overwrite=True)
    assert problems_of(tmp_path / "out", tmp_path / "other") == ()
    assert names(tmp_path) == {"source", "other", "out"}


@pytest.mark.parametrize("name", ["notes.txt", ".git", "model-rank-7-part-0.safetensors"])
def test_a_prepared_folder_with_something_else_in_it_is_not_replaced(
    name: str, tmp_path: Path
) -> None:
    source = tiny.write(tmp_path / "source")
    prepare(source, tmp_path / "out", 2)
    if name == ".git":
        (tmp_path / "out" / name).mkdir()
    else:
        (tmp_path / "out" / name).write_text("mine", "utf-8")
    before = stamps(tmp_path)
    with pytest.raises(OutputNotEmpty, match="which its manifest does not name") as caught:
        execute(plan_of(source, 2), tmp_path / "out", overwrite=True)
    assert f"holds `{name}`" in caught.value.message
    assert "move it away first" in caught.value.hint
    assert stamps(tmp_path) == before


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}", b'{"shards": 3}', b"\xff"])
def test_a_folder_with_a_manifest_that_says_nothing_is_not_replaced(
    text: bytes, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / MANIFEST).write_bytes(text)
    (out / "thesis.tex").write_text("mine", "utf-8")
    with pytest.raises(OutputNotEmpty, match=r"holds `thesis\.tex`"):
        OutputFolder(out, fingerprint="f", overwrite=True)
    assert (out / "thesis.tex").read_text("utf-8") == "mine"


def test_an_unfinished_folder_is_replaced_with_all_that_the_run_had_written(
    tmp_path: Path,
) -> None:
    with OutputFolder(tmp_path / "out", fingerprint="old") as output:
        shard = layout("model-rank-9-part-3.safetensors")
        output.finish(shard_written(output, shard), {"x": Written("d")})
        shard_written(output, layout("model-common-part-0.safetensors")).close()
        output.note_files(["config.json", "LICENSE"])
        output.write_file("LICENSE", b"free")
    (tmp_path / "out" / "thesis.tex").write_text("mine", "utf-8")
    with OutputFolder(tmp_path / "out", fingerprint="new", overwrite=True) as output:
        assert names(tmp_path / "out") == {JOURNAL, LOCK, "thesis.tex"}
        assert output.finished == {}


def test_what_lies_in_an_unfinished_folder_besides_is_kept(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source")
    with OutputFolder(tmp_path / "out", fingerprint="old"):
        (tmp_path / "out" / "thesis.tex").write_text("mine", "utf-8")
    execute(plan_of(source), tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "thesis.tex").read_text("utf-8") == "mine"
    problems = problems_of(tmp_path / "out")
    assert [(p.file, p.what) for p in problems] == [("thesis.tex", "is not named by the manifest")]


# --- resume -------------------------------------------------------------------------------------


class Stopped(Exception):
    """Stands for a crash."""


@contextmanager
def stopping_after(count: int) -> Iterator[None]:
    """Make a run fail when it begins a shard after it has finished `count`."""
    finish, create = OutputFolder.finish, OutputFolder.create
    done: list[str] = []

    def counted(output: OutputFolder, shard: ShardFile, tensors: Any) -> None:
        finish(output, shard, tensors)
        done.append(shard.layout.file)

    def refused(output: OutputFolder, shard: ShardLayout) -> ShardFile:
        if len(done) >= count:
            raise Stopped
        return create(output, shard)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OutputFolder, "finish", counted)
        patch.setattr(OutputFolder, "create", refused)
        yield


class Run(NamedTuple):
    """A run that was stopped, and what it would have written."""

    source: Path
    out: Path
    fresh: dict[str, str]


@pytest.fixture
def stopped(tmp_path: Path) -> Run:
    """A run over 26 shards that stopped after seven or some more."""
    source = tiny.write(tmp_path / "source", kind="mxfp8", layers=4)
    (source / "tokenizer.json").write_text("{}", "utf-8")
    prepare(source, tmp_path / "fresh", 2, max_shard_bytes=20_000)
    fresh = contents(tmp_path / "fresh")
    with stopping_after(7), pytest.raises(Stopped):
        prepare(source, tmp_path / "out", 2, max_shard_bytes=20_000)
    assert is_unfinished(tmp_path / "out")
    return Run(source, tmp_path / "out", fresh)


def resumed(run: Run, **options: Any) -> int:
    """Resume a run, check that it ends in the same bytes, and return what it had to read."""
    read: list[int] = [0]

    def look(progress: Progress) -> None:
        read[0] = progress.total_bytes

    plan = plan_of(run.source, 2, max_shard_bytes=20_000)
    execute(plan, run.out, resume=True, workers=1, progress=look, **options)
    assert contents(run.out) == run.fresh
    assert problems_of(run.out, run.source) == ()
    return read[0]


def test_a_failed_run_leaves_finished_shards_and_gives_the_rest_of_the_space_back(
    stopped: Run,
) -> None:
    held = names(stopped.out)
    assert {JOURNAL, LOCK} < held
    assert 2 + 7 <= len(held) < 2 + 20
    assert not [name for name in held if name.endswith(".partial")]
    with pytest.raises(DataMismatch, match="is unfinished"):
        verify(stopped.out)
    with pytest.raises(DataMismatch, match="is not a prepared folder"):
        restore(stopped.out, stopped.out.parent / "back")


def test_a_resumed_run_ends_in_the_same_bytes_and_reads_less(stopped: Run) -> None:
    whole = sum(len(tensor.data) for tensor in tiny.read_folder(stopped.source).values())
    assert 0 < resumed(stopped) < whole


def test_a_run_that_finished_everything_but_the_manifest_reads_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny.write(tmp_path / "source")
    prepare(source, tmp_path / "fresh", 2)

    def fail(_output: OutputFolder, _manifest: bytes, _names: object) -> None:
        raise Stopped

    monkeypatch.setattr(OutputFolder, "seal", fail)
    with pytest.raises(Stopped):
        prepare(source, tmp_path / "out", 2)
    monkeypatch.undo()
    read: list[int] = []
    execute(
        plan_of(source, 2),
        tmp_path / "out",
        resume=True,
        progress=lambda progress: read.append(progress.total_bytes),
    )
    assert set(read) <= {0}
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_resuming_an_empty_or_missing_folder_is_a_fresh_run(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source")
    prepare(source, tmp_path / "fresh", 2)
    (tmp_path / "empty").mkdir()
    for name in ("missing", "empty"):
        execute(plan_of(source, 2), tmp_path / name, resume=True)
        assert contents(tmp_path / name) == contents(tmp_path / "fresh")


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_torn_last_line_of_the_journal_is_passed_over(cut: int, stopped: Run) -> None:
    journal = stopped.out / JOURNAL
    journal.write_bytes(journal.read_bytes()[:-cut])
    resumed(stopped)


@pytest.mark.parametrize("tail", [b"\0" * 100, b'{"file": "x"}\tnothing\n', b"\xff\xfe", b"\n\n{}"])
def test_garbage_at_the_end_of_the_journal_is_passed_over(tail: bytes, stopped: Run) -> None:
    with (stopped.out / JOURNAL).open("ab") as journal:
        journal.write(tail)
    resumed(stopped)


def test_a_flipped_bit_in_the_journal_only_costs_work(stopped: Run) -> None:
    journal = stopped.out / JOURNAL
    data = bytearray(journal.read_bytes())
    data[len(data) // 2] ^= 1
    journal.write_bytes(data)
    resumed(stopped)


def test_what_a_resumed_run_finished_counts_when_it_is_resumed_again(stopped: Run) -> None:
    journal = stopped.out / JOURNAL
    before = journal.read_bytes().count(b"\n") - 2  # without the first line and the torn one
    journal.write_bytes(journal.read_bytes()[:-5])
    with stopping_after(3), pytest.raises(Stopped):
        resumed(stopped)
    with OutputFolder(stopped.out, fingerprint=fingerprint(stopped), resume=True) as output:
        assert len(output.finished) >= before + 3


def fingerprint(run: Run) -> str:
    line = (run.out / JOURNAL).read_bytes().split(b"\n", 1)[0]
    found: str = json.loads(line.partition(b"\t")[0])["fingerprint"]
    return found


@pytest.mark.parametrize("what", ["gone", "truncated", "longer", "another header", "a folder"])
def test_a_finished_shard_that_is_not_as_it_was_noted_is_written_again(
    what: str, stopped: Run
) -> None:
    shard = next(path for path in stopped.out.iterdir() if path.suffix == ".safetensors")
    data = shard.read_bytes()
    shard.unlink()
    if what == "truncated":
        shard.write_bytes(data[:-1])
    elif what == "longer":
        shard.write_bytes(data + b"!")
    elif what == "another header":
        shard.write_bytes(data.replace(b"pt", b"tp", 1))
    elif what == "a folder":
        shard.mkdir()
        with pytest.raises(AiterPrepError, match="cannot write"):
            resumed(stopped)
        shard.rmdir()
    resumed(stopped)


@pytest.mark.parametrize("change", ["a tensor more", "a layer less", "another order"])
def test_a_run_over_another_source_is_not_gone_on_with(change: str, stopped: Run) -> None:
    tensors = tiny.read_folder(stopped.source)
    if change == "a tensor more":
        tensors["model.layers.0.self_attn.q_proj.weight"] = tiny.Tensor("U8", (4,), b"abcd")
    elif change == "a layer less":
        tensors = {name: tensor for name, tensor in tensors.items() if ".layers.3." not in name}
        config = json.loads((stopped.source / "config.json").read_bytes())
        text = json.dumps({**config, "num_hidden_layers": 3})
        (stopped.source / "config.json").write_text(text, "utf-8")
    else:
        tensors = dict(reversed(tensors.items()))
    tiny.write_shard(stopped.source / tiny.SINGLE, tensors)
    with pytest.raises(OutputNotEmpty, match="was begun from another source or with other"):
        resumed(stopped)
    assert is_unfinished(stopped.out)


def test_a_run_over_a_source_with_other_values_is_not_gone_on_with(stopped: Run) -> None:
    """The same names and sizes, as of a newer revision: half of each would be sealed."""
    shutil.rmtree(stopped.source)
    tiny.write(stopped.source, kind="mxfp8", layers=4, seed=1)
    (stopped.source / "tokenizer.json").write_text("{}", "utf-8")
    plan = plan_of(stopped.source, 2, max_shard_bytes=20_000)
    with pytest.raises(OutputNotEmpty):
        execute(plan, stopped.out, resume=True)


@pytest.mark.parametrize(
    "options",
    [{"tp": 1}, {"gfx": "gfx942"}, {"max_shard_bytes": 10_000}, {"ranks": [0]}, {"ep": 2, "tp": 1}],
)
def test_a_run_with_other_options_is_not_gone_on_with(
    options: dict[str, Any], stopped: Run
) -> None:
    plan = plan_of(stopped.source, **{"tp": 2, "max_shard_bytes": 20_000, **options})
    before = {name for name in names(stopped.out) if name.endswith(".safetensors")}
    with pytest.raises(OutputNotEmpty, match="was begun from another source") as caught:
        execute(plan, stopped.out, resume=True)
    assert "--overwrite" in caught.value.hint
    named = {"ranks": "ranks [0, 1] and [0]", "max_shard_bytes": "max_shard_bytes 20000 and 10000"}
    key = next(iter(options))
    wanted = named.get(key, f"{key} {2 if key == 'tp' else 1 if key == 'ep' else 'gfx950'} and ")
    assert wanted in caught.value.message
    assert caught.value.message.endswith(" differ")
    assert {name for name in names(stopped.out) if name.endswith(".safetensors")} == before
    resumed(stopped)


@pytest.mark.parametrize("options", [{"as_common": ["x.*"]}, {"trust_tensors": True}])
def test_a_run_whose_manifest_would_differ_is_not_gone_on_with(
    options: dict[str, Any], stopped: Run
) -> None:
    """Harmless for the bytes of shards; but the manifest would say what the first run did not."""
    plan = plan_of(stopped.source, 2, max_shard_bytes=20_000, **options)
    with pytest.raises(OutputNotEmpty):
        execute(plan, stopped.out, resume=True)


@pytest.mark.parametrize(
    "text", [b"", b"garbage", b'{"fingerprint":"f"}', b'{"fingerprint":"f"}\t']
)
@pytest.mark.parametrize("options", [{"resume": True}, {"overwrite": True}])
def test_a_run_that_was_killed_in_its_first_line_is_begun_anew(
    options: dict[str, Any], text: bytes, tmp_path: Path
) -> None:
    (tmp_path / JOURNAL).write_bytes(text)
    with OutputFolder(tmp_path, fingerprint="f", **options) as output:
        assert is_unfinished(tmp_path)
        assert output.finished == {}
        assert names(tmp_path) == {JOURNAL, LOCK}


# --- two at once --------------------------------------------------------------------------------


def test_a_folder_that_another_process_writes_is_refused(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source")
    out = tmp_path / "out"
    out.mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", HELD, str(out / LOCK)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder:
        assert holder.stdout.readline() == "held\n"
        for resume, overwrite in ((False, False), (True, False), (False, True)):
            with pytest.raises(OutputNotEmpty, match="another process is writing") as caught:
                execute(plan_of(source), out, resume=resume, overwrite=overwrite)
            assert caught.value.hint == "wait for it to end"
        holder.kill()
        holder.wait()
    execute(plan_of(source), out)  # the lock fell with its process
    assert problems_of(out, source) == ()


def test_two_runs_of_one_process_do_not_mix(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source")
    refused: list[str] = []

    def again(_progress: Progress) -> None:
        if not refused:
            with pytest.raises(OutputNotEmpty) as caught:
                execute(plan_of(source, 2), tmp_path / "out", resume=True)
            refused.append(caught.value.message)

    execute(plan_of(source, 2), tmp_path / "out", progress=again)
    assert "another process is writing" in refused[0]
    assert problems_of(tmp_path / "out", source) == ()


def test_a_folder_is_free_again_when_its_run_failed(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(Stopped), OutputFolder(tmp_path / "out", fingerprint="f", resume=True):
            raise Stopped


def test_no_descriptor_is_left_behind(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source", spread="layers", layers=3)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(3):
        prepare(source, tmp_path / f"out-{number}", 2, workers=3, max_shard_bytes=10_000)
        with pytest.raises(OutputNotEmpty):
            prepare(source, tmp_path / f"out-{number}", 2)
        restore(tmp_path / f"out-{number}", tmp_path / f"back-{number}")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# --- the disk -----------------------------------------------------------------------------------


def failing(code: int) -> Callable[..., int]:
    def fail(*_arguments: object) -> int:
        raise OSError(code, os.strerror(code))

    return fail


def test_room_is_made_sure_of_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny.write(tmp_path / "source")
    plan = plan_of(source, 2)
    real = shutil.disk_usage

    def full(path: Path) -> Any:
        return real(path)._replace(free=plan.total_bytes - 1)

    monkeypatch.setattr(shutil, "disk_usage", full)
    with pytest.raises(AiterPrepError) as caught:
        execute(plan, tmp_path / "out")
    assert type(caught.value) is AiterPrepError
    needs = f"needs {plan.total_bytes} bytes, the disk has {plan.total_bytes - 1}"
    assert needs in caught.value.message
    assert "free some space" in caught.value.hint
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    execute(plan, tmp_path / "out", resume=True)
    assert problems_of(tmp_path / "out", source) == ()


def broken_off(out: Path, act: Callable[[OutputFolder], object], **options: Any) -> None:
    """Let something happen in a run that fails then."""

    def run() -> None:
        with OutputFolder(out, fingerprint="f", **options) as output:
            act(output)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        run()


def begin_a_shard(output: OutputFolder) -> None:
    shard_written(output, layout("model-rank-0-part-0.safetensors")).sync()
    output.note_files(["LICENSE"])
    output.write_file("LICENSE", b"free")


def test_a_run_that_finished_nothing_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "held").mkdir()
    for out in (tmp_path / "new" / "deep" / "out", tmp_path / "held"):
        broken_off(out, begin_a_shard)
    assert names(tmp_path) == {"held"}  # its own folders are gone, the user's is there
    assert names(tmp_path / "held") == set()


def test_a_run_that_finished_a_shard_keeps_it(tmp_path: Path) -> None:
    shard = layout("model-rank-0-part-0.safetensors")

    def finish_one(output: OutputFolder) -> None:
        output.finish(shard_written(output, shard), {"x": Written("d")})

    broken_off(tmp_path / "out", finish_one)
    assert names(tmp_path / "out") == {JOURNAL, LOCK, shard.file}
    broken_off(tmp_path / "out", lambda output: output.finished[shard.file], resume=True)
    assert names(tmp_path / "out") == {JOURNAL, LOCK, shard.file}


def test_a_run_that_finished_nothing_leaves_what_lies_beside_its_files(tmp_path: Path) -> None:
    thesis = tmp_path / "out" / "thesis.tex"
    broken_off(tmp_path / "out", lambda _output: thesis.write_text("mine", "utf-8"))
    assert names(tmp_path / "out") == {"thesis.tex"}


def test_a_replacement_that_finished_nothing_leaves_the_old_folder_alone(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source")
    prepare(source, tmp_path / "out", 2)
    before = contents(tmp_path / "out")
    broken_off(tmp_path / "out", begin_a_shard, overwrite=True)
    assert contents(tmp_path / "out") == before
    assert names(tmp_path) == {"source", "out"}


def test_what_was_put_into_a_folder_while_it_was_replaced_is_kept(tmp_path: Path) -> None:
    out, thesis = tmp_path / "out", tmp_path / "out" / "thesis.tex"
    source = tiny.write(tmp_path / "source")
    prepare(source, out, 2)
    before = contents(out)

    def write(_progress: Progress) -> None:
        thesis.write_text("mine", "utf-8")

    plan = plan_of(source, 1)
    with pytest.raises(OutputNotEmpty, match=r"holds `thesis\.tex`"):
        execute(plan, out, overwrite=True, progress=write)
    thesis.unlink()
    assert contents(out) == before
    execute(plan, out, overwrite=True, resume=True)
    assert problems_of(out, source) == ()
    assert names(tmp_path) == {"source", "out"}


# --- what somebody may have put there -------------------------------------------------------------


@pytest.mark.parametrize("kind", ["link", "hard link", "dangling link"])
def test_nothing_is_written_through_a_temporary_name(kind: str, tmp_path: Path) -> None:
    shard, victim = layout(), tmp_path / "victim"
    if kind != "dangling link":
        victim.write_bytes(b"mine")
    with OutputFolder(tmp_path / "out", fingerprint="f") as output:
        for name in (shard.file, "config.json", MANIFEST):
            planted = tmp_path / "out" / f".{name}.partial"
            if kind == "hard link":
                planted.hardlink_to(victim)
            else:
                planted.symlink_to(victim)
        output.finish(shard_written(output, shard), {"x": Written("d")})
        output.write_file("config.json", b"{}")
        output.seal(b"{}\n", [shard.file, "config.json"])
    assert (tmp_path / "out" / shard.file).read_bytes() == shard.header + b"\7" * 100
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert not victim.exists() or victim.read_bytes() == b"mine"


def test_two_names_that_the_filesystem_takes_for_one_are_not_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny.write(tmp_path / "source")
    for name in ("README", "readme"):
        (source / name).write_text(name, "utf-8")
    prepare(source, tmp_path / "sensitive", 2)
    assert names(tmp_path / "sensitive") >= {"README", "readme"}
    real = Path.rename

    def insensitive(self: Path, target: Path) -> Path:
        return real(self, target.with_name(target.name.replace("readme", "README")))

    monkeypatch.setattr(Path, "rename", insensitive)
    with pytest.raises(AiterPrepError, match="may take two names for one"):
        prepare(source, tmp_path / "out", 2)
    assert not (tmp_path / "out" / MANIFEST).exists()


def test_only_what_is_left_needs_room(stopped: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(stopped.source, 2, max_shard_bytes=20_000)
    held = sum(p.stat().st_size for p in stopped.out.glob("*.safetensors"))
    real = shutil.disk_usage
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: real(path)._replace(free=plan.total_bytes - held)
    )
    resumed(stopped)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("function", ["pwrite", "fsync", "ftruncate", "write"])
def test_a_disk_that_fails_ends_the_run_and_resume_ends_in_the_same_bytes(
    function: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny.write(tmp_path / "source", kind="mxfp8", layers=2)
    prepare(source, tmp_path / "fresh", 2)
    real, calls, lock = getattr(os, function), [0], threading.Lock()

    def sometimes(descriptor: int, *arguments: Any) -> Any:
        with lock:
            calls[0] += stat.S_ISREG(os.fstat(descriptor).st_mode)  # folders may fail to sync
            if calls[0] == 4:
                raise OSError(code, os.strerror(code))
        return real(descriptor, *arguments)

    monkeypatch.setattr(os, function, sometimes)
    options = {"max_shard_bytes": 20_000} if function in {"ftruncate", "write"} else {}
    if options:
        shutil.rmtree(tmp_path / "fresh")
        calls[0] = 10**6
        prepare(source, tmp_path / "fresh", 2, **options)
        calls[0] = 0
    with pytest.raises(AiterPrepError) as caught:
        prepare(source, tmp_path / "out", 2, **options)
    monkeypatch.undo()
    assert type(caught.value) is AiterPrepError
    assert os.strerror(code) in caught.value.message
    is_begun = any((tmp_path / "out").glob("model-*"))
    assert ("--resume" in caught.value.hint) == is_begun == (tmp_path / "out").exists()
    assert not (tmp_path / "out" / MANIFEST).exists()
    execute(plan_of(source, 2, **options), tmp_path / "out", resume=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


@pytest.mark.parametrize(
    ("function", "skipped"),
    [
        ("pwrite", 1),  # the header of the first shard is written
        ("fsync", 3),  # those of the journal's first line and of the folders
        ("pwrite", 0),
        ("ftruncate", 0),
    ],
)
def test_a_disk_that_fails_gets_its_space_back_and_no_descriptor_stays_open(
    function: str, skipped: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny.write(tmp_path / "source")
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    real, calls = getattr(os, function), itertools.count()

    def fail(*arguments: Any) -> Any:
        if next(calls) >= skipped:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(AiterPrepError, match="No space left"):
        prepare(source, tmp_path / "out", 2)
    monkeypatch.undo()
    gc.collect()
    assert not (tmp_path / "out").exists()
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


@pytest.mark.parametrize(("code", "is_fatal"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_folder_may_be_of_a_kind_that_cannot_be_synced_but_not_fail_to_be(
    code: int, is_fatal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, real = tiny.write(tmp_path / "source"), os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    if is_fatal:
        with pytest.raises(AiterPrepError, match="Input/output error"):
            prepare(source, tmp_path / "out", 2)
        assert not (tmp_path / "out" / MANIFEST).exists()
    else:
        prepare(source, tmp_path / "out", 2)
        assert problems_of(tmp_path / "out", source) == ()


def test_a_source_that_cannot_be_read_ends_the_run_as_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny.write(tmp_path / "source")
    plan = plan_of(source, 2)
    monkeypatch.setattr(os, "preadv", failing(errno.EIO))
    with pytest.raises(BadSource, match=r"cannot read `model\.safetensors`: Input/output error"):
        execute(plan, tmp_path / "out")
    assert not (tmp_path / "out" / MANIFEST).exists()


# --- a source that changes ----------------------------------------------------------------------


def change_during_the_run(source: Path, change: Callable[[Path], None]) -> Callable[..., None]:
    done: list[bool] = []

    def progress(_progress: Progress) -> None:
        if not done:
            done.append(True)
            change(source / tiny.SINGLE)

    return progress


@pytest.mark.parametrize("what", ["longer", "touched", "replaced"])
def test_a_source_that_changes_during_the_run_is_not_sealed(what: str, tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source")

    def change(shard: Path) -> None:
        if what == "longer":
            with shard.open("ab") as file:
                file.write(b"!")
        elif what == "touched":
            os.utime(shard, ns=(0, shard.stat().st_mtime_ns + 1))
        else:
            data = shard.read_bytes()
            shard.unlink()
            shard.write_bytes(data)

    progress = change_during_the_run(source, change)
    with pytest.raises(BadSource, match=r"`model\.safetensors` changed while it was read"):
        execute(plan_of(source, 2), tmp_path / "out", progress=progress)
    assert not (tmp_path / "out" / MANIFEST).exists()


def test_a_source_that_goes_away_during_the_run_is_bad(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source")
    progress = change_during_the_run(source, Path.unlink)
    with pytest.raises(BadSource):
        execute(plan_of(source, 2), tmp_path / "out", progress=progress)


def test_a_small_file_that_goes_away_is_the_sources_fault(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source")
    (source / "tokenizer.json").write_text("{}", "utf-8")
    plan = plan_of(source, 2)
    (source / "tokenizer.json").unlink()
    with pytest.raises(BadSource):
        execute(plan, tmp_path / "out")


def test_a_truncated_source_is_noticed_when_its_bytes_are_missing(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source")
    plan = plan_of(source, 2)
    data = (source / tiny.SINGLE).read_bytes()
    (source / tiny.SINGLE).write_bytes(data[: len(data) // 2])
    with pytest.raises(BadSource, match="but its header promises more"):
        execute(plan, tmp_path / "out")


@pytest.mark.parametrize("workers", [0, -1, 257])
def test_a_number_of_workers_out_of_range_is_refused(workers: int, tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source")
    with pytest.raises(InvalidUsage, match=f"--workers {workers} is out of range"):
        execute(plan_of(source), tmp_path / "out", workers=workers)
    assert not (tmp_path / "out").exists()


def test_a_value_without_a_place_ends_the_run_without_a_manifest(tmp_path: Path) -> None:
    model = tiny.SAMPLES["fp8_block_f32"][0]
    tensors = tiny.tensors_of(model)
    name = model.name(1, "down_proj", "weight")
    tensors[name] = tiny.Tensor("F8_E4M3", (256, 256), b"\x30" * 65535 + b"\x7f")
    source = tiny.write_tensors(tmp_path / "source", model, tensors)
    with pytest.raises(AiterPrepError, match=rf"`{name}` holds a NaN \(byte 0x7F\)"):
        prepare(source, tmp_path / "out", gfx="gfx942")
    assert not (tmp_path / "out" / MANIFEST).exists()
    prepare(source, tmp_path / "gfx950", gfx="gfx950")
    assert problems_of(tmp_path / "gfx950", source) == ()
