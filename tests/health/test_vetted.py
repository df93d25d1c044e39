"""A checkpoint is vetted once all who made it have agreed with others since, and never one that may be wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import pytest

from elastic3d.health import vetted
from elastic3d.health.vetted import begun, clean_nodes


@dataclass
class Training:
    """A job of three nodes; b errs in every update from one on, after what may be compared of that, and may leave.

    every: steps from one audit to the next. leaves: the step at which b leaves, 0 for never.
    """

    every: int
    wrong_from: int
    leaves: int = 0
    clean: dict[str, int] = field(default_factory=lambda: begun(None, "abc", 0))
    checkpoints: dict[int, tuple[dict[str, int], bool]] = field(default_factory=dict)

    def states(self) -> Iterator[int]:
        """Make steps until b is convicted or all is over; each one's checkpoint says who made it."""
        right = True
        for step in range(4 * self.every + 2):
            if self.leaves and step == self.leaves:
                self.clean = begun(self.clean, "ac", step)
            if step % self.every == 0:
                if "b" in self.clean and step > self.wrong_from:
                    return
                self.clean = dict.fromkeys(self.clean, step)
                yield step
            right = right and not ("b" in self.clean and step >= self.wrong_from)
            self.checkpoints[step + 1] = dict(self.clean), right
            yield step


def wrongly_vetted() -> list[str]:
    """Go through all short histories; return the vetted checkpoints that are wrong because of who made them."""
    found_wrong = []
    for every in range(1, 4):
        for wrong_from in range(2 * every + 1):
            for leaves in range(3 * every):
                training = Training(every, wrong_from, leaves)
                for now in training.states():
                    for step, (made_by, right) in training.checkpoints.items():
                        if vetted.vets(made_by, step, training.clean) and "b" in made_by and not right:
                            found_wrong.append(
                                f"every {every}, wrong from {wrong_from}, gone at {leaves}: {step} at {now}"
                            )
    return found_wrong


def off_by_one(made_by: Mapping[str, int], step: int, clean: Mapping[str, int]) -> bool:
    """The update that an audited step led to is taken for compared too."""
    return bool(made_by) and all(clean.get(node, -1) >= step - 1 for node in made_by)


def by_those_who_are_left(made_by: Mapping[str, int], step: int, clean: Mapping[str, int]) -> bool:
    """Nobody asks after a node that has left."""
    return bool(made_by) and all(clean[node] >= step for node in made_by if node in clean)


def test_nothing_wrong_is_vetted_and_everything_right_is() -> None:
    """However far apart audits are, and whoever leaves between them."""
    assert wrongly_vetted() == []
    honest = Training(every=3, wrong_from=99)
    list(honest.states())
    newest = max(honest.clean.values())
    for step, (made_by, _) in honest.checkpoints.items():
        assert vetted.vets(made_by, step, honest.clean) == (step <= newest)


@pytest.mark.parametrize("plant", [off_by_one, by_those_who_are_left])
def test_a_planted_bug_shows(plant: Callable[..., bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mistake is one that a careless change could make."""
    monkeypatch.setattr(vetted, "vets", plant)
    assert wrongly_vetted()


def test_a_generation_takes_over_what_is_known_of_its_own_nodes() -> None:
    """Nothing of others, and nobody is vouched for beyond the state."""
    assert begun({"a": 30, "b": 20}, ("a", "c"), 25) == {"a": 25, "c": -1}
    assert begun(None, ("a",), 7) == {"a": -1}


def test_a_node_that_comes_back_is_not_vouched_for_by_what_others_did_meanwhile() -> None:
    """Its checkpoint of before it left is vetted once it has agreed again."""
    made_by = {"a": 85, "b": 85}
    clean = begun({"a": 100, "c": 100}, ("a", "b"), 105)
    assert not vetted.vets(made_by, 88, clean)
    assert vetted.vets(made_by, 88, dict.fromkeys(clean, 106))


def test_facts_of_other_makers_say_nothing() -> None:
    """Imports, older versions, and what no run has written."""
    assert clean_nodes({}) == clean_nodes({"clean_nodes": None}) == clean_nodes({"clean_nodes": [1]}) == {}
    assert clean_nodes({"clean_nodes": {"a": 3, "b": "x", "c": True}}) == {"a": 3}
    assert not vetted.vets({}, 0, {"a": 9})
