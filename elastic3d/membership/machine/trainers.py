"""A member's own trainers, brought to the state that the records ask for.

For each generation key they are `preparing` -> `prepared` -> `running` -> `over`.
"""

from __future__ import annotations

from enum import StrEnum

from elastic3d.membership import actions as acts
from elastic3d.membership.machine.generation_index import index_of
from elastic3d.membership.machine.view import View
from elastic3d.values import Generation


class TrainersPhase(StrEnum):
    """How far this node's trainers of one generation are."""

    PREPARING = "preparing"
    PREPARED = "prepared"
    RUNNING = "running"
    OVER = "over"


class Trainers:
    """The trainers of the node `id`, as far as the core knows. Methods append what is to be done to `actions`."""

    def __init__(self, id: str) -> None:
        self._id = id
        self._phase: dict[str, TrainersPhase] = {}
        self._asked = ""

    def phase(self, key: str) -> TrainersPhase | None:
        """Return how far the trainers of a generation are, None if there are none."""
        return self._phase.get(key)

    def prepared(self, key: str) -> None:
        """Take in that all are built."""
        self._phase[key] = TrainersPhase.PREPARED

    def over(self, key: str) -> None:
        """Take in that they ended by themselves."""
        if key in self._phase:
            self._phase[key] = TrainersPhase.OVER

    def stop(self, actions: list[acts.Action], key: str, why: str) -> None:
        """Stop those of one generation, if any live."""
        if self._phase.get(key, TrainersPhase.OVER) is not TrainersPhase.OVER:
            self._phase[key] = TrainersPhase.OVER
            actions.append(acts.Stop(key=key, why=why))

    def stop_all(self, actions: list[acts.Action], why: str) -> None:
        """Stop all."""
        for key in list(self._phase):
            self.stop(actions, key, why)

    def follow(self, view: View, actions: list[acts.Action]) -> None:
        """Prepare, start, ask to leave and stop trainers, as generation and proposal want it."""
        current, proposal, formed = view.generation, view.proposal, view.coming
        wanted: list[Generation] = []
        if current is not None and self._id in index_of(current).node_ranks:
            wanted.append(current)
            if view.outs:
                self.stop(actions, current.key, f"{view.broken()} is out")
        if formed is not None and self._id in index_of(formed).node_ranks:
            wanted.append(formed)
        keys = [generation.key for generation in wanted]
        for key in [key for key in self._phase if key not in keys]:
            ahead = current is None or int(key.partition(".")[0]) > current.number
            self.stop(actions, key, "its proposal was withdrawn" if ahead else "another generation was sealed")
            del self._phase[key]
        for generation in wanted:
            if generation is current and view.outs:
                continue
            if generation.key not in self._phase:
                self._phase[generation.key] = TrainersPhase.PREPARING
                actions.append(acts.Prepare(generation=generation))
            elif generation is current and self._phase[generation.key] is TrainersPhase.PREPARED:
                self._phase[generation.key] = TrainersPhase.RUNNING
                actions.append(acts.StartTrainers(generation=generation))
        # After `StartTrainers`: trainers that are ready only once the switch is wanted start, and then leave.
        running = current is not None and self._phase.get(current.key) is TrainersPhase.RUNNING
        switch = formed is not None and proposal is not None and proposal.switch
        if switch and current is not None and running and self._asked != current.key:
            self._asked = current.key
            actions.append(acts.AskLeave(key=current.key))
