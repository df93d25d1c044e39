"""Where the time of each node went: every second of every node that is held is in exactly one category."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum


class Spent(StrEnum):
    """What a node's time went to."""

    USEFUL = "useful"
    """Steps that count."""
    REPEATED = "repeated"
    """Steps that were made and lost, or were cut short."""
    RECOVERY = "recovery"
    """From a loss to the next step: noticing, forming, building, loading."""
    CHANGE = "change"
    """The pause of those that train while others join or leave as planned."""
    SAVING = "saving"
    """What snapshots and checkpoints hold training up."""
    JOINING = "joining"
    """A new node's start, until it is taken in."""
    SPARE = "spare"
    """Waiting because no layout, or no whole replica, uses it."""
    LEAVING = "leaving"
    """Still held, but told to leave and gone from the job."""
    WAITING = "waiting"
    """Too few nodes are held for any layout."""


IDLE = (Spent.JOINING, Spent.SPARE, Spent.LEAVING, Spent.WAITING)


class Place(StrEnum):
    """What a held node is to the job."""

    JOINING = "joining"
    ACTIVE = "active"
    SPARE = "spare"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What became of a job. node_seconds: by category. held: node-seconds in all. steps: those that count.

    training: seconds in which those steps were made. possible: seconds in which enough nodes for any layout were held.
    curve: steps that count so far, by time.
    """

    policy: str
    node_seconds: dict[Spent, float]
    held: float
    steps: float
    training: float
    possible: float
    curve: tuple[tuple[float, float], ...]

    @property
    def effective_training_time(self) -> float:
        """Share of the time in which training was possible that went to steps that count (ETTR; Kokolis et al. 2024,
        "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", arXiv 2410.21680, section 2)."""
        return self.training / self.possible if self.possible else 0.0


@dataclass(slots=True)
class _Step:
    node_seconds: float
    seconds: float


class Ledger:
    """Takes what happens to a job in order of time. enough: the fewest nodes that any layout can use."""

    def __init__(self, policy: str, enough: int) -> None:
        self._policy, self._enough = policy, enough
        self._places: dict[int, Place] = {}
        self._counts: Counter[Place] = Counter()
        self._totals = dict.fromkeys(Spent, 0.0)
        self._held = self._possible = self._now = 0.0
        self._phase: Spent = Spent.JOINING
        self._bucket = self._seconds = 0.0
        self._steps: list[_Step] = []
        self._lost: dict[int, _Step] = {}
        self._curve: list[tuple[float, float]] = []

    @property
    def steps(self) -> int:
        """How many count so far."""
        return len(self._steps)

    @property
    def training(self) -> bool:
        """Whether a step is being made."""
        return self._phase is Spent.USEFUL

    def at(self, now: float) -> None:
        """Let time pass."""
        passed = now - self._now
        assert passed >= -1e-9, "time went back"
        self._now = now
        if passed <= 0.0 or not self._places:
            return
        held, counts, totals = len(self._places), self._counts, self._totals
        self._held += passed * held
        if held < self._enough:
            totals[Spent.WAITING] += passed * held
            return
        self._possible += passed
        totals[Spent.JOINING] += passed * counts[Place.JOINING]
        totals[Spent.SPARE] += passed * counts[Place.SPARE]
        totals[Spent.LEAVING] += passed * counts[Place.LEAVING]
        if self._phase is Spent.USEFUL:
            self._bucket += passed * counts[Place.ACTIVE]
            self._seconds += passed
        else:
            totals[self._phase] += passed * counts[Place.ACTIVE]

    # Nodes.

    def arrive(self, host: int, now: float) -> None:
        """A node is held from now on."""
        self.at(now)
        self._put(host, Place.JOINING)

    def depart(self, host: int, now: float) -> bool:
        """A node is not held any longer; return whether it was training, or about to."""
        self.at(now)
        place = self._places.pop(host, None)
        if place is not None:
            self._counts[place] -= 1
        return place is Place.ACTIVE

    def place(self, host: int, place: Place, now: float) -> None:
        """A held node becomes this."""
        self.at(now)
        if host in self._places:
            self._put(host, place)

    def place_all(self, active: Collection[int], spare: Collection[int], now: float) -> None:
        """A generation has these nodes; others stay what they are, unless they were one of them."""
        self.at(now)
        for host, before in self._places.items():
            if host in active:
                self._put(host, Place.ACTIVE)
            elif host in spare or before is Place.ACTIVE:
                self._put(host, Place.SPARE)

    def _put(self, host: int, place: Place) -> None:
        before = self._places.get(host)
        if before is not None:
            self._counts[before] -= 1
        self._places[host] = place
        self._counts[place] += 1

    # Time of those that are active.

    def begin(self, now: float) -> None:
        """A step begins."""
        self.pause(Spent.REPEATED, Spent.USEFUL, now)

    def stepped(self, now: float, saving: float = 0.0) -> None:
        """The step is made; `saving` is the share of it that snapshots took, and the next step begins."""
        self.at(now)
        self._totals[Spent.SAVING] += self._bucket * saving
        self._steps.append(_Step(self._bucket * (1.0 - saving), self._seconds * (1.0 - saving)))
        self._bucket = self._seconds = 0.0
        self._curve.append((now, float(len(self._steps))))

    def pause(self, unfinished: Spent, phase: Spent, now: float) -> None:
        """What was done of an unfinished step goes to one category, and what comes to another."""
        self.at(now)
        self._totals[unfinished] += self._bucket
        self._bucket = self._seconds = 0.0
        self._phase = phase

    def go_on_from(self, step: int, now: float) -> None:
        """The steps behind this one are lost; or some that were count again, as a node with their state came back."""
        self.at(now)
        if step == len(self._steps):
            return
        self._curve.append((now, float(len(self._steps))))
        for number, lost in enumerate(self._steps[step:], start=step):
            self._totals[Spent.REPEATED] += lost.node_seconds
            self._lost[number] = lost
        del self._steps[step:]
        for number in range(len(self._steps), step):
            regained = self._lost.pop(number)
            self._totals[Spent.REPEATED] -= regained.node_seconds
            self._steps.append(regained)
        self._curve.append((now, float(step)))

    def close(self, now: float) -> Account:
        """Return the account at the end. What is done of the last step is none that counts."""
        self.pause(Spent.REPEATED, self._phase, now)
        totals = dict(self._totals)
        totals[Spent.USEFUL] += sum(step.node_seconds for step in self._steps)
        return Account(
            policy=self._policy,
            node_seconds=totals,
            held=self._held,
            steps=float(len(self._steps)),
            training=sum(step.seconds for step in self._steps),
            possible=self._possible,
            curve=tuple(self._curve),
        )
