"""The etcd keys of a run, below its root (membership/records.py says what each holds). No other module names one.

A key is the root, which ends with a slash, followed by one of these. Names of nodes and machines and the ids of
incarnations have no slash.
"""

from __future__ import annotations

BOARD = "board/"
ROLL = "roll/"
PULSES = "pulses/"
HISTORY = "history/"
REFUSED = "refused/"
VERDICTS = "verdicts/"
GOODPUT = "goodput"
"""Key of where the time of the nodes went."""

LAST_END = "end.last"
"""Key of the newest end for some minutes after it, even if another job has begun under the id since."""

WHOLE = "board.whole/"
"""Prefix of whole generations of which the board has only the changes."""

TIERS = (BOARD, ROLL, PULSES, HISTORY, REFUSED, VERDICTS)
"""Prefixes of a run's keys."""

LISTED = "board"
"""Prefix of a listing of the board: of the board itself, and of the whole generations beside it."""

LEADER = BOARD + "leader"
GENERATION = BOARD + "generation"
PROPOSAL = BOARD + "proposal"
END = BOARD + "end"
SECRET = BOARD + "secret"

TOMBS = BOARD + "tombs/"
DOUBTS = BOARD + "doubts/"
FAULTS = BOARD + "faults/"
MEMBERS = ROLL + "members/"
REPORTS = ROLL + "reports/"
DRAINS = ROLL + "drains/"
QUARANTINE = ROLL + "quarantine/"
FLAPS = ROLL + "flaps/"
STALLS = ROLL + "stalls/"

LASTING = (GENERATION, PROPOSAL, END, SECRET, WHOLE, TOMBS, DRAINS, GOODPUT, HISTORY, VERDICTS)
"""Keys and prefixes of what stays without a lease once a job has ended, until the next one under its id: how it ended,
what came of it, and who was out or was to leave. All other keys end with a lease: a member's, or one of their own."""


def member(id: str) -> str:
    """Return the key of an incarnation's own record."""
    return MEMBERS + id


def report(id: str) -> str:
    """Return the key of an incarnation's report."""
    return REPORTS + id


def tomb(id: str) -> str:
    """Return the key that says that an incarnation is out."""
    return TOMBS + id


def doubt(id: str) -> str:
    """Return the key by which an incarnation is asked to answer."""
    return DOUBTS + id


def fault(id: str, number: str) -> str:
    """Return the key of an order to an incarnation to bring about a fault of its own. number: of the order."""
    return f"{FAULTS}{id}/{number}"


def drain(name: str) -> str:
    """Return the key by which a node is asked to leave."""
    return DRAINS + name


def quarantine(place: str) -> str:
    """Return the key that keeps a machine out."""
    return QUARANTINE + place


def flap(place: str) -> str:
    """Return the key of how often a machine was lost."""
    return FLAPS + place


def stall(id: str) -> str:
    """Return the key of what a node says of its ranks while they stand still."""
    return STALLS + id


def pulse(id: str) -> str:
    """Return the key of an incarnation's figures for people."""
    return PULSES + id


def refused(name: str) -> str:
    """Return the key of why a node did not pass its own checks."""
    return REFUSED + name


def history(number: int, attempt: int) -> str:
    """Return the key of how a generation came to be."""
    return f"{history_of(number)}{attempt}"


def history_of(number: int) -> str:
    """Return the prefix of the keys of all attempts at a generation."""
    return f"{HISTORY}{number:010d}."


def verdict(generation: str) -> str:
    """Return the key of what was found about a generation, given by its `key`."""
    number, _, attempt = generation.partition(".")
    return f"{verdicts_of(int(number))}{attempt}"


def verdicts_of(number: int) -> str:
    """Return the prefix of the keys of what was found about all attempts at a generation."""
    return f"{VERDICTS}{number:010d}."


def whole(key: str) -> str:
    """Return the key of the whole generation whose changes are in the record under `key`, of the board.

    key: with its root or without.
    """
    head, _, name = key.rpartition(BOARD)
    return f"{head}{WHOLE}{name}"


def split(root: str, key: str) -> tuple[str, str]:
    """Return (MEMBERS, "a@1") for a key of many, (LEADER, "") for a single key."""
    tier, _, rest = key.removeprefix(root).partition("/")
    kind, slash, name = rest.partition("/")
    return f"{tier}/{kind}{slash}", name
