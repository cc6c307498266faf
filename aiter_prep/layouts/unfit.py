"""The refusal of a value that has no place where it is to go."""

from __future__ import annotations

from aiter_prep.errors import NoRule


class UnfitValue(NoRule):
    """A value that cannot be converted or merged; who knows its tensor's name says it.

    Args:
        reason: Why it has no place.
        hint: What to do about it.
        value: The value, for people.
        expert: Index of its expert in the arrays that were given.
        part: Index of the part that holds it.
        is_scale: It is the part's scale.
    """

    def __init__(
        self,
        reason: str,
        hint: str,
        *,
        value: str,
        expert: int,
        part: int = 0,
        is_scale: bool = False,
    ) -> None:
        super().__init__(f"a {'scale' if is_scale else 'value'} is {value}: {reason}", hint)
        self.reason = reason
        self.value = value
        self.expert = expert
        self.part = part
        self.is_scale = is_scale

    def named(self, tensor: str) -> NoRule:
        """Return the refusal with the name of the tensor, quoted already or free of control."""
        verb = "is" if self.is_scale else "holds"
        return NoRule(f"`{tensor}` {verb} {self.value}: {self.reason}", self.hint)
