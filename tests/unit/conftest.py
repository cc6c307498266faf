"""A server that speaks the API of the Hub, and the real client in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hub_server import Client, HubServer, serving


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with serving() as state:
        yield state


@pytest.fixture(scope="module")
def client(hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    running = Client(hub, tmp_path_factory.mktemp("home"))
    yield running
    running.close()
