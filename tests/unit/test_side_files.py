"""Files that a user names never damage what a run reads or writes, and pipes stay pipes."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aiter_prep.errors import InvalidUsage
from aiter_prep.storage.side_files import check_side_file, write_side_file
from command_line import CommandLine
from prepared import small

MANIFEST = "aiter_prep.json"


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A source, and what was prepared from it."""
    source, prepared = small(tmp_path)[:2]
    return source, prepared


def shots(*folders: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for folder in folders for path in folder.iterdir()}


# what each command reads and writes, and the flags that name a file
CALLS: dict[str, Callable[[Path, Path], list[str]]] = {
    "convert": lambda source, _: ["convert", str(source), "new", "--tp", "1", "--log-file"],
    "dry run": lambda s, _: ["convert", str(s), "new", "--tp", "1", "--dry-run", "--log-file"],
    "verify": lambda source, out: ["verify", str(out), "--source", str(source), "--log-file"],
    "sums": lambda source, out: ["verify", str(out), "--source", str(source), "--sha256sums"],
    "restore": lambda _, out: ["restore", str(out), "new", "--log-file"],
    "page": lambda _, out: ["inspect", str(out), "--html"],
    "plot": lambda _, out: ["inspect", str(out), "--plot"],
}


def first_shard(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def read_by(name: str, source: Path, out: Path) -> Iterator[Path]:
    if name not in ("restore", "page", "plot"):
        yield source
    if name not in ("convert", "dry run"):
        yield out


@pytest.mark.parametrize("name", CALLS)
def test_no_file_is_written_into_a_folder_that_is_read(
    run: CommandLine, folders: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    before = shots(*folders)
    call = CALLS[name](*folders)
    for number, folder in enumerate(read_by(name, *folders)):
        (tmp_path / f"link-{number}").symlink_to(first_shard(folder))
        (tmp_path / f"dangling-{number}.svg").symlink_to(folder / "new")
        os.link(first_shard(folder), tmp_path / f"other-name-{number}")
        for place in (
            first_shard(folder),
            folder / "a.html",
            folder / "a.svg",
            Path(os.path.relpath(folder)) / "b.html",
            tmp_path / f"link-{number}",
            tmp_path / f"dangling-{number}.svg",
            tmp_path / f"other-name-{number}",
        ):
            said = run(*call, place)
            assert said.code == 2, (place, said)
            assert "put it beside the folder" in said.err
    assert shots(*folders) == before
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["convert", "restore"])
@pytest.mark.parametrize(
    "place", ["new", "new/log", ".new.aiter_prep.partial/log", ".new.aiter_prep.source.partial"]
)
def test_no_log_lies_in_the_folder_that_is_written_or_in_its_neighbours(
    run: CommandLine, folders: tuple[Path, Path], tmp_path: Path, name: str, place: str
) -> None:
    said = run(*CALLS[name](*folders), place)
    assert said.code == 2
    assert "lies in the folder that it is about" in said.err
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob(".new*"))


def test_no_log_lies_in_the_folder_that_is_named_after_the_source(
    run: CommandLine, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    source = folders[0]
    name = f"{source.name}-aiter-tp1-gfx950"
    (tmp_path / name).mkdir()
    assert run("convert", source, "--tp", "1", "--log-file", f"{name}/log").code == 2
    assert not list((tmp_path / name).iterdir())


def test_the_cache_of_the_hub_is_kept_from_a_log(
    run: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    blob = tmp_path / "hub" / "models--org--name" / "blobs" / "0123"
    blob.parent.mkdir(parents=True)
    blob.write_bytes(b"weights")
    assert run("convert", "org/name", "new", "--tp", "1", "--log-file", blob).code == 2
    assert blob.read_bytes() == b"weights"


@pytest.mark.parametrize("name", ["config.json", "log"])
def test_no_file_is_written_into_a_model_that_the_command_does_not_name(
    run: CommandLine, folders: tuple[Path, Path], name: str
) -> None:
    before = shots(*folders)
    assert run("verify", folders[1], "--log-file", folders[0] / name).code == 2
    said = run("layouts", "show", "tile_16x16", "--svg", folders[1] / name)
    assert said.code == 2
    assert "a checkpoint or prepared folder" in said.err
    assert shots(*folders) == before


def test_two_files_of_one_name_are_refused(
    run: CommandLine, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    said = run("verify", folders[1], "--sha256sums", "sums", "--log-file", tmp_path / "sums")
    assert said.code == 2
    assert "is named for two things" in said.err


def test_a_log_in_another_folder_that_only_begins_alike_is_taken(
    run: CommandLine, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    beside = tmp_path / f"{folders[1].name}-logs"
    beside.mkdir()
    assert run("verify", folders[1], "--log-file", beside / "log").code == 0
    assert (beside / "log").exists()


# --- what is written into in place --------------------------------------------------------------


def drained(pipe: Path, act: Callable[[], object]) -> bytes:
    """Return what comes out of a pipe while something is done."""
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
    reader.start()
    act()
    reader.join(20)
    return found[0]


@pytest.mark.parametrize(
    ("name", "said"),
    [("sums", MANIFEST), ("verify", "every byte"), ("page", "<html"), ("plot", "<svg")],
)
def test_a_pipe_is_written_into_and_stays_a_pipe(
    run: CommandLine, folders: tuple[Path, Path], tmp_path: Path, name: str, said: str
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    link = tmp_path / "link"
    link.symlink_to(pipe)
    for place in (pipe, link):
        text = drained(pipe, lambda place=place: run(*CALLS[name](*folders), place))  # type: ignore[misc]
        assert said in text.decode()
        assert stat.S_ISFIFO(pipe.stat().st_mode)
        assert link.is_symlink()


def test_a_drawing_goes_to_a_pipe_too(run: CommandLine, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    text = drained(tmp_path / "pipe", lambda: run("layouts", "show", "tile_16x16", "--svg", "pipe"))
    assert b"<svg" in text


def test_an_open_descriptor_is_written_at_its_own_place(tmp_path: Path) -> None:
    with (tmp_path / "said").open("wb", buffering=0) as file:
        file.write(b"before\n")
        (tmp_path / "link").symlink_to(f"/proc/self/fd/{file.fileno()}")
        for place in (Path(f"/dev/fd/{file.fileno()}"), tmp_path / "link"):
            check_side_file(place, [tmp_path / "elsewhere"])
            write_side_file(place, b"sums\n")
        file.write(b"after\n")
    assert (tmp_path / "said").read_bytes() == b"before\nsums\nsums\nafter\n"


def test_a_descriptor_of_a_file_in_the_folder_is_refused(folders: tuple[Path, Path]) -> None:
    with (folders[1] / MANIFEST).open("ab") as file, pytest.raises(InvalidUsage):
        check_side_file(Path(f"/dev/fd/{file.fileno()}"), [folders[1]])


def test_a_link_to_a_regular_file_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "sums").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "there" / "sums")
    (tmp_path / "new").symlink_to(tmp_path / "there" / "later")
    for name, real in {"link": "sums", "new": "later"}.items():
        check_side_file(tmp_path / name, [tmp_path / "folder"])
        write_side_file(tmp_path / name, b"new")
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / "there" / real).read_bytes() == b"new"


@pytest.mark.parametrize("name", ["verify", "sums", "page", "plot"])
def test_a_folder_in_the_place_of_a_file_is_refused(
    run: CommandLine, folders: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    (tmp_path / "place.svg").mkdir()
    assert run(*CALLS[name](*folders), "place.svg").code == 2


# --- what cannot be written any more ------------------------------------------------------------

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")


@needs_full
@pytest.mark.parametrize("more", [[], ["--json"], ["-q"]])
def test_a_full_log_is_told_once_and_does_not_change_the_exit_code(
    run: CommandLine, folders: tuple[Path, Path], tmp_path: Path, more: list[str]
) -> None:
    (tmp_path / "full").symlink_to(FULL)  # the node itself is never named
    for name in ("convert", "verify", "restore"):
        call = CALLS[name](*folders)
        call[2:3] = [f"new-{name}"] if name != "verify" else call[2:3]
        said = run(*call, "full", *more)
        assert said.code == 0
        assert said.err.count("cannot write the log `full` any more: No space left") == 1
    assert run("verify", "new-convert", "--source", folders[0]).code == 0
    assert run("restore", folders[1], "new-convert", "--log-file", "full").code == 12


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_file_with_the_name_of_weights_is_refused(name: str, tmp_path: Path) -> None:
    """They may lie in a folder that has lost its config, and is none of a model to us."""
    with pytest.raises(InvalidUsage, match="has the name of a file of weights"):
        check_side_file(tmp_path / name, [])


def test_a_file_with_another_name_is_refused(tmp_path: Path) -> None:
    """A log is written at the end of what is there, whatever else that is called."""
    (tmp_path / "config.json").write_text("{}", "utf-8")
    (tmp_path / "log").hardlink_to(tmp_path / "config.json")
    with pytest.raises(InvalidUsage, match="a file with other names"):
        check_side_file(tmp_path / "log", [])
    (tmp_path / "config.json").unlink()
    check_side_file(tmp_path / "log", [])
