"""Which states nobody goes on from: a device that computes wrongly took part in them, or their run left them behind.

Between the last step in whose audit all agreed and the one in which a device was convicted nobody compared what that
device did. Whatever was made in that time may be wrong, in memory and in the store alike, and looks like any other
state. So each conviction leaves a rule: of the generations before the next one, only states of at most so many updates
count. A step number alone would not do, since the same steps are made again; nor would the generation alone, since most
of what it made is sound. The numbers of generations only ever grow in one store, whatever jobs write there. A run that
goes back for another reason leaves the same kind of rule.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Distrust:
    """States made in generations below `before`, and of more than `step` updates, are not gone on from."""

    before: int
    """The generation that follows the one in which a device was convicted."""
    step: int
    """Of the newest audit in which all agreed. It compared what was computed from the state of `step` updates, which is
    the last one that it vouches for: the update that followed is the first one that nobody may have compared."""

    def refuses(self, generation: int, step: int) -> bool:
        """Return whether the rule is about the state of a step that was made in a generation."""
        return generation < self.before and step > self.step

    def covers(self, other: Distrust) -> bool:
        """Return whether this rule refuses all that the other one does."""
        return self.before >= other.before and self.step <= other.step


def refused(rules: Iterable[Distrust], generation: int, step: int) -> bool:
    """Return whether any of the rules refuses the state of a step that was made in a generation."""
    return any(rule.refuses(generation, step) for rule in rules)


def with_rule(rules: tuple[Distrust, ...], rule: Distrust) -> tuple[Distrust, ...]:
    """Return the rules and one more, without those that add nothing; the same rules if this one adds nothing."""
    if any(one.covers(rule) for one in rules):
        return rules
    return (*(one for one in rules if not rule.covers(one)), rule)


def with_rules(rules: tuple[Distrust, ...], more: Iterable[Distrust]) -> tuple[Distrust, ...]:
    """Return the rules and several more; the same rules if these add nothing."""
    for rule in more:
        rules = with_rule(rules, rule)
    return rules
