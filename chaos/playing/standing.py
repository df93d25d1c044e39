"""When a job is left standing: it has not ended, and nothing happens in it any more, or nothing but talk.

Patience is how long any job may be silent, an outage, a restart and a slow step included. Nodes that go on writing
events may still never come to a step: forming one generation after another, or trying for ever what cannot work. They
have `CIRCLES` times as long, which is more than any part of the runtime tries anything for at the default patience.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from chaos.history.follow import Event, Picture

CIRCLES = 4.0
"""Times the patience for which events may come without one that brings the job on."""
GOING_ON = ("step.committed", "checkpoint.committed")
"""Events that do."""


@dataclass(slots=True)
class Standing:
    """Since when nobody has heard of a job, and since when it has made nothing. Times are of a monotonic clock.

    patience: seconds. heard, gone_on: at first, when the job was started. last: the newest event.
    """

    patience: float
    heard: float
    gone_on: float
    last: Event | None = None

    @classmethod
    def since(cls, now: float, patience: float) -> Standing:
        """Begin to watch a job that is started now."""
        return cls(patience=patience, heard=now, gone_on=now)

    def hear(self, events: Sequence[Event], now: float) -> None:
        """Take note of new events, in their order."""
        if events:
            self.heard, self.last = now, events[-1]
        if any(event.name in GOING_ON for event in events):
            self.gone_on = now

    def why(self, picture: Picture, running: Collection[str], now: float) -> str:
        """Return in words that the job stands, who runs on in it, where, and what came last; "" while it does not.

        running: names of the nodes whose agents have not ended.
        """
        if now - self.heard > self.patience:
            what = f"no node has written an event for {self.patience:g} s"
        elif now - self.gone_on > CIRCLES * self.patience:
            what = f"nodes write events, but none has made or saved a step for {CIRCLES * self.patience:g} s"
        else:
            return ""
        view = picture.generation
        where = "before its first generation" if view is None else f"in generation {view.number} of {_of(view.nodes)}"
        last = "there was none" if self.last is None else f"the last one is {self.last.name} of {self.last.node}"
        return f"{what}, and {_of(running)} ran on: it stands after step {picture.step}, {where}; {last}"


def _of(nodes: Collection[str]) -> str:
    return ", ".join(sorted(nodes)) or "nobody"
