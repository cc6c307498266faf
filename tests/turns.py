"""Divides a long test into turns that are run one after the other, on another day or machine."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")


class Turn:
    """One of several turns of a test; together they are the whole of it.

    Args:
        text: `K/N`, the K-th of N turns.

    Raises:
        argparse.ArgumentTypeError: It is not spelled so.
    """

    def __init__(self, text: str) -> None:
        match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
        if match is None or int(match[1]) > int(match[2]):
            raise argparse.ArgumentTypeError(f"{text} is no turn such as 2/5")
        self._number, self._count = int(match[1]), int(match[2])

    def of(self, items: Iterable[Item]) -> Iterable[Item]:
        """Return every N-th item, so that all turns take as long."""
        return islice(items, self._number - 1, None, self._count)


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Let a program take `--turn K/N`."""
    parser.add_argument("--turn", type=Turn, default=Turn("1/1"), help="K/N: one of N turns")
