"""How long Python's `re` may take over a pattern that somebody else wrote."""

from __future__ import annotations

import re
import warnings

# `re` goes back and tries again: nested repeats take exponential time, and every further repeat
# without a bound multiplies it by the length of the text. So a pattern is weighed before it runs.
MAX_PATTERN = 500
_TRAILING = re.compile(r"(?<!\\)\.[*+]\$?\Z")  # takes the rest of a line at once
_TOKEN = re.compile(
    r"(?P<open>\((?:\?(?:[:=!]|<[=!]))?(?!\?))|(?P<close>\))|(?P<either>\|)"
    r"|(?P<repeat>(?:[*+?]|\{\d{0,4}(?:,\d{0,4})?\})\??)"
    r"|(?P<atom>\\[^\d]|\[\^?\]?(?:[^\]\\]|\\.)*\]|[^\\()\[|*+?{])",
    re.ASCII | re.DOTALL,
)


def steps_of(pattern: str, length: int) -> int | None:
    """Return how many ways matching may go at worst, or None where that cannot be told.

    What is rare (flags, conditions, references to groups) cannot be told, and a group that leaves
    a choice may not be repeated.

    Args:
        pattern: The regex.
        length: Characters of the longest text.
    """
    if len(pattern) > MAX_PATTERN:
        return None
    return _Scale(max(1, length)).weigh(_TRAILING.sub("", pattern))


def compiled(pattern: str) -> re.Pattern[str] | None:
    """Return a compiled regex, or None where it is none, or none without a doubt."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what may mean something else in a later Python
            return re.compile(pattern)
    except (re.error, OverflowError, RecursionError, Warning):
        return None


class _Scale:
    """Reads a pattern from left to right and multiplies the choices that it leaves."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._choices = 1
        self._groups: list[int] = []  # the choices before each open group
        self._is_plain = False  # what stands before leaves no choice of its own

    def weigh(self, pattern: str) -> int | None:
        place = 0
        while place < len(pattern):
            token = _TOKEN.match(pattern, place)
            if token is None or not self._take(str(token.lastgroup), token[0]):
                return None
            place = token.end()
        return None if self._groups else self._choices

    def _take(self, kind: str, text: str) -> bool:
        """Take in a token; return whether the pattern can still be weighed."""
        if kind == "repeat":
            return self._repeat(text)
        if kind == "close":
            if not self._groups:
                return False
            self._is_plain = self._groups.pop() == self._choices
            return True
        if kind == "open":
            self._groups.append(self._choices)
        if kind == "either":
            self._choices *= 2
        self._is_plain = kind == "atom"
        return True

    def _repeat(self, text: str) -> bool:
        is_plain, self._is_plain = self._is_plain, False
        if text[0] == "?":
            self._choices *= 2
            return True
        least, comma, most = text.strip("{?}").partition(",")
        if text[0] in "*+" or (comma and not most):
            self._choices *= self._length
        elif comma:
            self._choices *= max(1, int(most) - int(least or 0) + 1)
        return is_plain
