"""More shards may be in the making than a process may have files open."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiny
from aiter_prep.execution import execute
from aiter_prep.plan import make_plan
from aiter_prep.storage import output
from aiter_prep.storage.checkpoint import open_checkpoint
from aiter_prep.storage.descriptors import DescriptorPool
from prepared import contents

OPEN = Path("/proc/self/fd")


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips fsync: what a crash leaves behind is the subject of other tests."""
    monkeypatch.setattr("os.fsync", lambda _descriptor: None)


@pytest.fixture
def few_files() -> Iterator[int]:
    """Lets this process have about 40 files open beside those that it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 40
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(OPEN.iterdir())) + few, hard))
    yield few
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def is_open(path: Path) -> bool:
    return any(link.is_symlink() and link.readlink() == path for link in OPEN.iterdir())


def made(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)


def test_files_that_rest_are_closed_and_opened_again(tmp_path: Path) -> None:
    pool = DescriptorPool(2)
    paths = [tmp_path / str(number) for number in range(5)]
    files = [pool.take(path, made(path)) for path in paths]
    assert [is_open(path) for path in paths] == [False, False, False, True, True]
    for turn in range(2):
        for number, file in enumerate(files):
            with pool.lent(file) as descriptor:
                os.pwrite(descriptor, b"%d" % number, turn)
            assert sum(map(is_open, paths)) == 2
    for file in files:
        pool.drop(file)
    assert not any(map(is_open, paths))
    assert [path.read_bytes() for path in paths] == [b"%d" % n * 2 for n in range(5)]


def test_what_is_lent_stays_open(tmp_path: Path) -> None:
    pool = DescriptorPool(1)
    first = pool.take(tmp_path / "first", made(tmp_path / "first"))
    second = pool.take(tmp_path / "second", made(tmp_path / "second"))
    with pool.lent(first) as one, pool.lent(second) as other:
        assert one != other
        assert os.pwrite(one, b"1", 0) == os.pwrite(other, b"2", 0) == 1
    assert (tmp_path / "first").read_bytes() == b"1"


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_took_the_place_of_a_resting_file_is_not_written_into(
    kind: str, tmp_path: Path
) -> None:
    pool = DescriptorPool(1)
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    file = pool.take(mine, made(mine))
    pool.take(tmp_path / "other", made(tmp_path / "other"))
    theirs.write_bytes(b"theirs")
    kept = mine.rename(tmp_path / "kept")  # so that its inode is not given to another
    if kind == "link":
        mine.symlink_to(theirs)
    else:
        theirs.rename(mine)
    with pytest.raises(OSError, match="mine") as caught, pool.lent(file):
        pass
    assert caught.value.errno in {errno.ESTALE, errno.ELOOP}
    assert mine.read_bytes() == b"theirs"
    assert kept.read_bytes() == b""


def test_many_shards_at_once_take_few_files(
    few_files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "SHARDS", DescriptorPool(16))
    source = tiny.write(tmp_path / "source", tiny.Model(experts=64, layers=2))
    plan = make_plan(open_checkpoint(source), ep=64)
    assert len(plan.shards) > few_files
    execute(plan, tmp_path / "few", workers=2)
    monkeypatch.setattr(output, "SHARDS", DescriptorPool(1))
    execute(plan, tmp_path / "one", workers=2)
    assert contents(tmp_path / "few") == contents(tmp_path / "one")
