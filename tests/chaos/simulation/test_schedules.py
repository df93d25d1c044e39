"""Random schedules against the production core break no invariant, whatever is done to a job."""

from __future__ import annotations

import pytest

from chaos.simulation.bugs import FOUND, Bug
from chaos.simulation.run import play, play_many, policy_of
from chaos.simulation.schedule import Command, Do, Schedule, draw, parse, shrink
from elastic3d.errors import UsageError

EACH = 250


@pytest.mark.parametrize(
    "first",
    [
        1,
        pytest.param(1 + EACH, marks=pytest.mark.long),
        *(pytest.param(n, marks=pytest.mark.slow) for n in range(1 + 2 * EACH, 1001, EACH)),
    ],
)
def test_a_thousand_schedules_break_no_invariant(first: int) -> None:
    """Every invariant holds at every event; a failure is printed minimised, to be pasted below."""
    tally = play_many(first, EACH, most=1)
    assert not tally.failures, "\n\n".join(outcome.report() for outcome in tally.failures)
    assert tally.counts["generations"] > EACH


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(10_000, 110_000, 5_000))
def test_a_hundred_thousand_schedules_break_no_invariant(first: int) -> None:
    """The same for 100,000."""
    tally = play_many(first, 5_000, most=1)
    assert not tally.failures, "\n\n".join(outcome.report() for outcome in tally.failures)


@pytest.mark.parametrize("bug", FOUND, ids=lambda bug: bug.when)
def test_a_schedule_that_once_failed_passes(bug: Bug) -> None:
    """What random schedules once found stays mended."""
    outcome = play(bug.schedule)
    assert not outcome.violations, outcome.report()


def test_a_node_cut_off_from_etcd_alone_holds_nobody_up() -> None:
    """Its neighbours hear it, but the generation that waits for it goes on without it after lease and grace.

    It is sealed into one more generation, since a lost lease is not a death; all others are prepared there.
    """
    schedule = parse("""
        job seed=2 members=4 minimum=1 maximum=4 multiple_of=1 beside=1
        4.000 lose n3 for 30
        8.000 kill n4
    """)
    outcome = play(schedule, lines=True)
    assert not outcome.violations, outcome.report()
    # The record is written again with the safe step.
    puts = {line.split()[6]: line for line in reversed(outcome.lines) if "GenerationPut" in line}
    seals = [puts[key] for key in sorted(puts)]
    assert ["n3" in line.partition("[")[2].partition("]")[0] for line in seals] == [True, True, False, True]
    policy = policy_of(schedule.job)
    assert float(seals[2].split()[0]) < 4.0 + policy.lease + policy.grace + 1.0


def test_a_conviction_that_is_heard_after_a_death_ends_what_was_formed_for_it() -> None:
    """The nodes that are left go on at once from a state that nobody vouches for, hear so, and begin again."""
    schedule = parse("""
        job seed=5 members=5 minimum=2 maximum=5
        2.600 lie n2 for 1
        2.650 kill n2
    """)
    outcome = play(schedule, lines=True)
    assert not outcome.violations, outcome.report()
    seals = [line.partition(" Seal ")[2].split(" [")[0] for line in outcome.lines if " Seal " in line]
    assert seals[-2:] == ["2.6 death", "3.7 lying"]
    assert parse(str(schedule)) == schedule


def test_a_newcomer_may_be_put_out_for_its_first_error() -> None:
    """It was a spare until then, and news is late: the next generation is sealed before it knows that it is out."""
    outcome = play(
        parse("""
            job seed=301139 members=7 minimum=1 maximum=8 multiple_of=1 beside=1 pp=2
            2.900 leave leader
            3.300 lag n1 for 3.4
            3.400 error n1
        """),
        lines=True,
    )
    assert not outcome.violations, outcome.report()
    assert any("Bury(id='n1@" in line and "before its first step" in line for line in outcome.lines)


def test_a_job_may_end_for_errors_of_one_node_while_another_is_stopped() -> None:
    """Without both of them there are too few nodes, and nobody knows when the stopped one goes on."""
    outcome = play(
        parse("""
            job seed=500572 members=3 minimum=3 maximum=4 multiple_of=1 beside=1
            2.000 broken n4
            2.000 pause n1 for 6.7
        """),
        lines=True,
    )
    assert not outcome.violations, outcome.report()
    assert any("PutEnd(end=End(failed=True" in line for line in outcome.lines)


def test_a_conviction_may_be_lost_with_those_who_know_of_it() -> None:
    """They die before a slow etcd has taken that the machine is kept out, and the word of one other is not enough."""
    outcome = play(
        parse("""
            job seed=702703 members=4 minimum=1 maximum=4 multiple_of=1 beside=1
            2.400 lie n3 for 1
            2.800 etcd-slow for 3.3
            4.500 kill n1,n2,n3
        """),
        lines=True,
    )
    assert not outcome.violations, outcome.report()
    assert not any("QuarantinePut" in line for line in outcome.lines)


def test_one_of_two_that_are_left_is_not_dead_because_its_port_refuses() -> None:
    """It has dialled the other, which hears it."""
    outcome = play(
        parse("""
            job seed=10238 members=3 minimum=1 maximum=4 multiple_of=1 beside=1 pp=2
            2.100 pause leader for 4.3
            2.900 start n4
            3.600 reset n1,n4 for 13.5
            4.288 kill n3
        """),
        lines=True,
    )
    assert not outcome.violations, outcome.report()
    assert not any("Bury(id='n4@" in line for line in outcome.lines)


@pytest.mark.parametrize("seed", [1, 2, 77])
def test_a_seed_gives_the_same_history(seed: int) -> None:
    """Every action of every member happens at the same virtual time again."""
    one, two = play(draw(seed), traced=True), play(draw(seed), traced=True)
    assert one.digest == two.digest
    assert one.digest != play(draw(seed + 1), traced=True).digest


def test_a_schedule_reads_back_from_its_text() -> None:
    """What a failure prints can be pasted into a test."""
    for seed in range(50):
        schedule = draw(seed)
        assert parse(str(schedule)) == Schedule(
            job=schedule.job, commands=tuple(sorted(schedule.commands, key=lambda command: command.at))
        )


@pytest.mark.parametrize("line", ["kill n1", "3.0", "3.0 explode n1", "3.0 kill who", "job members=3"])
def test_a_line_that_is_no_fault_is_refused(line: str) -> None:
    """The message quotes it."""
    with pytest.raises(UsageError, match=line):
        parse(line)


def test_a_failing_schedule_is_minimised() -> None:
    """Only what the failure needs is left, at round times."""
    schedule = draw(5)
    needed = Command(at=4.0004, do=Do.KILL, nodes=(1, 2))
    schedule = Schedule(job=schedule.job, commands=(*schedule.commands, needed))

    def fails(candidate: Schedule) -> bool:
        return any(command.do is Do.KILL and 2 in command.nodes for command in candidate.commands)

    small = shrink(schedule, fails)
    assert [(command.do, command.nodes) for command in small.commands] == [(Do.KILL, (2,))]
    assert small.job.members == 1
