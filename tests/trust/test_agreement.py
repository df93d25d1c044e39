"""Which secret the members of a run use: whether it is lost, deleted, garbled or replaced, all end up with one."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from elastic3d.trust.agreement import Agreement, SecretNews, What
from elastic3d.trust.secret import readable

GARBAGE = (b"", b"hunter2", b"Z" * 64, b"5E" * 32)


@dataclass
class Etcd:
    """The key as etcd keeps it: each write has a revision, and everybody sees them in order, sooner or later."""

    value: bytes | None = None
    revision: int = 0
    clock: int = 0
    watches: list[deque[tuple[bytes | None, int]]] = field(default_factory=list)
    stood: list[bytes] = field(default_factory=list)

    def put(self, value: bytes | None) -> None:
        self.clock += 1
        self.value, self.revision = value, 0 if value is None else self.clock
        for watch in self.watches:
            watch.append((value, self.clock))

    def put_if(self, value: bytes, revision: int) -> None:
        if self.revision == revision:
            assert self.value is None or not readable(self.value), "a valid secret was overwritten"
            self.put(value)


class World:
    """Members of one run, of which at most one leads."""

    def __init__(self) -> None:
        self.etcd = Etcd()
        self.members: list[Agreement] = []
        self.heard: list[SecretNews] = []
        self.leader = 0
        self.drawn = 0

    def join(self) -> None:
        """Do what `obtain` does, and begin to watch; a newcomer that finds garbage waits."""
        if self.etcd.value is None:
            self.drawn += 1
            self.etcd.put_if(f"{self.drawn:064x}".encode(), 0)
        if self.etcd.value is not None and readable(self.etcd.value):
            self.members.append(Agreement(self.etcd.value.decode()))
            self.etcd.watches.append(deque([(self.etcd.value, self.etcd.revision)]))

    def hear(self, number: int) -> None:
        if self.etcd.watches:
            at = number % len(self.members)
            if self.etcd.watches[at]:
                news = self.members[at].saw(*self.etcd.watches[at].popleft())
                if news is not None:
                    self.heard.append(news)
            due = self.members[at].restore(leads=at == self.leader % len(self.members))
            if due is not None:
                self.etcd.put_if(due.secret.encode(), due.revision)

    def settle(self) -> None:
        for _ in range(1000):
            for number in range(len(self.members)):
                self.hear(number)
            if not any(self.etcd.watches):
                return
        raise AssertionError("it never settles")


STEP = st.one_of(
    st.tuples(st.just("join"), st.just(0)),
    st.tuples(st.just("wipe"), st.just(0)),
    st.tuples(st.just("garbage"), st.integers(0, len(GARBAGE) - 1)),
    st.tuples(st.just("foreign"), st.integers(0, 3)),
    st.tuples(st.just("lead"), st.integers(0, 4)),
    st.tuples(st.just("hear"), st.integers(0, 4)),
)


@given(st.lists(STEP, max_size=60))
def test_all_members_end_up_with_one_secret(steps: list[tuple[str, int]]) -> None:
    """Whatever is done to the key, and in whatever order it is noticed, one secret stands at the end."""
    world = World()
    world.join()
    for what, number in steps:
        match what:
            case "join":
                world.join()
            case "wipe":
                world.etcd.put(None)
            case "garbage":
                world.etcd.put(GARBAGE[number])
            case "foreign":
                world.etcd.put(f"f{number:063x}".encode())
            case "lead":
                world.leader = number
            case _:
                world.hear(number)
    world.settle()
    assert {member.secret.encode() for member in world.members} == {world.etcd.value}


def test_the_leader_writes_a_deleted_secret_again() -> None:
    """The secret that all use stands again, and nobody has to change anything."""
    world = World()
    for _ in range(3):
        world.join()
    before = world.etcd.value
    world.etcd.put(None)
    world.settle()
    assert world.etcd.value == before
    assert world.heard == []


def test_the_first_secret_in_an_emptied_etcd_wins() -> None:
    """A newcomer wrote its own: the others adopt it, and report it."""
    world = World()
    for _ in range(3):
        world.join()
    world.etcd.put(None)
    world.join()
    theirs = world.etcd.value
    world.settle()
    assert world.etcd.value == theirs
    assert [news.what for news in world.heard] == [What.ADOPTED] * 3
    assert theirs is not None
    assert theirs.decode() not in repr(world.heard)
