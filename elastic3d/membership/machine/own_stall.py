"""What this member says of its own ranks while they stand still: written while it holds, and taken back."""

from __future__ import annotations

from elastic3d.membership import actions as acts
from elastic3d.membership.machine.view import View
from elastic3d.membership.stalls import Stall, aged, outline


class OwnStall:
    """The member's stall, and what of it was written."""

    def __init__(self) -> None:
        self._stall: tuple[Stall, float] | None = None
        self._written: Stall | None = None
        self._anew = self._uncertain = False

    def silent(self, stall: Stall, now: float) -> None:
        """Take in that ranks of this node stand still."""
        self._stall = (stall, now)

    def moving(self, key: str) -> None:
        """Take in that those of the generation `key` move again."""
        if self._stall is not None and self._stall[0].key == key:
            self._stall = None

    def write_again(self) -> None:
        """The member's keys may be gone: write anew what holds."""
        self._anew = True

    def rolled_back(self) -> None:
        """Etcd has the keys of an earlier time: one that was taken back may stand again."""
        self._uncertain = True

    def follow(self, view: View, actions: list[acts.Action], now: float) -> None:
        """Write what changed in more than its times. A stall dies with its generation."""
        current, (anew, self._anew) = view.generation, (self._anew, False)
        if self._stall is not None and (current is None or current.key != self._stall[0].key):
            self._stall = None
        uncertain, self._uncertain = self._uncertain, False
        if self._stall is None:
            if self._written is not None or uncertain:
                self._written = None
                actions.append(acts.DropStall())
            return
        stall, since = self._stall
        if anew or self._written is None or outline(stall) != outline(self._written):
            self._written = stall
            actions.append(acts.PutStall(stall=aged(stall, now - since)))
