"""The command line in a folder of its own; a server with the API of the Hub, and a real client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import CommandLine
from hub_server import Client, HubServer, serving


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> CommandLine:
    """Runs the command line in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("aiter_prep.backends.rocm.local_chips", lambda: ())
    return CommandLine(capsys)


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with serving() as state:
        yield state


@pytest.fixture(scope="module")
def client(hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    running = Client(hub, tmp_path_factory.mktemp("home"))
    yield running
    running.close()
