"""Reads the values of flags."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiter_prep.errors import InvalidUsage
from aiter_prep.storage.jsontext import printable
from aiter_prep.storage.shell import command_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([kmgt]?)(i?)(b?)", re.ASCII | re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_RANGE = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?", re.ASCII)
MAX_RANKS = 4096


def parse_size(text: str, flag: str = "--max-shard-size") -> int:
    """Return the bytes that a size stands for: `5GB`, `4.5GiB`, `1000`.

    Raises:
        InvalidUsage: It is no size, or less than a byte.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise InvalidUsage(
            f"{flag} {printable(text)} is no size",
            "give bytes, or a number with KB, MB, GB, TB, KiB, MiB, GiB or TiB, such as 5GB",
        )
    base = 1024 if match[3] else 1000
    total_bytes = int(float(match[1]) * base ** _POWERS[match[2].lower()])
    if total_bytes < 1:
        raise InvalidUsage(f"{flag} {printable(text)} is less than a byte")
    return total_bytes


def parse_ranks(text: str | None) -> tuple[int, ...] | None:
    """Return the ranks that a list stands for: `0-3,7`; None for all.

    Raises:
        InvalidUsage: It is no list of numbers and ranges.
    """
    if text is None:
        return None
    ranks: set[int] = set()
    for item in text.split(","):
        match = _RANGE.fullmatch(item.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < MAX_RANKS:
            raise InvalidUsage(
                f"--ranks {printable(text)} is no list of ranks",
                "give numbers and ranges from 0 on, such as 0-3,7",
            )
        ranks.update(range(first, last + 1))
    return tuple(sorted(ranks))


@dataclass(frozen=True, slots=True)
class Sharing:
    """How many ranks there are, and what each holds.

    Attributes:
        tp: Tensor-parallel ranks.
        ep: Expert-parallel ranks.
        placement: Which experts an expert-parallel rank holds.
    """

    tp: int
    ep: int
    placement: str

    @property
    def label(self) -> str:
        """How it is called in the names of folders: `tp8`."""
        return f"tp{self.tp}" if self.ep == 1 else f"ep{self.ep}"


def read_sharing(tp: int | None, ep: int | None, placement: str, source: str) -> Sharing:
    """Return how many ranks were asked for.

    Raises:
        InvalidUsage: None were, or it is no number of ranks.
    """
    if tp is None and ep is None:
        raise InvalidUsage(
            "neither --tp nor --ep is given: the weights are cut for a number of ranks",
            f"{command_line('aiter-prep', 'inspect', source)} shows which numbers work",
        )
    for flag, number in (("--tp", tp), ("--ep", ep)):
        if number is not None and number < 1:
            raise InvalidUsage(f"{flag} {number} is out of range: at least 1")
    return Sharing(tp or 1, ep or 1, placement)


def each_once(sizes: Iterable[int]) -> Iterator[int]:
    """Yield the numbers of several --tp.

    Raises:
        InvalidUsage: One is there twice; the other may have been meant to be another.
    """
    seen: set[int] = set()
    for size in sizes:
        if size in seen:
            raise InvalidUsage(f"--tp {size} is given twice", "give each number of ranks once")
        seen.add(size)
        yield size


def given(**options: str | None) -> dict[str, str]:
    """Return the options that were given."""
    return {name: value for name, value in options.items() if value is not None}
