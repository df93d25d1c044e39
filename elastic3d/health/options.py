"""What a script says of ranks that stand still, are slow, or lie: `health=` of `elastic3d.run`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from elastic3d.errors import UsageError
from elastic3d.health.numerics import LATEST, ROLLBACK_STEPS, NonFinite, Spike
from elastic3d.quantities import seconds, size

LEAST_STUCK = 1.0
"""Fewest seconds of silence that say anything: the record is looked at four times a second."""

LEAST_SLOW, MOST_SLOW = 1.05, 100.0
"""Bounds of `Health.slow`: below, it is noise that is measured."""

RESTORE = 60.0
"""Seconds for which a rank may be idle while it gets its state, beyond those for which its store is tried."""


class Act(StrEnum):
    """What follows when a rank is found that holds everybody up."""

    ALL = "all"
    """The generation ends, and training goes on in another one."""
    LOG = "log"
    """It is reported, and nothing else."""


class Balancing(StrEnum):
    """What follows when a node is slow."""

    ON = "on"
    """A planned change that pays."""
    LOG = "log"
    """It is reported, and nothing else."""


class Exhaustion(StrEnum):
    """What follows when memory runs out."""

    OFF = "off"
    """The same layout is tried again."""
    LOG = "log"
    """The same, and what would be done is reported."""
    RECOMPUTE = "recompute"
    """A layout that needs less, or more that is computed again in the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How ranks that stand still, are slow, or compute wrongly are found: `health=` of `elastic3d.run`.

    UsageError for values that make no sense.
    """

    stuck: float | str = "3s"
    """How long a rank may show no sign of progress while it neither computes nor reads, once it has made two steps, in
    seconds or as "3s", the default; at least 1 s. Ten times as long while it computes, and longer where its own steps
    have had longer gaps."""
    act: str = "all"
    """What follows: "all", the default, ends the generation, and training goes on without whoever holds it up; "log"
    only reports it."""
    audit: float | str = "1%"
    """Share of the computing in which nodes repeat each other's micro-batches, such as "1%", the default, or 0.01: a
    device that computes wrongly is found by it, named, and its machine left out (with `act="log"`, only named). "off"
    for none. Where nobody can repeat what a rank computes, with dp 1 for one, `audit.off` and `status` say so."""
    at_rest: float | str = "0.5%"
    """Share of the time for looking at state that nobody writes to, such as "0.5%", the default, or 0.005: parameters
    and the optimizer's state may lose bits in memory. With it go checks that cost next to nothing: whether all ranks
    leave a vote with one outcome, and pieces of the optimizer's updates that another node computes again. "off" for
    none of these."""
    numerics: str = "off"
    """What follows when the loss or the gradient of a step is not finite: "skip" leaves out the micro-batches that it
    comes from, for good, and makes the step of the others; "step" skips its update, as `run.step(skip_nonfinite=True)`
    does; "stop" ends the run and says what it comes from; "off", the default, makes the step as a plain script does.
    With the first three, and without `clip`, every gradient is looked at before its update."""
    spike: str = "log"
    """What follows when the loss jumps far above the last 128 for three of five steps: "log", the default, reports it;
    "rollback" goes back to a state of before, and leaves out the steps in between, at most three times in 10,000 steps;
    "off" for nothing."""
    rollback_steps: int = ROLLBACK_STEPS
    """How many steps `spike="rollback"` goes back, 100 by default; in a young run at most half of what it has made."""
    slow: float | str = 1.15
    """How many times as long as on the other nodes the same work takes on a node that counts as slow; from 1.05 to 100,
    1.15 by default. "off" measures nothing."""
    evidence: int | str = "500MB"
    """What bundles of evidence may take in the folder `events=`, in bytes or as "500MB", the default."""
    oom: str = "recompute"
    """What follows when memory runs out on a rank: "recompute", the default, goes on in a layout that needs less, or
    with blocks that are computed again in the backward pass, where the script leaves any of that open; no bit changes
    by it, and the steps take longer. "log", and `act="log"`, only report what would be done; "off" does not even that.
    A smaller micro_batch, which would change bits, is never chosen: it is part of what the run's samples and its state
    are numbered by."""
    balance: str = "on"
    """What is done about slow nodes: "on", the default, lets a spare take a slow node's place, or gives its stage less
    to compute, once that pays; "log" only reports what would be done, and so does `act="log"`. On GPUs it is only
    reported, whatever is given here: no job on several of them has been seen yet."""

    def __post_init__(self) -> None:
        if seconds(self.stuck, f"{_OF}: stuck") < LEAST_STUCK:
            raise UsageError(
                f"{_OF}(stuck={self.stuck!r}): give at least {LEAST_STUCK:g}s; with less, any pause counts"
            )
        if self.act not in set(Act):
            raise UsageError(f"{_OF}(act={self.act!r}): give one of {', '.join(Act)}")
        if self.numerics not in set(NonFinite):
            raise UsageError(f"{_OF}(numerics={self.numerics!r}): give one of {', '.join(NonFinite)}")
        if self.spike not in set(Spike):
            raise UsageError(f"{_OF}(spike={self.spike!r}): give one of {', '.join(Spike)}")
        steps = self.rollback_steps
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < LATEST:
            raise UsageError(f"{_OF}(rollback_steps={steps!r}): give a number of steps, at least {LATEST}")
        size(self.evidence, f"{_OF}: evidence")
        audit_budget(self.audit)
        share(self.at_rest, "at_rest", "time")
        slow_factor(self.slow)
        if self.oom == "micro_batch":
            raise UsageError(
                f"{_OF}(oom='micro_batch'): a run keeps its micro_batch, by which its samples, its random numbers and "
                "its sums are numbered; another one gives other bits. Give 'recompute', or begin a new run with a "
                "smaller micro_batch="
            )
        if self.oom not in set(Exhaustion):
            raise UsageError(f"{_OF}(oom={self.oom!r}): give one of {', '.join(Exhaustion)}")
        if self.balance not in set(Balancing):
            raise UsageError(f"{_OF}(balance={self.balance!r}): give one of {', '.join(Balancing)}")


_OF = "elastic3d.Health"
WORDS = {"on": "all", "log": "log"}
"""What `health=` may be for short, besides "off"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watching:
    """A `Health`, read. stuck: seconds. act: whether verdicts are acted upon. evidence: bytes. audit: share of the
    computing that audits may take, 0.0 for none. at_rest: share of the time for looking at state at rest, 0.0 for no
    such checks. slow: from which factor on a node is, 0.0 for never. balance: whether anything is done about slow
    nodes, if verdicts are acted upon. restore: seconds for which a rank may be idle while it gets its state. numerics,
    spike: what follows when a step is not finite, or its loss jumps up. rollback_steps: that a rollback goes back. oom:
    what follows when memory runs out.
    """

    stuck: float = 3.0
    slow: float = 1.15
    act: bool = True
    evidence: int = 500_000_000
    restore: float = RESTORE
    audit: float = 0.01
    at_rest: float = 0.005
    numerics: NonFinite = NonFinite.OFF
    spike: Spike = Spike.LOG
    rollback_steps: int = ROLLBACK_STEPS
    balance: bool = True
    oom: Exhaustion = Exhaustion.RECOMPUTE


def watching(given: Health | str, *, patience: float = 0.0, device: str = "cpu") -> Watching | None:
    """Return how ranks are watched, None for "off"; UsageError for anything but a `Health`, "on", "log" or "off".

    patience: seconds for which a store is tried that does not answer. device: the kind that trainers compute on; on any
    but the CPU, what would be done about slow nodes is only reported.
    """
    if given == "off":
        return None
    if isinstance(given, str) and given in WORDS:
        given = Health(act=WORDS[given])
    if not isinstance(given, Health):
        raise UsageError(
            f"elastic3d.run(health={given!r}): give 'on', 'log' or 'off', or an elastic3d.Health, such as "
            "Health(stuck='10s')"
        )
    return Watching(
        stuck=seconds(given.stuck, f"{_OF}: stuck"),
        act=given.act == Act.ALL,
        evidence=size(given.evidence, f"{_OF}: evidence"),
        restore=RESTORE + patience,
        audit=audit_budget(given.audit),
        at_rest=share(given.at_rest, "at_rest", "time"),
        numerics=NonFinite(given.numerics),
        spike=Spike(given.spike),
        rollback_steps=given.rollback_steps,
        slow=slow_factor(given.slow),
        balance=given.balance == Balancing.ON and device == "cpu",
        oom=Exhaustion(given.oom),
    )


def shared(watching: Watching | None) -> tuple[str, ...]:
    """Return what all nodes of a job must have in common of these options, as "name=value": they decide alike by it.

    The others say how a node looks at its own ranks.
    """
    if watching is None:
        return ("health=off",)
    return (
        f"act={'all' if watching.act else 'log'}",
        f"audit={watching.audit:g}",
        f"at_rest={watching.at_rest:g}",
        f"numerics={watching.numerics}",
        f"spike={watching.spike}",
        f"rollback_steps={watching.rollback_steps}",
        f"slow={'on' if watching.slow else 'off'}",
        f"oom={watching.oom}",
    )


def audit_budget(value: float | str) -> float:
    """Return the share of the computing that audits may take, 0.0 for "off"; UsageError for anything that is none."""
    return share(value, "audit", "computing")


def share(value: float | str, name: str, of: str) -> float:
    """Return a share, 0.0 for "off"; UsageError for anything that is none. name: of the option. of: of what it is."""
    given = 0.0 if value == "off" else value
    if isinstance(given, str):
        percent = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?) ?%", given.strip())
        given = float(percent[1]) / 100 if percent else -1.0
    if not isinstance(given, int | float) or isinstance(given, bool) or not 0 <= given <= 1:
        raise UsageError(
            f"{_OF}({name}={value!r}): give a share of the {of}, such as '1%' or 0.01, at most '100%', or 'off'"
        )
    return float(given)


def slow_factor(value: float | str) -> float:
    """Return from which factor on a node is slow, 0.0 for "off"; UsageError for anything that is none."""
    if value == "off":
        return 0.0
    if not isinstance(value, int | float) or isinstance(value, bool) or not LEAST_SLOW <= value <= MOST_SLOW:
        raise UsageError(
            f"{_OF}(slow={value!r}): give how many times as long a slow node takes, such as 1.15, from {LEAST_SLOW:g} "
            f"to {MOST_SLOW:g}, or 'off'"
        )
    return float(value)
