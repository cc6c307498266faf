"""Which scheme the entries of a quantisation config give to an experts module."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

from aiter_prep.families.regex_cost import compiled, steps_of

# Configs and checkpoints disagree on what stands before `layers.`; each may use any of these.
_PREFIXES = ("", "model.", "language_model.", "language_model.model.", "model.language_model.")
_PREFIX = re.compile(r"\A(?:model\.language_model|language_model\.model|language_model|model)\.")
# What expert 0 is made of, as each family spells it, and fused experts, which have no number.
_SPELLINGS = (
    ("0.gate_proj", "0.up_proj", "0.down_proj"),
    ("0.w1", "0.w3", "0.w2"),
    ("0.gate_up_proj", "0.down_proj"),
    ("gate_up_proj", "down_proj"),
)
_REGEX = "re:"
_MAX_AROUND = len("model.language_model.") + len(".0.gate_up_proj")
_ROOTS = ("layers.", "blocks.")
# Ways in which all regexes of a config may go on one name. Each is tried on a hundred names of a
# module, so at worst this is a second or two; honest configs come to a hundredth of it.
MAX_STEPS = 8_000_000

# An entry (a name, a `*` glob or a `re:` regex) and the scheme of the modules that it means; None:
# a scheme that cannot be told.
Rule = tuple[str, str | None]


class Unclear(Exception):
    """The config cannot be interpreted with certainty."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a quantisation config says.

    Attributes:
        exclusions: Entries for modules that were left alone.
        default: Scheme of the modules that no entry means; None: it cannot be told.
        rules: Entries for modules with a scheme of their own; the first that fits counts.
        excluded: Scheme of the modules that were left alone; None: it cannot be told.
    """

    exclusions: Sequence[str]
    default: str | None
    rules: Sequence[Rule] = ()
    excluded: str | None = "bf16"


@dataclass(frozen=True, slots=True)
class _Names:
    """The names that a config may use for a module.

    Attributes:
        full: With each prefix.
        lines: The same as text, each between dots on its own line.
    """

    full: tuple[str, ...]
    lines: str

    @classmethod
    def of(cls, path: str) -> _Names:
        core = _PREFIX.sub("", path)
        full = tuple(prefix + core for prefix in _PREFIXES)
        return cls(full, "".join(f"\n.{name}." for name in full))

    @classmethod
    def joined(cls, modules: Iterable[_Names]) -> _Names:
        """Return the names of any of some modules."""
        modules = tuple(modules)
        full = tuple(name for names in modules for name in names.full)
        return cls(full, "".join(names.lines for names in modules))


def scheme_of(experts_path: str, reading: Reading) -> str | None:
    """Return the scheme of an experts module, or None where its parts do not agree.

    Raises:
        Unclear: An entry is no valid regex, or one that might take for ever.
    """
    module = _Names.of(experts_path)
    _weigh([*reading.exclusions, *(entry for entry, _ in reading.rules)], experts_path)
    leaves = {leaf: _Names.of(f"{experts_path}.{leaf}") for names in _SPELLINGS for leaf in names}
    below = tuple(f"{name}." for name in module.full)
    exclusions = _exclusion_rules(reading, experts_path, leaves, below)
    rules, rest = _before_whole([*exclusions, *reading.rules], module, reading.default)
    schemes = _schemes_that_count(_own_schemes(rules, leaves), rest)
    # rules for single experts: expert 0 stands for all only if the others say the same
    schemes |= {scheme for entry, scheme in rules if entry.startswith(below)}
    return schemes.pop() if len(schemes) == 1 else None


def _exclusion_rules(
    reading: Reading, experts_path: str, leaves: Mapping[str, _Names], below: tuple[str, ...]
) -> list[Rule]:
    """Return the exclusions as rules; one for a part of just these experts is for all of them.

    vLLM, too, loads experts as unquantised if any part of them is excluded.
    """
    parts = _Names.joined(leaves.values())
    return [
        (
            experts_path
            if entry.startswith(below) or ("experts" in entry and _means(entry, parts))
            else entry,
            reading.excluded,
        )
        for entry in reading.exclusions
    ]


def _before_whole(
    rules: Sequence[Rule], module: _Names, default: str | None
) -> tuple[Sequence[Rule], str | None]:
    """Return the rules before the first that means the whole module, and the scheme after them."""
    for index, (entry, scheme) in enumerate(rules):
        if _means(entry, module):
            return rules[:index], scheme
    return rules, default


def _own_schemes(rules: Sequence[Rule], leaves: Mapping[str, _Names]) -> dict[str, str | None]:
    """Return the schemes of the leaves that rules mean, each by the first of them."""
    anywhere = _Names.joined(leaves.values())
    fitting = [rule for rule in rules if _means(rule[0], anywhere)]
    found: dict[str, str | None] = {}
    for leaf, names in leaves.items():
        schemes = [scheme for entry, scheme in fitting if _means(entry, names)]
        if schemes:
            found[leaf] = schemes[0]
    return found


def _schemes_that_count(own: Mapping[str, str | None], rest: str | None) -> set[str | None]:
    """Return the schemes of all spellings that the checkpoint may have.

    Where rules mean every leaf of one spelling, that is the checkpoint's, and one of which they
    mean nothing else is not.
    """
    whole = [leaves for leaves in _SPELLINGS if own.keys() >= set(leaves)]
    settled = {_projection(leaf) for leaves in whole for leaf in leaves}
    counting = [
        leaves
        for leaves in _SPELLINGS
        if not whole
        or leaves in whole
        or not settled >= {_projection(leaf) for leaf in leaves if leaf in own}
    ]
    return {own.get(leaf, rest) for leaves in counting for leaf in leaves}


def _projection(leaf: str) -> str:
    return leaf.rpartition(".")[2]


def _means(entry: str, names: _Names) -> bool:
    """Return whether an entry means a module, by its own name or by that of one around it.

    A plain name is compared by whole segments: `gate` is no part of `gate_proj`.
    """
    if entry.startswith(_REGEX):
        regex = _compiled(entry[len(_REGEX) :])
        return any(regex.match(name) for name in names.full)
    if any(character in entry for character in "*?["):
        return any(fnmatchcase(name, entry) for name in names.full)
    # `layers.0` is not the layer of `mtp.layers.0`
    start = "\n." if entry.startswith(_ROOTS) else "."
    return f"{start}{entry}." in names.lines


def _weigh(entries: Iterable[str], experts_path: str) -> None:
    """Check that the regexes among some entries come to an end soon.

    Raises:
        Unclear: They may not.
    """
    length = len(experts_path) + _MAX_AROUND
    total = 0
    for entry in entries:
        if entry.startswith(_REGEX):
            steps = steps_of(entry[len(_REGEX) :], length)
            total += MAX_STEPS + 1 if steps is None else steps
        if total > MAX_STEPS:
            raise Unclear


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    regex = compiled(pattern)
    if regex is None:
        raise Unclear
    return regex
