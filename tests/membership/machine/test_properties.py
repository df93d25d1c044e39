"""What must hold in every story: hypothesis draws stories, and shrinks those that fail.

A failure prints the story as commands that can be saved under tests/testdata/membership.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from tests.membership.story import ROOT, Story

NAMES = "abcdef"
QUIET = 90.0
"""Seconds after which everything must have settled: a leader's lease and grace, an orphan's wait, refused proposals,
the longest notice, the longest quarantine."""


def about(verb: str) -> st.SearchStrategy[str]:
    return st.sampled_from([f"{verb} {name}" for name in NAMES])


RUNS = st.sampled_from([f"run {seconds}" for seconds in (0.003, 0.01, 0.05, 0.2, 0.35, 1, 3, 6)])
EVENTS = st.one_of(
    about("start"),
    about("kill"),
    about("vanish"),
    about("leave"),
    about("fail"),
    about("error"),
    about("cut"),
    about("heal"),
    about("deaf"),
    about("stop"),
    about("wake"),
    about("revoke"),
    about("deafen"),
    st.sampled_from(["step", "step", "expire", "etcd away", "etcd back", "mend", "save"]),
    st.sampled_from([f"partition {' '.join(names)}" for names in ("a", "b", "ab", "ac", "abc", "cdef")]),
)
ORDERS = st.one_of(
    about("quarantine"),
    about("release"),
    about("undrain"),
    st.sampled_from(
        [f"{verb} {name} {time}" for verb in ("notice", "drain") for name in NAMES for time in (0.4, 3, 9)]
    ),
)
COMMANDS = st.lists(st.one_of(RUNS, EVENTS, ORDERS), max_size=24)
POLICIES = st.tuples(st.integers(1, 2), st.integers(2, 6), st.booleans(), st.integers(0, 2), st.integers(1, 2))


class Teller:
    """Passes random commands to a story, leaving out those that make no sense at the moment."""

    def __init__(self, minimum: int, maximum: int, beside: bool, flaps: int, multiple: int) -> None:
        self.story = Story()
        self.step = 0
        if not beside:
            self.tell("restart-mode")
        numbers = f"minimum={minimum} maximum={maximum} multiple_of={multiple}"
        self.tell(f"policy {numbers} orphan=5 tries=4 flaps={flaps} quarantine=4 flap_memory=30")

    def tell(self, command: str) -> None:
        self.story.tell(f"> {command}")

    def offer(self, command: str) -> None:
        """Pass the command on if it is possible now."""
        verb, *words = command.split()
        alive = {name: core for name, core in self.story.cores.items() if not core.exited}
        name = words[0] if words else ""
        match verb:
            case "start":
                possible = name not in self.story.cores
            case "fail" | "error":
                possible = name in alive and alive[name].running is not None
            case "kill" | "vanish" | "leave" | "cut" | "deaf":
                possible = name in alive
            case "stop" | "notice" | "revoke":
                possible = name in alive and name not in self.story.stopped
            case "wake":
                possible = name in self.story.stopped
            case "quarantine":
                command, possible = f"{command} 20", True
            case "drain" | "undrain" | "release" | "partition" | "deafen" | "mend" | "save":
                possible = True
            case "expire":
                possible = not self.story.away
            case "step":
                self.step += 1
                command, possible = f"step {self.step}", True
            case _:
                possible = name in alive or verb in ("etcd", "run")
        if possible:
            self.tell(command)

    def settle(self) -> None:
        """Repair everything, and let time pass."""
        if self.story.away:
            self.tell("etcd back")
        self.tell("mend")
        for name in sorted(self.story.stopped & self.story.cores.keys()):
            self.tell(f"wake {name}")
        for name in sorted(self.story.cut & self.story.cores.keys()):
            self.tell(f"heal {name}")
        self.tell(f"run {QUIET}")


def check(teller: Teller) -> None:
    """Assert everything that must hold of a settled story."""
    story = teller.story
    numbers = [generation.number for generation in story.sealed]
    assert numbers == sorted(set(numbers)), "sealed numbers grow strictly"
    for generation in story.sealed:
        names = [node.name for node in (*generation.nodes, *generation.spares)]
        assert len(names) == len(set(names)), "a generation holds each node once"
        assert len(generation.nodes) >= story.policy.minimum
        assert len(generation.nodes) <= story.policy.maximum
        assert len(generation.nodes) % story.policy.multiple_of == 0
    alive = {core.record.node.id: core for core in story.cores.values() if not core.exited}
    if ROOT + "board/end" in story.keys.items:
        assert not alive, "everybody goes when the job is over"
        return
    allowed = story.policy.allowed(len(alive))
    if not allowed:
        return
    current = story.generation
    assert current is not None
    assert len(current.nodes) == allowed, "all who can take part do"
    for node in current.nodes:
        assert node.id in alive, f"{node.name} is active, and dead"
    for core in alive.values():
        name = core.record.node.name
        trainers = {key: state for key, state in story.trainers[name].items() if state != "dead"}
        assert core.view.generation == current, f"{name} agrees"
        assert not core.report.silent, f"{name} hears all its neighbours"
        assert (core.view.roster is not None) == core.leads, f"{name} watches the roster if it leads"
        if core.view.roster is not None:
            assert core.view.roster.members.keys() == alive.keys()
        if core.view.active(core.record.node.id):
            assert core.running == current, f"{name} trains"
            assert trainers == {current.key: "running"}, f"{name} has these trainers and no others"
        else:
            assert trainers == {}, f"{name} is a spare"
    assert sum(core.leads for core in alive.values()) == 1, "one leads"


def play(policy: tuple[int, int, bool, int, int], commands: list[str]) -> None:
    teller = Teller(*policy)
    try:
        for command in commands:
            teller.offer(command)
        teller.settle()
        check(teller)
        sealed = len(teller.story.sealed)
        teller.tell(f"run {QUIET}")
        assert len(teller.story.sealed) == sealed, "a quiet job never re-forms"
        check(teller)
    finally:
        note("\n".join(teller.story.lines))


OPTIONS = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}


@settings(max_examples=60, **OPTIONS)
@given(POLICIES, COMMANDS)
def test_every_story_ends_in_one_generation(policy: tuple[int, int, bool, int, int], commands: list[str]) -> None:
    """Once it is quiet, all who are alive train together in one generation, and stay in it."""
    play(policy, ["start a", "start b", "start c", "run 3", *commands])


@settings(max_examples=30, **OPTIONS)
@given(POLICIES, COMMANDS)
def test_every_beginning_ends_in_one_generation(policy: tuple[int, int, bool, int, int], commands: list[str]) -> None:
    """The same with faults before the first generation."""
    play(policy, commands)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=3000, **OPTIONS)
@given(POLICIES, COMMANDS)
def test_many_stories_end_in_one_generation(policy: tuple[int, int, bool, int, int], commands: list[str]) -> None:
    """The first of these, for longer."""
    play(policy, ["start a", "start b", "start c", "run 3", *commands])
