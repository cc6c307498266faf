"""The SHA-256 sums that `verify` gives out are those of `sha256sum`, and cost no second read."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from aiter_prep.cli import main
from aiter_prep.errors import AiterPrepError, DataMismatch, InvalidUsage
from aiter_prep.verification import verify
from faults import Injector
from prepared import flip, small


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small(tmp_path)[1]


def check(folder: Path, sums: Path) -> subprocess.CompletedProcess[str]:
    tool = shutil.which("sha256sum")
    if tool is None:
        pytest.skip("no sha256sum on this machine")
    return subprocess.run(
        [tool, "--check", "--strict", sums], cwd=folder, capture_output=True, text=True, check=False
    )


def test_the_list_names_every_file_and_sha256sum_takes_it(folder: Path, tmp_path: Path) -> None:
    report = verify(folder, sha256=True)
    report.write_sha256sums(tmp_path / "SHA256SUMS")
    lines = (tmp_path / "SHA256SUMS").read_text("utf-8").splitlines()
    assert [line[66:] for line in lines] == sorted(path.name for path in folder.iterdir())
    for line in lines:
        assert line[:64] == hashlib.sha256((folder / line[66:]).read_bytes()).hexdigest()
    assert check(folder, tmp_path / "SHA256SUMS").returncode == 0


def test_sha256sum_finds_what_changed_since(folder: Path, tmp_path: Path) -> None:
    verify(folder, sha256=True).write_sha256sums(tmp_path / "SHA256SUMS")
    for path in sorted(folder.iterdir()):
        flip(path, path.stat().st_size - 1)
        done = check(folder, tmp_path / "SHA256SUMS")
        assert done.returncode == 1
        assert f"{path.name}: FAILED" in done.stdout
        flip(path, path.stat().st_size - 1)


def test_the_sums_cost_no_second_read_of_the_tensors(folder: Path) -> None:
    reads = []
    for sha256 in (False, True):
        with Injector() as injector:
            report = verify(folder, sha256=sha256)
        reads.append(injector.counts["preadv"] - sha256 * report.shards)  # the headers
    assert reads[0] == reads[1]


def test_a_damaged_folder_has_no_sums(folder: Path) -> None:
    path = next(folder.glob("model-rank-*"))
    flip(path, path.stat().st_size - 1)
    assert verify(folder, sha256=True).sha256 == {}


def test_nobody_asked_for_sums(folder: Path) -> None:
    assert verify(folder).sha256 == {}


def test_quick_and_sums_exclude_each_other(folder: Path) -> None:
    with pytest.raises(InvalidUsage, match="--sha256sums"):
        verify(folder, quick=True, sha256=True)


def test_the_list_may_not_lie_in_the_folder(folder: Path) -> None:
    report = verify(folder, sha256=True)
    with pytest.raises(InvalidUsage, match="lies in the folder"):
        report.write_sha256sums(folder / "SHA256SUMS")
    assert verify(folder).is_clean


def test_a_list_that_cannot_be_written_is_a_failure(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(AiterPrepError, match="cannot write"):
        verify(folder, sha256=True).write_sha256sums(tmp_path / "nowhere" / "SHA256SUMS")


# --- the command --------------------------------------------------------------------------------


def test_the_command_writes_a_list_that_sha256sum_takes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sums = tmp_path / "SHA256SUMS"
    assert main(["verify", str(folder), "--sha256sums", str(sums)]) == 0
    said = capsys.readouterr()
    assert f"the sums of {len(list(folder.iterdir()))} files are in {sums}" in said.err
    assert check(folder, sums).returncode == 0
    assert main(["verify", str(folder)]) == 0


def test_the_command_writes_no_list_of_a_damaged_folder(folder: Path, tmp_path: Path) -> None:
    path = next(folder.glob("model-rank-*"))
    flip(path, path.stat().st_size - 1)
    sums = tmp_path / "SHA256SUMS"
    assert main(["verify", str(folder), "--sha256sums", str(sums)]) == DataMismatch.exit_code
    assert not sums.exists()
    with pytest.raises(AiterPrepError, match="no SHA-256 sums"):
        verify(folder, sha256=True).write_sha256sums(sums)


def test_a_place_where_no_list_can_be_is_refused_before_anything_is_read(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {folder / "SHA256SUMS": 2, tmp_path: 2, tmp_path / "nowhere" / "SHA256SUMS": 1}
    for place, code in places.items():
        with Injector() as injector:
            assert main(["verify", str(folder), "--sha256sums", str(place)]) == code
        assert injector.counts["preadv"] == 0
    assert main(["verify", str(folder), "--quick", "--sha256sums", str(tmp_path / "sums")]) == 2
    assert "--quick reads no tensor" in capsys.readouterr().err
