"""The faults that the command line asks for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chaos.faults.fault import Fault, resolve
from chaos.faults.moment import Phase, When
from chaos.faults.orders import Announce, Drain, Join, Terminate
from chaos.faults.process import Continue, Flap, Kill, Stop
from chaos.history.follow import Picture, picture
from chaos.schedules.scenario import parse_drain, parse_join, parse_kill, parse_stop
from chaos.schedules.schedule import bounds, check
from elastic3d.errors import UsageError
from tests.chaos.made_up_events import a_death_and_a_join


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("1@20", Kill(node="node1", when=When(step=20))),
        ("node3@5", Kill(node="node3", when=When(step=5))),
        ("leader@20", Kill(node="leader", when=When(step=20))),
        ("stage0@g2", Kill(node="stage0", when=When(generation=2))),
    ],
)
def test_a_kill_names_a_node_and_a_moment(text: str, fault: Kill) -> None:
    """The node by number, name or role; the moment by step or generation."""
    assert parse_kill(text) == fault


@pytest.mark.parametrize("text", ["20", "@20", "1@", "1@-3", "1@x", "boss@3", "1@0", "", "1@2@3"])
def test_a_malformed_kill_is_refused_with_an_example(text: str) -> None:
    """The error quotes the input."""
    with pytest.raises(UsageError, match="--kill"):
        parse_kill(text)


def test_drains_and_stops_are_written_like_kills() -> None:
    """--drain and --stop accept and refuse the same as --kill."""
    assert parse_drain("1@20") == Drain(node="node1", when=When(step=20))
    assert parse_stop("leader@20") == Stop(node="leader", when=When(step=20))
    with pytest.raises(UsageError, match="--drain"):
        parse_drain("1")
    with pytest.raises(UsageError, match="--stop"):
        parse_stop("@3")


def test_a_role_is_refused_where_a_fixed_node_is_needed() -> None:
    """A metadata server belongs to one machine, and the node to resume must be the one that was stopped."""
    for fault in (Announce(node="leader", when=When(step=3)), Continue(node="stage0", when=When(step=3))):
        with pytest.raises(UsageError, match="by its number"):
            check([fault], nodes=4, steps=60)


def test_a_returning_node_is_counted_as_missing_meanwhile() -> None:
    """A stopped node is missing until it resumes; a flapping one is missing for a while."""
    stop, wake = Stop(node="node1", when=When(step=5)), Continue(node="node1", when=When(step=9))
    assert bounds([stop], 3) == (2, 3)
    assert bounds([stop, wake, Join(when=When(step=7))], 3) == (2, 4)
    assert bounds([Flap(node="node1", when=When(step=5))], 2) == (1, 2)
    assert bounds([Terminate(node="node0", when=When(step=5))], 1) == (1, 1)
    # A join that waits for the generation after a loss takes nobody's place before.
    lost = Kill(node="node0", when=When(step=18))
    assert bounds([lost, Join(when=When(generation=2))], 2) == (1, 3)
    assert bounds([lost, Join(when=When(event="peer.lost"))], 2) == (1, 3)
    assert bounds([Kill(node="node1", when=When(generation=2)), Join(when=When(step=4))], 2) == (1, 3)


def test_a_join_names_a_moment() -> None:
    """@STEP and nothing else."""
    assert parse_join("@40") == Join(when=When(step=40))
    for wrong in ("40", "1@40", "@", "@0"):
        with pytest.raises(UsageError, match="--join"):
            parse_join(wrong)


@pytest.mark.parametrize(
    ("kills", "joins", "message"),
    [
        (["1@60"], [], "never comes"),
        (["7@20"], [], "no such node"),
        (["1@20", "1@30"], [], "only once"),
        (["0@5", "1@5", "2@5", "3@5"], [], "leave at least one"),
        ([], ["@99"], "never comes"),
    ],
)
def test_impossible_faults_are_refused_before_anything_starts(kills: list[str], joins: list[str], message: str) -> None:
    """They are checked against four nodes and sixty steps."""
    faults: list[Fault] = [*map(parse_kill, kills), *map(parse_join, joins)]
    with pytest.raises(UsageError, match=message):
        check(faults, nodes=4, steps=60)


@pytest.mark.parametrize(
    ("kills", "joins", "expected"),
    [
        ([], [], (2, 4)),
        (["1@20"], ["@40"], (2, 4)),
        (["1@20"], ["@20"], (2, 4)),
        ([], ["@20"], (2, 5)),
        (["0@5", "1@5", "2@5"], [], (1, 4)),
    ],
)
def test_the_bounds_of_the_job_leave_room_for_every_fault(
    kills: list[str], joins: list[str], expected: tuple[int, int]
) -> None:
    """The maximum is the most nodes alive at once; the minimum is two where two are always left."""
    assert bounds([*map(parse_kill, kills), *map(parse_join, joins)], 4) == expected


def test_a_step_may_be_as_far_off_as_anybody_likes() -> None:
    """Whether the job comes to it is not known without an undisturbed run."""
    assert bounds([Kill(node="node1", when=When(step=10**400))], 3) == (2, 3)


def test_the_minimum_of_a_job_of_one_node_is_one() -> None:
    """It is never above the number of nodes started."""
    assert bounds([], 1) == (1, 1)


def test_roles_are_resolved_when_their_moment_comes() -> None:
    """The leader and stage 0 are whoever holds the role then."""
    now = picture(a_death_and_a_join())
    assert resolve("leader", now) == "node4"
    assert resolve("stage0", now) == "node0"
    assert resolve("node2", now) == "node2"
    assert resolve("leader", Picture()) is None


def test_a_moment_has_come_at_its_step_or_generation_or_later() -> None:
    """A poll may have missed the exact step."""
    now = picture(a_death_and_a_join())
    assert When(step=6).come(now)
    assert When(step=4).come(now)
    assert not When(step=7).come(now)
    assert When(generation=3).come(now)
    assert not When(generation=4).come(now)


def test_of_several_conditions_all_must_have_come() -> None:
    """A phase is no moment yet where an event or a step is asked for as well."""
    seen = {("trainer.started", 2): 1, ("checkpoint.committed", 1): 2}
    now = Picture(seen=seen)
    started = When(generation=2, phase=Phase.STARTED)
    assert started.come(now)
    assert replace(started, event="checkpoint.committed", count=2).come(now)
    assert not replace(started, event="checkpoint.committed", count=3).come(now)
    assert not replace(started, step=1).come(now)
