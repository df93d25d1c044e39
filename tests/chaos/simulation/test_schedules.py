"""Random schedules against the production core break no invariant, whatever is done to a job."""

from __future__ import annotations

import pytest

from chaos.simulation.run import play, play_many, policy_of
from chaos.simulation.schedule import Command, Do, Schedule, draw, parse, shrink
from elastic3d.errors import UsageError

EACH = 250


@pytest.mark.parametrize("first", [1, *(pytest.param(n, marks=pytest.mark.long) for n in range(1 + EACH, 2001, EACH))])
def test_two_thousand_schedules_break_no_invariant(first: int) -> None:
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


FOUND = {
    # The simulation's trainers of one generation were parted in two groups by the step that had become safe meanwhile.
    "a record that says, while nodes prepare, that a step is safe": """
        job seed=1856 members=6 minimum=1 maximum=8 multiple_of=2 beside=1
        2.500 etcd-away for 2.2
        3.000 lie n6
        3.200 pause n1,n2,n3,n4 for 2.6
    """,
    # The record says by then that a step was safe, which makes it no other generation.
    "a member that begins to train after the others have": """
        job seed=11892 members=5 minimum=2 maximum=8 multiple_of=1 beside=1
        2.058 isolate n3,n4 for 2.6
        2.806 mute n3 for 1.29
        5.925 kill leader
        5.931 quarantine n3 for 3.31
        6.146 kill n1
        6.160 etcd-away for 0.2
        6.702 revoke n3
    """,
    # The record was written again without the safe step, and was taken for another generation.
    "an etcd that came back empty to one that slept": """
        job seed=1519 members=6 minimum=2 maximum=6 multiple_of=2 beside=1
        2.000 mute n4 for 0.5
        2.600 pause n1 for 6.6
        3.527 etcd-stop for 6.79
        3.532 fail leader
        3.544 vanish n5
        8.000 pause leader for 4.04
        12.200 etcd-empty for 0.63
    """,
    # The member that buried them considered them buried, and waited for them for ever.
    "an etcd that forgot the tombs of all others": """
        job seed=1813 members=3 minimum=2 maximum=4 multiple_of=1 beside=1
        2.700 kill n2,n3
        3.300 etcd-restore for 0.5
        3.400 broken n4
    """,
    # Its tomb was lost with the rest, its member key came back, and both it and its successor were admitted.
    "an etcd that forgot a tomb": """
        job seed=23 members=7 minimum=2 maximum=8 multiple_of=1 beside=0
        2.350 notice n6 for 3.85
        2.377 pause leader for 0.35
        3.239 pause n1 for 2.43
        3.250 pause n4 for 4.56
        3.275 isolate n2 for 0.15
        3.297 vanish n1
        6.121 deafen n6 for 2.93
        6.500 cut n7 for 7.18
        7.762 etcd-restore for 1.31
        8.230 notice n6 for 7.68
    """,
    # Both counted their attempts from the same number, and one's proposal had the key of what the other sealed.
    "two leaders after an etcd that came back empty": """
        job seed=386 members=7 minimum=1 maximum=7 multiple_of=1 beside=1
        2.962 kill n7
        3.152 stick n7 for 4.12
        3.808 stick n6 for 24.03
        6.537 compact
        6.704 notice n5,n6,n7 for 3.22
        7.643 stick n4 for 13.97
        9.551 etcd-empty for 0.12
        10.742 start n2
        10.747 pause leader for 7.71
        11.406 lose n7 for 1.11
        11.412 compact
    """,
    # Nodes that came during an etcd outage led when etcd came back without data, and restarted the job.
    "newcomers in an emptied etcd": """
        job seed=108 members=7 minimum=1 maximum=7 multiple_of=1 beside=1
        4.842 etcd-empty for 3.51
        7.367 start n4,n7
        7.456 start n8
    """,
    # A death between a lost lease and its renewal evicted every node not registered at that moment.
    "a death while a lease is lost": """
        job seed=91 members=3 minimum=1 maximum=4 multiple_of=1 beside=1
        8.100 revoke n2
        8.600 kill n3
    """,
    # The isolated node called the others silent, and that counted against those without a lease.
    "the word of one who is lost": """
        job seed=3672 members=5 minimum=2 maximum=5 multiple_of=1 beside=1
        9.300 etcd-stop for 5.8
        13.100 pause n3 for 6.7
        13.200 cut n2 for 6.3
    """,
    # Its neighbours died, and that it did not hear them counted as their report against it.
    "the word of one whose neighbours died": """
        job seed=101817 members=7 minimum=1 maximum=6 multiple_of=1 beside=1
        2.100 vanish n3,n4,n6,n7
        4.700 drain n1 for 10.3
    """,
    # The time of an etcd outage counted against members that had lost their lease before.
    "a lease lost before etcd went away": """
        job seed=19396 members=7 minimum=2 maximum=8 multiple_of=2 beside=1
        4.700 etcd-stop for 7.2
        13.600 etcd-away for 8
    """,
    # Its answer to a question through etcd waited behind a call that etcd never answered.
    "an answer behind a lost call": """
        job seed=13810 members=3 minimum=3 maximum=4 multiple_of=1 beside=1
        3.600 cut n1 for 6
        8.600 start n4
        11.500 pause n3,n4 for 1.1
        11.900 etcd-stop for 0.3
        12.500 pause n2 for 0.2
        12.800 revoke n3
    """,
    # All others were told to leave and went on for lack of anybody else; it had just lost its lease.
    "a lease lost while the others must leave": """
        job seed=26589 members=4 minimum=1 maximum=4 multiple_of=1 beside=1
        2.900 drain n1,n2,n3 for 7.6
        3.400 revoke n1,n3,n4
    """,
    # etcd was away while the job waited for it, the only node left of the generation, to register.
    "waiting for an orphan while etcd is away": """
        job seed=40471 members=7 minimum=3 maximum=6 multiple_of=2 beside=0
        2.200 drain n6 for 5
        2.200 pause n4 for 7.6
        3.307 kill n1,n4,n5,n7
        3.311 etcd-stop for 4.3
        3.400 vanish n2
        8.200 start n1,n4,n5,n7
        8.400 etcd-away for 5
    """,
    # A member joined under a name of which all earlier incarnations were out.
    "no incarnation is left": """
        job seed=3339 members=3 minimum=3 maximum=4 multiple_of=1 beside=1
        9.900 pause n3 for 0.3
        13.200 pause leader for 4.4
        16.600 pause leader for 3.4
        17.000 drain n2,n3,n4 for 10.1
    """,
    # Its key stood again for seconds when the leader, whose watch lagged, buried it for being missing.
    "registered again, and the leader's watch lags": """
        job seed=92814 members=5 minimum=2 maximum=5 multiple_of=1 beside=1
        2.600 lose n4 for 0.5
        3.600 isolate n3,n4 for 4.5
        3.600 start n6
        8.600 etcd-slow for 4
        8.800 revoke n6
        12.200 lag leader for 3
    """,
    # Three isolated nodes became neighbours, had not missed each other yet, and took themselves for the majority.
    "those cut off stand side by side": """
        job seed=95205 members=7 minimum=1 maximum=8 multiple_of=1 beside=1
        2.600 cut n2 for 6.7
        2.700 deafen n4,n5 for 5.8
        7.200 kill n6,n7
    """,
    # While connections healed one by one, a wrong side was the larger one for some milliseconds.
    "a majority of a moment": """
        job seed=73810 members=5 minimum=1 maximum=8 multiple_of=1 beside=1
        2.600 start n7
        3.600 vanish n4
        11.600 cut n1,n2,n7 for 5.2
        12.700 start n4,n8
    """,
    # It resumed to the end of its lease, and only then to the answer that it was registered: nobody admitted it.
    "stopped while it registers": """
        job seed=95753 members=3 minimum=2 maximum=4 multiple_of=1 beside=1
        6.206 start n4
        6.211 pause n4 for 5.2
    """,
    # The same, with a lease under which etcd took long to write.
    "stopped while it registers, and etcd is slow": """
        job seed=98726 members=3 minimum=1 maximum=8 multiple_of=1 beside=1
        2.800 kill n3
        6.800 isolate leader for 4.7
        11.300 etcd-slow for 4.5
        15.200 pause n2 for 5.5
    """,
    # The question took nearly two seconds to write, and the answer had only one.
    "an answer as slow as the question": """
        job seed=99037 members=2 minimum=1 maximum=4 multiple_of=1 beside=1
        2.700 pause leader for 2
        2.700 etcd-slow for 4.2
    """,
    # Its lease ended after its successor had registered, and then nobody knew that it had been replaced.
    "replaced, and then without a lease": """
        job seed=70159 members=5 minimum=2 maximum=8 multiple_of=1 beside=1
        2.400 leave n3
        11.700 fail n2
        13.000 etcd-away for 0.7
        13.800 vanish n5
        14.700 start n5
        14.728 etcd-stop for 7.8
        15.200 kill leader
        17.626 unanswered n1,n5
    """,
    # It was heard all the time, but still asked; its answer waited behind another slow write.
    "asked, though it is heard": """
        job seed=28732 members=2 minimum=1 maximum=4 multiple_of=1 beside=1
        2.100 etcd-slow for 4.4
        2.800 pause leader for 2
    """,
    # All had lost their leases; the first to return was isolated, led, and its report alone counted against the others.
    "the only one that is registered": """
        job seed=99906 members=6 minimum=1 maximum=6 multiple_of=1 beside=1
        2.400 isolate leader for 0.3
        6.800 pause n3 for 0.2
        7.800 etcd-stop for 6.9
        7.800 mute n2 for 0.6
        12.400 start n7
        12.700 kill n6
        13.200 cut n2 for 2.8
    """,
    # The same, with revoked leases.
    "leases revoked, and a leader that is deaf": """
        job seed=113300 members=4 minimum=2 maximum=5 multiple_of=1 beside=1
        3.500 etcd-elect for 1.4
        3.500 fail n3
        3.600 revoke n1,n2
        3.600 deafen n3 for 1.8
        4.100 revoke n4
    """,
    # It had no buddy to leave its snapshots with, and was gone before the newcomer could fetch them.
    "the only node leaves": """
        job seed=1 members=1 minimum=1 maximum=4 multiple_of=1 beside=1
        3.000 start n2
        3.100 drain n1 for 20
    """,
    # Reports of steps that a convicted device took part in count as reached again after they were distrusted.
    "what a conviction takes back is not reached again": """
        job seed=119 members=5 minimum=2 maximum=8 multiple_of=1 beside=1
        2.578 lie n4
    """,
    # It was put into quarantine once the next generation was sealed, by a leader that was dead by then.
    "a leader dies as it leaves out who computes wrongly": """
        job seed=1 members=5 minimum=2 maximum=4
        4.059 lie n2
        4.069 kill leader
    """,
    # The death of the leader was seen first, and the next generation formed for that alone.
    "a leader dies as somebody computes wrongly": """
        job seed=13 members=6 minimum=2 maximum=7
        3.148 lie n2
        3.148 kill leader
    """,
    # The simulated store vetted a step that was made again by what its first generation had audited.
    "a step is made again after an audit of it": """
        job seed=643 members=3 minimum=1 maximum=4 multiple_of=1 beside=0
        2.200 pause leader for 1.4
        3.000 kill n1
        3.000 deafen n2 for 7.2
        21.200 sticks n2 for 16.7
        21.500 fail n3
        24.800 isolate n3 for 7.7
    """,
}


@pytest.mark.parametrize("text", FOUND.values(), ids=FOUND)
def test_a_schedule_that_once_failed_passes(text: str) -> None:
    """What random schedules once found stays found."""
    outcome = play(parse(text))
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
