"""What a target's table is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiter_prep.errors import InvalidUsage, NoRule

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT = "default"

# The options that can choose a path, and what they are called on the command line.
OPTIONS: dict[str, str] = {
    "gate_up": "--gate-up",
    "activation_dtype": "--activation-dtype",
    "moe_backend": "--moe-backend",
}


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


def when(**traits: str | frozenset[str]) -> dict[str, frozenset[str]]:
    """Return conditions of a path: trait to the values that it is for."""
    return {k: v if isinstance(v, frozenset) else frozenset({v}) for k, v in traits.items()}


def align_to(multiple: int) -> Alignment:
    """Return the alignment to one multiple, whatever the size."""
    return Alignment(((None, multiple),))


@dataclass(frozen=True, slots=True)
class Form:
    """How the tensors of one role are stored.

    Attributes:
        layouts: Layout of w13 and of w2.
        dtypes: Source dtype to (stored safetensors dtype, runtime torch dtype, conversion or "").
        fill: One stored element of padding, or the one byte that all of it consists of.
        shape: `matrices` (one per expert), `folded` (experts folded into rows), `flat` (1-D),
            `row_blocks` (32 rows in one), `rows` (one vector per expert), `values` (one per
            expert), `scalar` (one for all).
        among_parts: What a scalar takes of gate and up before the largest of all experts: the
            `largest`; the `last` of those that an engine reads; what both must have, `equal`.
        merges: Name of a merge for w13 and for w2, or "".
        packing: Name of a packing, or "".
        name: What the tensor is called after `w13_`; as the source spells the role by default.
        made_of: Role of the source tensors that it is made of, for a second tensor of one role.
    """

    layouts: tuple[str, str]
    dtypes: Mapping[str, tuple[str, str, str]]
    fill: bytes = b"\0"
    shape: str = "matrices"
    among_parts: str = "largest"
    merges: tuple[str, str] = ("", "")
    packing: str = ""
    name: str = ""
    made_of: str = ""


@dataclass(frozen=True, slots=True)
class WeightPath:
    """What one kind of source becomes under a target.

    Attributes:
        scheme: Scheme of the source.
        forms: How each role is stored; a key that is no role is a form with `made_of`.
        when: Trait to the values that this path is for: `chip`, `family`, `method`, `model`,
            `activation`, `inputs`, and the options; a trait that is not named may be anything, an
            option that is not named must be left at its default.
        row_order: Order of the rows of w13: `separated`, `interleaved_16`, `interleaved_1`,
            `as_source`.
        intermediate: Padding of the intermediate size per rank.
        hidden: Padding of the hidden size.
        intermediate_multiple: What the unpadded size per rank must be a multiple of.
        intermediate_least: What the unpadded size per rank must be at least.
        hidden_multiple: What the unpadded hidden size must be a multiple of.
        split: How ranks share the intermediate size, if not as the family says.
        note: What a user should know about it.
    """

    scheme: str
    forms: Mapping[str, Form]
    when: Mapping[str, frozenset[str]] = field(default_factory=dict)
    row_order: str = "separated"
    intermediate: Alignment = NO_PADDING
    hidden: Alignment = NO_PADDING
    intermediate_multiple: int = 1
    intermediate_least: int = 1
    hidden_multiple: int = 1
    split: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A kind of source that a target knows and does not take.

    Attributes:
        scheme: Scheme of the source.
        reason: Why.
        when: As for a path.
        otherwise: Only where no path applies.
    """

    scheme: str
    reason: str
    when: Mapping[str, frozenset[str]] = field(default_factory=dict)
    otherwise: bool = False


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
        refusals: What it does not take, and why; looked at before the paths.
        placements: How expert-parallel ranks may share the experts.
        even_experts: Every one of them holds as many experts as the others.
    """

    name: str
    aliases: tuple[str, ...]
    engine: str
    engine_version: str
    chips: tuple[str, ...]
    paths: tuple[WeightPath, ...]
    refusals: tuple[Refusal, ...] = ()
    placements: tuple[str, ...] = ("linear", "round_robin")
    even_experts: bool = False

    def path_for(self, scheme: str, traits: Mapping[str, str]) -> WeightPath:
        """Return the one path for a kind of source.

        Args:
            scheme: Scheme of the source.
            traits: `chip`, `family`, `method`, `model`, `activation`, `inputs`, and each of
                `OPTIONS`.

        Raises:
            NoRule: The table has none.
            InvalidUsage: An option is given that no path for this source depends on.
        """
        self.check_chip(traits["chip"])
        what = f"{scheme} experts named as {traits['family']} on {traits['chip']}"
        same_scheme = [path for path in self.paths if path.scheme == scheme]
        found = [path for path in same_scheme if _applies(path, traits)]
        for refusal in self.refusals:
            passed = refusal.otherwise and found
            if refusal.scheme == scheme and _holds(refusal.when, traits) and not passed:
                raise NoRule(f"target `{self.name}` takes no {what}: {refusal.reason}")
        if not found:
            self._check_options(same_scheme, traits)
            raise NoRule(
                f"target `{self.name}` has no rule for {what}",
                f"it knows {', '.join(sorted({path.scheme for path in self.paths}))}; "
                "`aiter-prep layouts` lists the paths",
            )
        assert len(found) == 1, (scheme, traits)
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

    def _check_options(self, paths: list[WeightPath], traits: Mapping[str, str]) -> None:
        for option, flag in OPTIONS.items():
            value = traits[option]
            plain = {**traits, option: DEFAULT}
            if value != DEFAULT and any(_applies(path, plain) for path in paths):
                allowed = sorted(
                    choice
                    for path in paths
                    for choice in path.when.get(option, ())
                    if choice != DEFAULT and _applies(path, {**traits, option: choice})
                )
                raise InvalidUsage(
                    f"{flag} {value} has no meaning for this model under target `{self.name}`",
                    f"use one of {', '.join(allowed)}" if allowed else f"leave {flag} away",
                )


def _applies(path: WeightPath, traits: Mapping[str, str]) -> bool:
    unused = (option for option in OPTIONS if option not in path.when)
    return _holds(path.when, traits) and all(traits[option] == DEFAULT for option in unused)


def _holds(when: Mapping[str, frozenset[str]], traits: Mapping[str, str]) -> bool:
    return all(traits[trait] in values for trait, values in when.items())
