"""Which nodes compute more slowly than the others, as those that watch the steps found: plain values.

Every node that trains sees the same sheets with each step and comes to the same finding, so that none of them has to
be asked. What is done about it is the leader's decision (`machine/balance`), which may be a spare and see no steps
itself: the node of rank 0 puts the finding into its report, with what it measured of steps and changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowness:
    """How slow a node is. rho: its work takes so many times as long as the others'; above 1.

    kind: what is slow about it, in the finder's words, such as "compute", "data", "host" or "link". since: the step
    from which on it was.
    """

    rho: float
    kind: str
    since: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedReport:
    """What the node of rank 0 says about the speed of the generation `key`.

    slow: by node's id; empty for a generation all of whose nodes were found to be well. step_seconds: how long its
    steps take, change_seconds: what the last planned changes cost in time in which no step was made, start_seconds: how
    long it took from the generation's record to its first step; 0.0 if not known.
    """

    key: str
    slow: dict[str, Slowness] = field(default_factory=dict)
    step_seconds: float = 0.0
    change_seconds: float = 0.0
    start_seconds: float = 0.0
