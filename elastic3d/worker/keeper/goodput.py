"""Where the time of the job's nodes goes, as this keeper hears of it: an account that is in etcd while this one leads.

Every keeper keeps what it heard lately. One that comes to lead takes the last leader's record, finds the moment that it
is as of among what it heard itself, and goes on from there: no clocks are compared. A keeper that was not there at that
moment, as a spare does not hear of steps, goes on from now, and what lies between is in no category. While it leads it
looks into the pulse of the node of rank 0 now and then.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from elastic3d.accounting.live_account import HEARD, Input, LiveAccount, NodesOutside, StepTold
from elastic3d.accounting.live_record import GoodputRecord
from elastic3d.accounting.recorded_events import SECOND, RecordedEvent
from elastic3d.accounting.spans import Category
from elastic3d.clock import SYSTEM, Clock
from elastic3d.errors import ConfigurationError
from elastic3d.etcd_keys import GOODPUT, PULSES
from elastic3d.membership import events as m
from elastic3d.membership.records import NewerSchema, Out, Pulse, decode, encode
from elastic3d.port import StepRecord
from elastic3d.values import Cause

EVERY = 10.0
"""Seconds from one record to the next, at least, unless a generation was sealed meanwhile."""

KEPT = 4_096
"""Events that are kept for the case that this keeper comes to lead: 2 MB, and an hour of a step a second. What the last
leader wrote is ten seconds old, unless etcd was away."""


class LiveGoodput:
    """The account of one keeper. Thread-safe. restarted: tells people why it could not be gone on with, once."""

    def __init__(self, node: str, restarted: Callable[[str], None], *, clock: Clock = SYSTEM) -> None:
        self._node, self._restarted, self._clock = node, restarted, clock
        self._lock = threading.Lock()
        self._heard: deque[Input] = deque(maxlen=KEPT)
        self._sealed: RecordedEvent | None = None
        self._census = _Census()
        self._account: LiveAccount | None = None
        self._before: Mapping[str, int] = {}
        self._base: Mapping[str, int] = {}
        self._counted = dict.fromkeys(map(str, Category), 0)
        self._wrote: tuple[float, int] | None = None
        self._asked = -EVERY
        self._number = 0
        self._said = False

    # What this keeper hears, on any of its threads.

    def observe(self, event: str, fields: Mapping[str, Any]) -> None:
        """Take an event of the journal. Never raises, nor blocks."""
        # Only the node of rank 0 writes down steps and their waits; `stepped` and `waited` have those of all.
        if event in HEARD and event not in ("step.committed", "steps.waited"):
            generation, rank = fields.get("generation"), fields.get("rank")
            self._hear(event, fields, generation if isinstance(generation, int) else 0, rank)

    def stepped(self, record: StepRecord) -> None:
        """Take a step of this node's first trainer."""
        fields = {"step": record.step, "seconds": record.seconds, "data": record.data, "copy": record.copy}
        self._hear("step.committed", fields, record.generation)

    def waited(self, generation: int, fields: Mapping[str, Any]) -> None:
        """Take what some steps before the last one were to the nodes of a generation, as `steps.waited` says it."""
        self._hear("steps.waited", fields, generation)

    def noted(self, event: m.Event) -> None:
        """Take what the membership hears: who is there, which only a leader hears, and who is lost."""
        for item in event.items if isinstance(event, m.Listed) else (event,):
            if isinstance(item, m.TombPut) and item.tomb.how is Out.DEAD and item.id in self._census.inside:
                self._hear("peer.lost", {"peer": item.id.rpartition("@")[0]}, 0)
        counts = self._census.noted(event)
        if counts is not None:
            with self._lock:
                self._put(NodesOutside(at=self._now(), joining=counts[0], leaving=counts[1]))

    def _hear(self, name: str, fields: Mapping[str, Any], generation: int, rank: int | None = None) -> None:
        with self._lock:
            self._put(
                RecordedEvent(
                    name=name, at=self._now(), node=self._node, generation=generation, rank=rank, fields=fields
                )
            )

    def _put(self, said: Input) -> None:
        self._heard.append(said)
        if isinstance(said, RecordedEvent) and said.name == "generation.sealed":
            self._sealed = said
        if self._account is not None:
            with self._harmless():
                self._account.take(said)

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        """Give the account up where it fails, and say so: it is kept beside training, which must go on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # whatever it is
            self._account = None
            self._tell(f"{type(error).__name__}: {error}; nothing is counted any more")

    def _now(self) -> int:
        return round(self._clock.monotonic() * SECOND)

    # What a leader does, on the member's writing thread.

    def resume(self, value: bytes | None) -> None:
        """Go on from what the leader before this one left; what cannot be read is told once, and begun anew."""
        record, why = None, ""
        try:
            record = None if value is None else decode(GoodputRecord, value, GOODPUT)
        except NewerSchema as error:
            with self._lock:
                self._account = None
            self._tell(f"{error}; until then nothing is counted")
            return
        except ConfigurationError as error:
            why = str(error)
        with self._lock, self._harmless():
            if record is None:
                late = self._sealed is not None and self._sealed.text("cause") != Cause.START
                why = why or ("there was no account of it in etcd" if late and not self._began_here() else "")
                self._account = self._anew()
            else:
                self._account = self._after(record)
            self._wrote = None
            self._before = record.by_category if record is not None else {}
            self._base = dict(self._counted)
        if why:
            self._tell(f"{why}: it is counted from now on")

    def due(self, *, last: bool) -> bytes | None:
        """Return the record if it is time to write it."""
        with self._lock:
            if self._account is None or not self._account.number:
                return None
            now = self._clock.monotonic()
            self._number = self._account.number
            if self._wrote is not None and not last:
                at, number = self._wrote
                if now - at < EVERY and number == self._number:
                    return None
            with self._harmless():
                return encode(self._account.record(self._now(), self._clock.wall()))
            return None

    def asks(self) -> str:
        """Return the id of the node of rank 0 if this one leads without training, now and then, else ""."""
        now, trains = self._clock.monotonic(), self._census.first
        if self._account is None or self._account.trains or now - self._asked < EVERY:
            return ""
        self._asked = now
        return trains

    def told(self, value: bytes) -> None:
        """Take how far that node's trainers are; what cannot be read is told elsewhere."""
        try:
            pulse = decode(Pulse, value, PULSES)
        except ConfigurationError:
            return
        with self._lock:
            self._put(StepTold(at=self._now(), generation=pulse.generation, step=pulse.step))

    def resign(self) -> None:
        """Count no longer: another keeper leads."""
        self._count()
        with self._lock:
            self._account = None

    def wrote(self) -> None:
        """Take note that it was written."""
        self._wrote = self._clock.monotonic(), self._number

    def seconds(self) -> dict[str, float]:
        """Return the node-seconds that this keeper has counted by category, as far as it led; they never shrink."""
        self._count()
        return {name: spent / SECOND for name, spent in self._counted.items()}

    def _count(self) -> None:
        with self._lock:
            sums: Mapping[str, int] = {}
            if self._account is not None:
                with self._harmless():
                    sums = self._account.record(self._now(), 0.0).by_category
            for name, counted in self._counted.items():
                mine = self._base.get(name, 0) + sums.get(name, 0) - self._before.get(name, 0)
                self._counted[name] = max(counted, mine)

    def _began_here(self) -> bool:
        """Return whether this keeper heard of the run's first generation."""
        return any(
            isinstance(one, RecordedEvent) and one.name == "generation.sealed" and one.text("cause") == Cause.START
            for one in self._heard
        )

    def _anew(self) -> LiveAccount:
        account = LiveAccount(self._node)
        _replay(account, self._heard)
        return account

    def _after(self, record: GoodputRecord) -> LiveAccount:
        """Return the account that goes on from a record: at its own moment if that was heard here, else from now on."""
        heard = list(self._heard)
        names: tuple[str, ...] = ()
        for place, one in enumerate(heard):
            if not isinstance(one, RecordedEvent):
                continue
            if one.name == "generation.sealed" and one.whole("number") == record.number:
                names = one.names("nodes")
            if _is_moment(one, record):
                account = LiveAccount.resumed(record, self._node, one.at, names or self._names(record.number))
                _replay(account, heard[place + 1 :])
                return account
        # Whatever was sealed since counts from when this keeper heard of it.
        later = [
            place
            for place, one in enumerate(heard)
            if isinstance(one, RecordedEvent)
            and one.name == "generation.sealed"
            and (one.whole("number") or 0) > record.number
        ]
        at = heard[later[0]].at if later else self._now()
        account = LiveAccount.resumed(record, self._node, at, self._names(record.number))
        _replay(account, heard[later[0] :] if later else ())
        return account

    def _names(self, number: int) -> tuple[str, ...]:
        sealed = self._sealed
        return sealed.names("nodes") if sealed is not None and sealed.whole("number") == number else ()

    def _tell(self, detail: str) -> None:
        if not self._said:
            self._said = True
            self._restarted(detail)


def _is_moment(one: RecordedEvent, record: GoodputRecord) -> bool:
    if record.step < 0:
        return one.name == "generation.sealed" and one.whole("number") == record.number
    return one.name == "step.committed" and (one.generation, one.whole("step")) == (record.number, record.step)


def _replay(account: LiveAccount, heard: Iterable[Input]) -> None:
    for one in heard:
        account.take(one)


class _Census:
    """Which members the sealed generation has, by id, and which it does not have. For the member's thread.

    first: the member that holds rank 0, "" for none.
    """

    def __init__(self) -> None:
        self._members: set[str] = set()
        self.inside: set[str] = set()
        self.first = ""
        self._former: set[str] = set()
        self._counts = (0, 0)

    def noted(self, event: m.Event) -> tuple[int, int] | None:
        """Return how many newcomers and former members there are, None if that is as it was."""
        match event:
            case m.Listed(tier=m.Tier.ROSTER):
                self._members = {item.record.node.id for item in event.items if isinstance(item, m.MemberPut)}
            case m.Listed():
                for item in event.items:
                    if isinstance(item, m.GenerationPut):
                        self._seal(item)
            case m.GenerationPut():
                self._seal(event)
            case m.MemberPut():
                self._members.add(event.record.node.id)
            case m.MemberGone():
                self._members.discard(event.id)
            case _:
                return None
        outside = self._members - self.inside
        self._former &= self._members | self.inside
        before, self._counts = self._counts, (len(outside - self._former), len(outside & self._former))
        return self._counts if self._counts != before else None

    def _seal(self, event: m.GenerationPut) -> None:
        inside = {node.id for node in (*event.generation.nodes, *event.generation.spares)}
        self._former |= self.inside - inside
        self.inside = inside
        self.first = event.generation.nodes[0].id if event.generation.nodes else ""
