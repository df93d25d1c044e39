"""What a script says about finding the rank that holds everybody up, or lies: `health=` of `elastic3d.run`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from elastic3d.errors import UsageError
from elastic3d.quantities import seconds, size

LEAST_STUCK = 1.0
"""Fewest seconds of silence that say anything: the record is looked at four times a second."""


RESTORE = 60.0
"""Seconds for which a rank may be idle while it gets its state, beyond those for which its store is tried."""


class Act(StrEnum):
    """What follows when a rank is found that holds everybody up."""

    ALL = "all"
    """The generation ends, and training goes on in another one."""
    LOG = "log"
    """It is reported, and nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How ranks that stand still, or compute wrongly, are found: `health=` of `elastic3d.run`.

    UsageError for values that make no sense.
    """

    stuck: float | str = "3s"
    """How long a rank may show no sign of progress while it neither computes nor reads, once it has made two steps, in
    seconds or as "3s", the default; at least 1 s. Ten times as long while it computes, and longer where its own steps
    have had longer gaps."""
    act: str = "all"
    """What follows: "all", the default, ends the generation, and training goes on without whoever holds it up; "log"
    only reports it."""
    audit: float | str = "off"
    """Share of the computing in which nodes repeat each other's micro-batches, such as "1%" or 0.01: a device that
    computes wrongly is found by it, named, and its machine left out (with `act="log"`, only named). "off", the
    default, for none."""
    evidence: int | str = "500MB"
    """What bundles of evidence may take in the folder `events=`, in bytes or as "500MB", the default."""

    def __post_init__(self) -> None:
        if seconds(self.stuck, f"{_OF}: stuck") < LEAST_STUCK:
            raise UsageError(
                f"{_OF}(stuck={self.stuck!r}): give at least {LEAST_STUCK:g}s; with less, any pause counts"
            )
        if self.act not in set(Act):
            raise UsageError(f"{_OF}(act={self.act!r}): give one of {', '.join(Act)}")
        size(self.evidence, f"{_OF}: evidence")
        audit_budget(self.audit)


_OF = "elastic3d.Health"
WORDS = {"on": "all", "log": "log"}
"""What `health=` may be for short, besides "off"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watching:
    """A `Health`, read. stuck: seconds. act: whether verdicts are acted upon. evidence: bytes. audit: share of the
    computing that audits may take, 0.0 for none. restore: seconds for which a rank may be idle while it gets its state.
    """

    stuck: float = 3.0
    act: bool = True
    evidence: int = 500_000_000
    restore: float = RESTORE
    audit: float = 0.0


def watching(given: Health | str, *, patience: float = 0.0) -> Watching | None:
    """Return how ranks are watched, None for "off"; UsageError for anything but a `Health`, "on", "log" or "off".

    patience: seconds for which a store is tried that does not answer.
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
    )


def audit_budget(value: float | str) -> float:
    """Return the share of the computing that audits may take, 0.0 for "off"; UsageError for anything that is none."""
    share = 0.0 if value == "off" else value
    if isinstance(share, str):
        percent = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?) ?%", share.strip())
        share = float(percent[1]) / 100 if percent else -1.0
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share <= 1:
        raise UsageError(
            f"{_OF}(audit={value!r}): give a share of the computing, such as '1%' or 0.01, at most '100%', or 'off'"
        )
    return float(share)
