"""Members of a job against a real etcd, several in one process: simulated trainers, everything else real."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from chaos.simulation.standstills import judge
from elastic3d.etcd import EtcdClient
from elastic3d.membership import actions as acts
from elastic3d.membership import events as e
from elastic3d.membership.driver.links import Links
from elastic3d.membership.driver.member import Member
from elastic3d.membership.policy import Policy
from elastic3d.membership.records import MemberRecord, Pulse, ReasonToGoBack
from elastic3d.planner import Plan, plan
from elastic3d.shortfall import MemoryBound
from elastic3d.trust.agreement import SecretNews
from elastic3d.trust.listening import Refusal
from elastic3d.trust.secret import obtain
from elastic3d.values import Generation, Layout, ModelProfile, Node, Slot

PROFILE = ModelProfile(blocks=8, parameters=1, micro_batches=8, micro_batch=1, digest="job")
POLICY = Policy(minimum=1, maximum=4, lease=2, grace=1, first_gather=0.5, gather=0.1, orphan=4, peer_lost=3)

Connect = Callable[[], EtcdClient]


def planner(
    nodes: int,
    record: MemberRecord,
    present: Layout | None,
    speeds: Sequence[float] = (),
    bound: MemoryBound | None = None,
    counts: Collection[int] | None = None,
) -> Plan:
    """Plan like a job without a layout request."""
    assert record.profile is not None
    return plan(nodes, len(record.node.slots), record.profile, Layout(), previous=present, speeds=speeds, counts=counts)


def still(running: Generation | None) -> Pulse:
    """Return the pulse of a member that makes no steps."""
    return Pulse(state="active", generation=0, every=0)


class Hand:
    """A member whose trainers obey at once, and that rejoins when told to.

    went: every generation it ran. heard: each change of whether etcd answers. trusted: news of the run's secret.
    acted_on: the threads it was called on. refused: the refusals its links reported.
    """

    def __init__(
        self,
        connect: Connect,
        root: str,
        name: str,
        policy: Policy,
        profile: ModelProfile = PROFILE,
        pulse: Callable[[Generation | None], Pulse] = still,
        end_seen: int | None = None,
        labels: dict[str, str] | None = None,
    ) -> None:
        self.name, self.root, self.policy = name, root, policy
        self.running: Generation | None = None
        self.went: list[Generation] = []
        self.exit: acts.Exit | None = None
        self.heard: list[bool] = []
        self.noted: list[e.Event] = []
        self.acted_on: set[str] = set()
        self.client = connect()
        self.secret = obtain(self.client, root)
        self.trusted: list[SecretNews] = []
        self.refused: list[Refusal] = []
        self.links = Links(
            "127.0.0.1", lambda event: self.member.tell(event), secret=self.secret, refused=self.refused.append
        )
        self._pulse, self._end_seen = pulse, end_seen
        node = Node(
            name=name,
            incarnation=secrets.token_hex(4),
            address="127.0.0.1",
            slots=(Slot(tile_port=1),),
            heartbeat_port=self.links.port,
            labels=labels or {},
        )
        self.record = MemberRecord(node=node, profile=profile, minimum=policy.minimum, maximum=policy.maximum)
        self._join()

    def _join(self, *, again: bool = False, said: tuple[ReasonToGoBack, ...] = ()) -> None:
        self.member = Member(
            self.client,
            self.root,
            self.record,
            self.policy,
            planner,
            self._act,
            pulse=lambda: self._pulse(self.running),
            heard=self.heard.append,
            noted=self.noted.append,
            secret=self.secret,
            trusted=self._trust,
            judge=judge,
            said=said,
        )
        self.member.start(self.links, again=again, end_seen=self._end_seen)

    def _trust(self, news: SecretNews) -> None:
        self.trusted.append(news)
        self.secret = news.secret
        self.links.set_secret(news.secret)

    def rejoin(self) -> None:
        """Rejoin as an owner does after Exit(rejoin=True)."""
        assert self.exit is not None
        assert self.exit.rejoin, self.exit.detail
        self.exit = None
        self.member.close()
        self.record = replace(self.record, node=replace(self.record.node, incarnation=secrets.token_hex(4)))
        self._join(again=True, said=self.member.said)

    @property
    def id(self) -> str:
        """This incarnation."""
        return self.record.node.id

    @property
    def there(self) -> bool:
        """Whether etcd answers, by the latest report."""
        return not self.heard or self.heard[-1]

    def troubles(self) -> list[str]:
        """Return the reported troubles with etcd, in order, "" for each recovery."""
        return [event.reason for event in self.noted if isinstance(event, e.EtcdImpaired | e.EtcdLost)]

    def of_roster(self) -> list[e.Event]:
        """Return the events of the roster that reached this member."""
        return [event for event in self.noted if isinstance(event, e.MemberPut | e.ReportPut | e.ReportGone)] + [
            event for event in self.noted if isinstance(event, e.Listed) and event.tier is e.Tier.ROSTER
        ]

    def die(self) -> None:
        """End like a killed process: the port refuses, nothing more is written, the lease expires."""
        self.links.close()
        self.member.stop()
        self.client.close()

    def leave(self) -> None:
        """End as on SIGTERM."""
        self.member.tell(e.LeaveAsked())
        self.member.settle()
        self.close()

    def close(self) -> None:
        """End cleanly, if it has not ended."""
        self.member.close()
        self.links.close()
        self.client.close()

    def _act(self, action: acts.Local) -> None:
        self.acted_on.add(threading.current_thread().name)
        match action:
            case acts.Prepare():
                self.member.tell(e.TrainersPrepared(key=action.generation.key))
            case acts.StartTrainers():
                self.running = action.generation
                self.went.append(action.generation)
            case acts.AskLeave():
                self.member.tell(e.Left(key=action.key, step=5))
            case acts.Stop():
                self.running = None
            case acts.Exit():
                self.running, self.exit = None, action
            case _:
                pass


class Crew:
    """The members of one run id. Their simulated steps carry votes, and end when a peer's trainer has gone."""

    def __init__(self, connect: Connect, policy: Policy = POLICY) -> None:
        self.connect, self.policy = connect, policy
        self.root = f"/test/{secrets.token_hex(4)}/"
        self.all: dict[str, Hand] = {}
        self.client = connect()
        self._step = 0
        self._over = threading.Event()
        self._steps = threading.Thread(target=self._train, daemon=True)
        self._steps.start()

    def start(self, *names: str, profile: ModelProfile = PROFILE, connect: Connect | None = None) -> None:
        """Start members of these names; they arrive in this order."""
        for name in names:
            self.all[name] = one = Hand(connect or self.connect, self.root, name, self.policy, profile)
            wait(lambda one=one: f"roll/members/{one.id}" in self.records() or one.exit is not None, 10)  # type: ignore[misc]

    def close(self) -> None:
        """End all of it."""
        self._over.set()
        self._steps.join()
        for one in self.all.values():
            one.close()
        self.client.close()

    def worlds(self) -> set[tuple[int, str]]:
        """Return the running generations as (number, names in rank order), over all members."""
        running = [one.running for one in list(self.all.values())]
        return {(g.number, "".join(node.name for node in g.nodes)) for g in running if g is not None}

    def trains(self, names: str, number: int, seconds: float = 0.1) -> None:
        """Wait until exactly these nodes run this generation, `names` in rank order."""

        def there() -> bool:
            run = {name for name, one in self.all.items() if one.running is not None}
            return self.worlds() == {(number, names)} and run == set(names)

        def said() -> str:
            exits = {name: one.exit.detail for name, one in self.all.items() if one.exit is not None}
            return f"{self.worlds()}, wanted {number} {names}; ended: {exits}; {sorted(self.records())}"

        wait(there, seconds, said)

    def goes_on(self, names: str, number: int, seconds: float) -> None:
        """Fail unless these nodes run this generation all the time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.worlds() == {(number, names)}, self.worlds()
            assert all(self.all[name].running is not None for name in names)
            time.sleep(0.02)

    def registered(self) -> str:
        """Return the names of members whose key stands, and "*" if somebody leads."""
        keys = self.records()
        names = [key.removeprefix("roll/members/").partition("@")[0] for key in keys if key.startswith("roll/members/")]
        return "".join(names) + "*" * ("board/leader" in keys)

    def all_registered(self, names: str, seconds: float) -> None:
        """Wait until these are registered in etcd, and one of them leads."""
        wait(lambda: self.registered() == f"{names}*", seconds, lambda: self.registered())

    def leader(self) -> Hand:
        """Return the one that leads."""
        return self.all[json.loads(self.records()["board/leader"])["name"]]

    def records(self) -> dict[str, bytes]:
        """Return the records in etcd."""
        items, _revision = self.client.range(self.root)
        return {item.key.removeprefix(self.root): item.value for item in items}

    def _train(self) -> None:
        """Make a step every tenth of a second if all ranks of a generation are there."""
        while not self._over.wait(0.1):
            self._step += 1
            for one in list(self.all.values()):
                running = one.running
                if running is None:
                    continue
                ranks = [self.all.get(node.name) for node in running.nodes]
                if all(rank is not None and rank.running == running for rank in ranks):
                    away = not any(rank.there for rank in ranks if rank is not None)
                    one.member.tell(e.StepReported(step=self._step, etcd_away=away))
                elif any(rank is None or (rank.running is None and running in rank.went) for rank in ranks):
                    one.running = None
                    one.member.tell(e.TrainerLostPeer(key=running.key))


@contextmanager
def in_training(connect: Connect, policy: Policy = POLICY, how: Connect | None = None) -> Iterator[Crew]:
    """Yield three training members, a, b and c; `how` they connect, if not as their observer does."""
    crew = Crew(connect, policy)
    try:
        crew.start("a", "b", "c", connect=how)
        crew.trains("abc", 1, 10)
        yield crew
    finally:
        crew.close()


def wait(condition: Callable[[], object], seconds: float, said: Callable[[], str] = lambda: "") -> None:
    """Wait until `condition` holds; fail, with what `said` returns, if it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {said()}"
        time.sleep(0.01)
