"""A prepared folder keeps its files inside, and what may not be read is not called damaged."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from aiter_prep import restore, verify
from aiter_prep.cli import main
from aiter_prep.engines.plain import load
from aiter_prep.errors import AiterPrepError, DataMismatch
from aiter_prep.manifest import read_manifest
from aiter_prep.verification import Problem
from prepared import MANIFEST, small


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small(tmp_path)[1]


def moved_out(path: Path) -> None:
    """Replace a file by a link to where it lies now, outside its folder."""
    outside = path.parent.parent / f"outside-{path.name}"
    path.rename(outside)
    path.symlink_to(outside)


FILES = ["model-rank-0-part-0.safetensors", "model-common-part-0.safetensors", "tokenizer.json"]
READERS: dict[str, Callable[[Path], object]] = {
    "restore": lambda folder: restore(folder, folder.parent / "back"),
    "read_manifest": read_manifest,
}


@pytest.mark.parametrize("file", FILES)
def test_verify_names_a_file_that_is_a_link_out_of_the_folder(folder: Path, file: str) -> None:
    moved_out(folder / file)
    for quick in (False, True):
        assert verify(folder, quick=quick).problems == (
            Problem(file, None, None, "is a link that leads out of its folder"),
        )


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("file", [*FILES, MANIFEST])
def test_no_reader_follows_a_link_out_of_the_folder(folder: Path, file: str, reader: str) -> None:
    moved_out(folder / file)
    with pytest.raises(DataMismatch, match=f"`{file}` is a link that leads out") as caught:
        READERS[reader](folder)
    assert "cp --dereference" in caught.value.hint
    assert not (folder.parent / "back").exists()


@pytest.mark.torch
@pytest.mark.parametrize("file", FILES[:2])
def test_load_follows_no_link_out_of_the_folder(folder: Path, file: str) -> None:
    pytest.importorskip("torch")
    moved_out(folder / file)
    with pytest.raises(DataMismatch, match="is a link that leads out"):
        load(folder, 0)


def test_links_inside_and_from_a_snapshot_to_its_blobs_are_taken(
    folder: Path, tmp_path: Path
) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    blobs = tmp_path / "models--org--name" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", str(number)))
    assert verify(snapshot).is_clean
    assert restore(snapshot, tmp_path / "back").tensors


def test_a_linked_prepared_folder_is_taken(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert verify(tmp_path / "link").is_clean


# --- permissions --------------------------------------------------------------------------------


@pytest.fixture
def forbid(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Take the right to read a file away; tests may run as root, who has all rights."""

    def act(name: str) -> None:
        access, plain_open = os.access, os.open

        def no_access(path: object, *args: object, **more: object) -> bool:
            return not str(path).endswith(name) and access(path, *args, **more)  # type: ignore[arg-type]

        def no_open(path: object, *args: object, **more: object) -> int:
            if str(path).endswith(name):
                raise PermissionError(13, "Permission denied", str(path))
            return plain_open(path, *args, **more)  # type: ignore[arg-type]

        monkeypatch.setattr("os.access", no_access)
        monkeypatch.setattr("os.open", no_open)

    return act


@pytest.mark.parametrize("file", [*FILES, MANIFEST])
def test_a_file_that_may_not_be_read_is_no_damage(
    folder: Path, file: str, forbid: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    forbid(file)
    for call in (["verify", str(folder)], ["restore", str(folder), f"{folder}-back"]):
        assert main(call) == 1
        err = capsys.readouterr().err
        assert file in err
        assert "Permission denied" in err
        assert "mend its permissions" in err
    with pytest.raises(AiterPrepError) as caught:
        verify(folder)
    assert not isinstance(caught.value, DataMismatch)


def test_if_needed_tells_damage_from_another_conversion(
    folder: Path, forbid: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["convert", str(folder.parent / "source"), str(folder), "--tp", "2", "--if-needed"]
    shard = folder / FILES[0]
    whole = shard.read_bytes()
    for size in (len(whole) - 1, 3):
        shard.write_bytes(whole[:size])
        assert main(call) == 12
        err = capsys.readouterr().err
        assert "holds this conversion, but it is damaged: " in err
        assert "another conversion" not in err
        assert err.count(FILES[0]) == 1
    shard.write_bytes(whole)
    assert main([*call[:-2], "1", "--if-needed"]) == 12
    assert "holds another conversion: tp is 2, not 1" in capsys.readouterr().err
    forbid(FILES[0])
    assert main(call) == 1
    assert "mend its permissions" in capsys.readouterr().err
