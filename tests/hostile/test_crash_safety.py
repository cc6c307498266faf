"""The quick form of `scripts/crash-test`: kills, failing disks, two runs at once, signals."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import crashes
from aiter_prep.errors import AiterPrepError, BadSource, DataMismatch, OutputNotEmpty
from aiter_prep.restoration import restore
from aiter_prep.storage import swap
from aiter_prep.verification import verify
from crashes import Scene, check_kill, check_kill_of_overwrite, points, some
from faults import Fault, Injector, delay, fail, in_child, kill_after, short, then
from prepared import JOURNAL, LOCK, MANIFEST, contents, stamps

FAULTS = Path(__file__).resolve().parents[1] / "faults.py"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("scene"))


@pytest.fixture
def scene(made: Scene) -> Iterator[Scene]:
    """A source that is put back as it was."""
    made.clear()
    yield made
    made.exchange = True
    assert stamps(made.source) == made.before, "the source was touched"


# --- kills --------------------------------------------------------------------------------------


def test_a_kill_leaves_whole_files_and_resume_ends_in_the_same_bytes(scene: Scene) -> None:
    calls = scene.calls(scene.convert)
    kills = [check_kill(scene, fault) for fault in some(points(calls, 40), 12)]
    assert sum(kills) > 8


@pytest.mark.parametrize("exchange", [True, False])
def test_a_kill_while_a_folder_is_replaced_leaves_one_of_the_two(
    exchange: bool, scene: Scene
) -> None:
    scene.exchange = exchange
    scene.convert(tp=1)
    calls = scene.calls(lambda: scene.convert(overwrite=True))
    every = list(points(calls, 1))
    at_the_end = every[-26:]  # the manifest, the swap, the cleaning up
    for fault in [*every[::100], *at_the_end[::3]]:
        check_kill_of_overwrite(scene, fault)


def test_a_journal_that_was_cut_anywhere_is_mended(scene: Scene) -> None:
    in_child(lambda: crashes._under(Fault("rename", 6, kill_after), scene.convert))
    journal = (scene.out / JOURNAL).read_bytes()
    assert journal.count(b"\n") > 3
    first = journal.index(b"\n") + 1
    for size in (0, 1, first - 1):
        (scene.out / JOURNAL).write_bytes(journal[:size])
        with pytest.raises(OutputNotEmpty):  # nothing says whose these shards are
            scene.convert(resume=True)
    for size in (first, len(journal) // 2, len(journal) - 1):
        (scene.out / JOURNAL).write_bytes(journal[:size])
        scene.convert(resume=True)
        crashes._check_whole(scene)
        (scene.out / MANIFEST).unlink()


def test_other_weights_under_the_same_header_are_not_mixed_in_by_resume(scene: Scene) -> None:
    in_child(lambda: crashes._under(Fault("rename", 6, kill_after), scene.convert))
    path = scene.source / "model.safetensors"
    before, status = path.read_bytes(), path.stat()
    try:
        path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        with pytest.raises(OutputNotEmpty, match="begun from another source"):
            scene.convert(resume=True)
    finally:
        path.write_bytes(before)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    scene.convert(resume=True)
    crashes._check_whole(scene)


# --- a disk that fails --------------------------------------------------------------------------

OUTPUT_FAULTS: list[tuple[str, int, int]] = [
    ("pwrite", 1, errno.ENOSPC),
    ("pwrite", 7, errno.EIO),
    ("ftruncate", 2, errno.ENOSPC),
    ("write", 1, errno.ENOSPC),
    ("write", 3, errno.EIO),
    ("fsync", 1, errno.EIO),
    ("rename", 1, errno.EIO),
    ("rename", 27, errno.ENOSPC),
    ("rename", 28, errno.ENOSPC),
    ("mkdir", 1, errno.ENOSPC),
]


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(("call", "at", "number"), OUTPUT_FAULTS)
def test_a_disk_that_fails_is_said_and_gives_its_space_back(
    call: str, at: int, number: int, scene: Scene
) -> None:
    before = open_descriptors()
    with Injector([Fault(call, at, fail(number))]), pytest.raises(AiterPrepError) as caught:
        scene.convert()
    assert type(caught.value) is AiterPrepError
    assert caught.value.exit_code == 1
    assert os.strerror(number) in caught.value.message
    assert ("--resume" in caught.value.hint) == any(scene.out.glob("model-*"))
    assert open_descriptors() == before
    check_no_partial_file(scene)
    scene.convert(resume=True)
    crashes._check_whole(scene)


def check_no_partial_file(scene: Scene) -> None:
    """Check that only finished files take room."""
    found = contents(scene.out) if scene.out.exists() else {}
    assert MANIFEST not in found
    assert {n: d for n, d in found.items() if n not in (JOURNAL, LOCK)}.items() <= (
        scene.expected.items()
    )


def test_a_file_that_cannot_be_brought_to_the_disk_is_not_kept(scene: Scene) -> None:
    def act(_call: str, function: Callable[..., object], arguments: tuple[int]) -> object:
        if stat.S_ISREG(os.fstat(arguments[0]).st_mode) and injector.counts["fsync"] > 9:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return function(*arguments)

    injector = Injector([Fault("fsync", 0, act)])
    with injector, pytest.raises(AiterPrepError, match="Input/output error"):
        scene.convert()
    check_no_partial_file(scene)
    scene.convert(resume=True)
    crashes._check_whole(scene)


def test_a_disk_that_is_full_from_some_point_on_is_survived(scene: Scene) -> None:
    def full(_call: str, function: Callable[..., object], arguments: tuple[object, ...]) -> object:
        if len(injector.calls) > 150:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return function(*arguments)

    injector = Injector([Fault(call, 0, full) for call in ("pwrite", "write", "mkdir")])
    with injector, pytest.raises(AiterPrepError, match="No space left"):
        scene.convert()
    check_no_partial_file(scene)
    scene.convert(resume=True)
    crashes._check_whole(scene)


def test_a_source_that_cannot_be_read_is_the_sources_fault(scene: Scene) -> None:
    with Injector([Fault("preadv", 4, fail(errno.EIO))]), pytest.raises(BadSource, match="Input/"):
        scene.convert()
    check_no_partial_file(scene)
    scene.convert(resume=True)
    crashes._check_whole(scene)


@pytest.mark.parametrize("calls", [("preadv",), ("pwrite",), ("write",), ("preadv", "pwrite")])
def test_short_reads_and_writes_are_gone_on_with(calls: tuple[str, ...], scene: Scene) -> None:
    with Injector([Fault(call, 0, short) for call in calls]):
        scene.convert()
    crashes._check_whole(scene)


@pytest.mark.parametrize(("call", "at"), [("pwrite", 3), ("fsync", 1), ("mkdir", 1)])
def test_restore_leaves_nothing_on_a_disk_that_fails(call: str, at: int, scene: Scene) -> None:
    scene.convert()
    before = open_descriptors()
    with Injector([Fault(call, at, fail(errno.ENOSPC))]), pytest.raises(AiterPrepError) as caught:
        restore(scene.out, scene.out.parent / "back")
    assert caught.value.exit_code == 1
    assert open_descriptors() == before
    assert [path.name for path in scene.out.parent.iterdir()] == [scene.out.name]


def test_a_restore_that_is_killed_leaves_no_checkpoint(scene: Scene) -> None:
    scene.convert()
    back = scene.out.parent / "back"

    def back_again() -> None:
        restore(scene.out, back)

    calls = scene.calls(back_again)
    shutil.rmtree(back)
    for fault in some(points(calls, 4), 8):
        in_child(partial(crashes._under, fault, back_again))
        if not back.exists():
            restore(scene.out, back)
        assert set(contents(back)) == {"config.json", "model.safetensors", "tokenizer.json"}
        shutil.rmtree(back)
    assert [path.name for path in scene.out.parent.iterdir()] == [scene.out.name]


# --- a small disk -------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A disk of any size; only root may make one."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(options: str) -> Path:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "aiter-prep-test", place],  # noqa: S607
            capture_output=True,
            check=False,
        )
        if done.returncode:
            pytest.skip("no file system may be mounted here")
        return place

    yield mount
    subprocess.run(["umount", place], capture_output=True, check=False)  # noqa: S607


def test_a_disk_that_is_too_small_is_refused_before_a_byte_is_written(
    scene: Scene, small_disk: Callable[[str], Path]
) -> None:
    place = small_disk("size=100k")
    done = run_cli(scene, place / "out")
    assert done.returncode == 1
    assert "needs" in done.stderr
    assert "free some space" in done.stderr
    assert not list(place.rglob("*.safetensors"))


def test_a_disk_that_fills_up_on_the_way_is_survived(
    scene: Scene, small_disk: Callable[[str], Path], tmp_path: Path
) -> None:
    place = small_disk("size=700k")
    (place / "other").write_bytes(bytes(400_000))
    code = in_child(lambda: _convert_without_looking(scene, place / "out"))
    assert code == 1
    held = list((place / "out").iterdir()) if (place / "out").exists() else []
    left = sum(path.stat().st_blocks * 512 for path in held)
    final = [path for path in held if not path.name.startswith(".")]
    assert left <= sum(path.stat().st_size + 4096 for path in final) + 16_384
    (place / "other").unlink()
    small_disk("remount,size=4m")
    done = run_cli(scene, place / "out", "--resume")
    assert done.returncode == 0, done.stderr
    assert contents(place / "out") == scene.expected
    assert not list(tmp_path.glob("*.safetensors"))


def _convert_without_looking(scene: Scene, out: Path) -> None:
    from unittest.mock import patch

    from aiter_prep.execution import execute
    from aiter_prep.storage.output import OutputFolder
    from prepared import plan_of

    plan = plan_of(scene.source, 2, max_shard_bytes=crashes.SHARD_BYTES)
    with patch.object(OutputFolder, "require_space"):
        execute(plan, out, workers=crashes.WORKERS)


# --- signals ------------------------------------------------------------------------------------


def command(scene: Scene, out: Path, *more: str) -> list[str]:
    size = str(crashes.SHARD_BYTES)
    options = ["--tp", "2", "--max-shard-size", size, "--workers", str(crashes.WORKERS), *more]
    return ["convert", str(scene.source), str(out), *options]


def run_cli(scene: Scene, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "aiter_prep", *command(scene, out, *more)]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.slow  # a limit of time means nothing on a shared machine
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_the_program_within_two_seconds_and_resume_goes_on(
    name: str, scene: Scene
) -> None:
    out = scene.out
    out.parent.mkdir(parents=True)
    argv = [sys.executable, str(FAULTS), "pwrite", "0", "slow", "--", *command(scene, out)]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    while not out.exists() or not list(out.glob("model-*")):
        assert process.poll() is None
        time.sleep(0.01)
    begin = time.monotonic()
    process.send_signal(signal.Signals[name])
    said = process.communicate(timeout=30)[1]
    assert process.returncode == 130, said
    assert time.monotonic() - begin < 2 * slowness()
    assert "--resume" in said
    check_no_partial_file(scene)
    done = run_cli(scene, out, "--resume")
    assert done.returncode == 0, done.stderr
    crashes._check_whole(scene)


def slowness() -> float:
    """How many programs share a core now: a limit of time means nothing without it."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


# --- a source that changes ----------------------------------------------------------------------


def touch(scene: Scene) -> None:
    os.utime(scene.source / "model.safetensors")


def rewrite(scene: Scene) -> None:
    path = scene.source / "config.json"
    path.write_bytes(path.read_bytes().replace(b"TinyMoe", b"TinyMod"))


def replace(scene: Scene) -> None:
    """Put other bytes in its place, of the same size and time, as `rsync --times` would."""
    path = scene.source / "model.safetensors"
    other = bytearray(path.read_bytes())
    other[-1] ^= 1
    status = path.stat()
    (scene.folder / "other").write_bytes(other)
    os.utime(scene.folder / "other", ns=(status.st_atime_ns, status.st_mtime_ns))
    (scene.folder / "other").rename(path)


def add_a_config(scene: Scene) -> None:
    """It says what the tensors are quantised with, and was not there when that was decided."""
    (scene.source / "hf_quant_config.json").write_text("{}", "utf-8")


def remove(scene: Scene) -> None:
    (scene.source / "model.safetensors").rename(scene.folder / "away")


@pytest.mark.parametrize("change", [touch, rewrite, replace, add_a_config, remove])
def test_a_source_that_changes_while_it_is_read_is_not_sealed(
    change: Callable[[Scene], None], tmp_path: Path
) -> None:
    own = Scene(tmp_path)
    with Injector([Fault("preadv", 5, then(lambda: change(own)))]), pytest.raises(BadSource):
        own.convert()
    assert not (own.out / MANIFEST).exists()
    with pytest.raises(DataMismatch, match="unfinished"):
        verify(own.out)


# --- two at once --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}])
def test_two_runs_into_one_folder_never_mix(options: dict[str, bool], scene: Scene) -> None:
    first = os.fork()
    if not first:
        with Injector([Fault("pwrite", 0, delay(0.02))]):
            scene.convert()
        os._exit(0)
    while not (scene.out / JOURNAL).exists():
        time.sleep(0.005)
    with pytest.raises(OutputNotEmpty):
        scene.convert(**options)
    with pytest.raises(DataMismatch, match="is unfinished"):
        verify(scene.out)
    assert os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) == 0
    crashes._check_whole(scene)


def test_two_runs_that_begin_together_leave_one_whole_folder(scene: Scene) -> None:
    children = []
    for _ in range(4):
        child = os.fork()
        if not child:
            code = 1
            try:
                scene.convert()
                code = 0
            except OutputNotEmpty:
                code = 12
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes.count(0) == 1, codes
    assert codes.count(12) == 3, codes
    crashes._check_whole(scene)


def test_a_lock_of_a_dead_process_does_not_block(scene: Scene) -> None:
    scene.out.mkdir(parents=True)
    (scene.out / LOCK).write_bytes(b"")
    scene.convert()
    crashes._check_whole(scene)


def test_a_lock_file_that_was_taken_away_meanwhile_is_no_lock(scene: Scene) -> None:
    """A second run holds the file that the first one has removed; a third makes it anew."""
    real = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        real(descriptor, operation)
        (scene.out / LOCK).unlink()
        (scene.out / LOCK).write_bytes(b"")

    scene.out.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(fcntl, "flock", flock)
        with pytest.raises(OutputNotEmpty, match="another process"):
            scene.convert()


def test_a_swap_that_was_killed_half_way_is_finished_by_the_next_run(scene: Scene) -> None:
    scene.convert(tp=1)
    scene.out.rename(scene.folder / "old")
    scene.convert()
    scene.out.rename(swap.work_folder(scene.out))
    (scene.folder / "old").rename(swap._old_folder(scene.out))
    swap.recover(scene.out)
    crashes._check_whole(scene)
    scene.out.rename(swap._old_folder(scene.out))  # and with the old one alone it comes back
    swap.recover(scene.out)
    crashes._check_whole(scene)
