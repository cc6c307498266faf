"""The program that is killed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from killing import Runner


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    """The program, started once."""
    runner = Runner()
    yield runner
    runner.close()
