"""What a target's table is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiter_prep.errors import NoRule

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Alignment:
    """To what a size is padded.

    Attributes:
        steps: (largest size, multiple), ascending; the last largest size is None.
    """

    steps: tuple[tuple[int | None, int], ...]

    def pad(self, size: int) -> int:
        """Return the padded size."""
        for largest, multiple in self.steps:
            if largest is None or size <= largest:
                return -(-size // multiple) * multiple
        raise AssertionError(self.steps)


NO_PADDING = Alignment(((None, 1),))


def align_to(multiple: int) -> Alignment:
    """Return the alignment to one multiple, whatever the size."""
    return Alignment(((None, multiple),))


@dataclass(frozen=True, slots=True)
class Form:
    """How the tensors of one role are stored.

    Attributes:
        layouts: Layout of w13 and of w2.
        fill: The byte that padding consists of.
        dtypes: Source dtype to (stored safetensors dtype, runtime torch dtype, conversion or "").
        folded: Experts are folded into rows: the stored tensor is 2-D.
    """

    layouts: tuple[str, str]
    fill: int
    dtypes: Mapping[str, tuple[str, str, str]]
    folded: bool = False


@dataclass(frozen=True, slots=True)
class WeightPath:
    """What one kind of source becomes under a target.

    Attributes:
        scheme: Scheme of the source.
        chips: gfx names that it is for.
        families: Families that it is for; empty for all.
        row_order: Order of the rows of w13.
        intermediate: Padding of the intermediate size per rank.
        hidden: Padding of the hidden size.
        intermediate_multiple: What the unpadded size per rank must be a multiple of.
        hidden_multiple: What the unpadded hidden size must be a multiple of.
        forms: How each role is stored.
        note: What a user should know about it.
    """

    scheme: str
    chips: frozenset[str]
    row_order: str
    intermediate: Alignment
    hidden: Alignment
    forms: Mapping[str, Form]
    intermediate_multiple: int = 1
    hidden_multiple: int = 1
    families: frozenset[str] = frozenset()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """An engine of one version, or AITER itself.

    Attributes:
        name: The name with its version, as manifests record it.
        aliases: Shorter names for it.
        engine: The engine.
        engine_version: Its version.
        chips: gfx names that it knows; the first is the default.
        paths: What each kind of source becomes.
        refused: (scheme, chip or `*`) to the reason why there is no path.
    """

    name: str
    aliases: tuple[str, ...]
    engine: str
    engine_version: str
    chips: tuple[str, ...]
    paths: tuple[WeightPath, ...]
    refused: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def path_for(self, scheme: str, family: str, chip: str) -> WeightPath:
        """Return the one path for a kind of source.

        Raises:
            NoRule: The table has none.
        """
        self.check_chip(chip)
        found = [p for p in self.paths if _applies(p, scheme, family, chip)]
        if not found:
            reason = self.refused.get((scheme, chip)) or self.refused.get((scheme, "*"))
            raise NoRule(
                f"target `{self.name}` has no rule for {scheme} experts named as {family} on "
                f"{chip}{f': {reason}' if reason else ''}",
                f"it knows {', '.join(sorted({p.scheme for p in self.paths}))}",
            )
        assert len(found) == 1, (scheme, family, chip)
        return found[0]

    def check_chip(self, chip: str) -> None:
        """Check that the target knows a chip.

        Raises:
            NoRule: It does not.
        """
        if chip not in self.chips:
            raise NoRule(
                f"target `{self.name}` does not know the chip `{chip}`",
                f"use --gfx with one of {', '.join(self.chips)}",
            )


def _applies(path: WeightPath, scheme: str, family: str, chip: str) -> bool:
    return (
        path.scheme == scheme
        and chip in path.chips
        and (not path.families or family in path.families)
    )
