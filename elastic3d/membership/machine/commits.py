"""The leader's work for checkpoints: fence the store against older leaders, and commit what all nodes wrote."""

from __future__ import annotations

from elastic3d.membership import actions as acts
from elastic3d.membership import events as e
from elastic3d.membership.machine.leader_state import LeaderState
from elastic3d.membership.machine.view import View
from elastic3d.membership.records import SavedStep


class Commits:
    """What one leadership has asked for already."""

    def __init__(self) -> None:
        self._fenced: acts.Fence | None = None
        self._committing: tuple[SavedStep, int] | None = None

    def follow(self, view: View, leader_state: LeaderState, actions: list[acts.Action]) -> None:
        """Fence the store for this generation; commit what all its nodes wrote, or what an older one left.

        A conviction's rules go to the store as soon as they are in the record: no other generation may follow.
        """
        current, roster = view.generation, view.roster
        if current is None or not current.nodes or roster is None:
            return
        fence = acts.Fence(number=current.number, distrusted=current.distrusted)
        if self._fenced != fence:
            self._fenced = fence
            actions.append(fence)
        saved = roster.reports.saved
        if not saved:
            return
        newest = max(saved, key=lambda s: (s.made_in, s.step, s.attempt))
        nodes = saved[newest]
        complete = nodes >= len(current.nodes) or newest.made_in != current.number
        if complete and self._committing != (newest, nodes):
            if self._committing is None or self._committing[0] != newest:
                leader_state.committing = newest
            self._committing = (newest, nodes)
            actions.append(acts.Commit(saved=newest, number=current.number))

    @staticmethod
    def settled(leader_state: LeaderState, event: e.Settled) -> None:
        """Take in what the store answered; the answer for an older save than the newest one says nothing."""
        if event.saved == leader_state.committing:
            leader_state.committing, leader_state.uncommitted = None, event.error
