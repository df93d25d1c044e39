"""Which states are not gone on from after a device was convicted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic3d.distrust import Distrust, refused, with_rule

RULES = st.builds(Distrust, before=st.integers(1, 6), step=st.integers(0, 6))
STATES = [(generation, step) for generation in range(7) for step in range(9)]


@given(st.lists(RULES, max_size=6))
def test_rules_that_add_nothing_are_dropped_and_no_other(given: list[Distrust]) -> None:
    """All together refuse what each of them does, and each of those kept refuses something that no other does."""
    kept: tuple[Distrust, ...] = ()
    for rule in given:
        kept = with_rule(kept, rule)
    for state in STATES:
        assert refused(kept, *state) == refused(given, *state)
    for rule in kept:
        others = [one for one in kept if one != rule]
        assert any(refused(kept, *state) and not refused(others, *state) for state in STATES)


def test_a_rule_that_says_nothing_new_changes_nothing() -> None:
    """Nobody writes a record again for it."""
    kept = (Distrust(before=3, step=20),)
    assert with_rule(kept, Distrust(before=2, step=30)) is kept
    assert with_rule(kept, Distrust(before=3, step=20)) is kept


class Training:
    """A run on a device that goes wrong in a step, after what may be compared of it: the next audit convicts it."""

    def __init__(self, wrong_from: int, audited: Callable[[int], bool]) -> None:
        self.wrong_from, self.audited = wrong_from, audited
        self.clean = 0
        self.states: list[tuple[int, int, bool]] = [(1, 0, True)]

    def until_convicted(self) -> Distrust:
        """Make steps; each state is its generation, its number of updates, and whether it is right."""
        while True:
            _, step, right = self.states[-1]
            if self.audited(step):
                if step > self.wrong_from:
                    return Distrust(before=2, step=self.clean)
                self.clean = step
            self.states.append((1, step + 1, right and step < self.wrong_from))


def violations() -> list[str]:
    """Convict devices that go wrong at any step, however far apart audits are, and return what was gone on from."""
    wrong = []
    for every in range(1, 5):
        for wrong_from in range(2 * every + 1):
            training = Training(wrong_from, lambda step, every=every: step % every == 0)  # type: ignore[misc]
            rules = with_rule((), training.until_convicted())
            allowed = [state for state in training.states if not refused(rules, *state[:2])]
            name = f"a device that errs from step {wrong_from} on, audited each {every} steps"
            if not allowed or not max(allowed)[2]:
                wrong.append(f"{name}: {max(allowed, default=None)} is gone on from")
            if max(allowed, default=(0, 0))[1] < training.clean:
                wrong.append(f"{name}: more is lost than the audits vouch for")
    return wrong


def accept_the_update_after(patch: pytest.MonkeyPatch) -> None:
    """The state that the audited step led to is gone on from too, though nobody compared all of that step."""
    patch.setattr(Distrust, "refuses", lambda self, made, step: made < self.before and step > self.step + 1)


def refuse_what_was_compared(patch: pytest.MonkeyPatch) -> None:
    """The state from which the audited step was computed is given up too."""
    patch.setattr(Distrust, "refuses", lambda self, made, step: made < self.before and step >= self.step)


def test_an_honest_rule_lets_nothing_wrong_through_and_loses_nothing_right() -> None:
    """Wherever between two audits the device went wrong."""
    assert violations() == []


@pytest.mark.parametrize("plant", [accept_the_update_after, refuse_what_was_compared])
def test_a_planted_bug_shows(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mistake is one that a careless change could make."""
    plant(monkeypatch)
    assert violations()
