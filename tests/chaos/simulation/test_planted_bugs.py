"""Random schedules find each classical mistake that is planted into a small seam of the production code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

import pytest

from chaos.simulation.etcd import Etcd
from chaos.simulation.run import Outcome, play
from chaos.simulation.schedule import STANDING, Do, Schedule, draw, parse
from elastic3d import etcd_keys as keys
from elastic3d.distrust import Distrust
from elastic3d.health import vetted
from elastic3d.membership import actions as acts
from elastic3d.membership import events as e
from elastic3d.membership import transactions
from elastic3d.membership.driver import witness
from elastic3d.membership.machine import convictions as core_convictions
from elastic3d.membership.machine import core, leader, script_errors, suspicions, triggers
from elastic3d.membership.machine.core import Core
from elastic3d.membership.machine.own_stall import OwnStall
from elastic3d.membership.machine.partition import Cut, Suspect
from elastic3d.membership.machine.reports import Reports
from elastic3d.membership.machine.script_errors import Raising
from elastic3d.membership.machine.situation import Situation
from elastic3d.membership.machine.stalls import Stalls
from elastic3d.membership.machine.view import View
from elastic3d.membership.records import Report
from elastic3d.membership.stalls import Stall
from elastic3d.values import Generation
from elastic3d.worker.keeper import departure

MOST = 400
"""Schedules within which a planted bug has to show."""

VETTED = 40
"""Schedules within which a bug about vetted checkpoints has to show."""

Plant = Callable[[pytest.MonkeyPatch], None]


def first_failure(schedules: Iterable[Schedule]) -> Outcome | None:
    """Return the first schedule that shows a violation."""
    return next((outcome for outcome in map(play, schedules) if outcome.violations), None)


def drop_the_fence(patch: pytest.MonkeyPatch) -> None:
    """A leader's writes no longer compare its token."""
    honest = transactions.transaction

    def unfenced(*given: Any, **named: Any) -> transactions.Transaction:
        made, action = honest(*given, **named), given[2]
        return replace(made, conditions=()) if isinstance(action, acts.Seal | acts.Propose) else made

    patch.setattr(transactions, "transaction", unfenced)


def compare_wall_clocks(patch: pytest.MonkeyPatch) -> None:
    """Reports carry their writer's wall clock, and a writer that is late by the leader's clock is dead."""
    hear, judge = Reports.hear, leader.judge

    def stamped(self: Reports, id: str, report: Report, now: float) -> bool:
        stamps = self.__dict__.setdefault("stamps", {})
        stamps[id] = now + crc32(id.encode()) % 120 - 60
        return hear(self, id, report, now)

    def stale(situation: Situation) -> tuple[dict[str, str], list[acts.Write]]:
        roster, now = situation.roster, situation.alarm.now
        stamps = roster.reports.__dict__.get("stamps", {})
        late = {id: "its report is old" for id in roster.members if stamps.get(id, now) < now - 30.0}
        dead, doubts = judge(situation)
        return dead | late, doubts

    patch.setattr(Reports, "hear", stamped)
    patch.setattr(leader, "judge", stale)


def forget_the_relist(patch: pytest.MonkeyPatch) -> None:
    """After a compaction the watch resumes from the present, and nobody checks what was missed."""
    honest = Core.handle

    def forgetful(self: Core, events: Sequence[e.Event], now: float) -> list[acts.Action]:
        return honest(self, [event for event in events if not (isinstance(event, e.Listed) and event.gap)], now)

    patch.setattr(Core, "handle", forgetful)


def accept_stale_acknowledgements(patch: pytest.MonkeyPatch) -> None:
    """A member's answer to an earlier attempt at the same number counts for the present one."""

    def lenient(self: Reports, field: str, key: str) -> dict[str, None]:
        number = key.partition(".")[0]
        return {
            id: None
            for (said, of), ids in self._said.items()
            if said == field and of.partition(".")[0] == number
            for id in ids
        }

    patch.setattr(Reports, "who", lenient)


def take_a_lost_lease_for_death(patch: pytest.MonkeyPatch) -> None:
    """A member key that vanishes is a death: no grace, and no veto by neighbours that hear the node."""

    def hasty(situation: Situation) -> dict[str, str]:
        return dict.fromkeys(situation.roster.missing, "its lease ran out")

    patch.setattr(leader, "expired", hasty)


def let_the_cut_off_confirm_each_other(patch: pytest.MonkeyPatch) -> None:
    """A judging member takes its own side for the main one, however small it is."""
    honest = suspicions.suspects

    def partial(
        ids: Sequence[str], cuts: frozenset[Cut], active: dict[str, int], judge: str, *_: object
    ) -> tuple[Suspect, ...]:
        return honest(ids, cuts, {judge: 0}, judge)

    patch.setattr(suspicions, "suspects", partial)


def forget_what_was_reached(patch: pytest.MonkeyPatch) -> None:
    """A generation's record holds only what its own leader has seen, not what the previous record held."""
    honest = leader.forming.seal

    def forgetful(view: View, generation: Generation) -> acts.Seal:
        return honest(view, replace(generation, reached=0))

    patch.setattr(leader.forming, "seal", forgetful)


def leave_without_refuge(patch: pytest.MonkeyPatch) -> None:
    """A node that leaves with its buddy, or has none, keeps its snapshots to itself."""
    patch.setattr(departure, "refuge", lambda *_: None)


def let_one_node_end_the_job(patch: pytest.MonkeyPatch) -> None:
    """Enough tries without progress end the job for everybody, whichever node's code raised."""
    patch.setattr(leader, "raising", lambda *_: Raising())


def resume_in_whatever_history(patch: pytest.MonkeyPatch) -> None:
    """A watch resumes from its known revision even at an etcd that came back empty or from a backup."""
    patch.setattr(Etcd, "rolled_back", lambda self, watch: False)


def leave_the_old_whole(patch: pytest.MonkeyPatch) -> None:
    """The change is written, but the whole generation beside it stays old: newcomers cannot read it."""
    honest = transactions._formed

    def partial(*given: object) -> tuple[object, ...]:
        return tuple(put for put in honest(*given) if keys.WHOLE not in put.key)  # type: ignore[arg-type]

    patch.setattr(transactions, "_formed", partial)


def believe_old_revisions(patch: pytest.MonkeyPatch) -> None:
    """A listing of a rolled back etcd is accepted, and members' writes there count as older than known ones."""
    honest = Core.handle

    def stubborn(self: Core, events: Sequence[e.Event], now: float) -> list[acts.Action]:
        known = [replace(event, rolled_back=False) if isinstance(event, e.Listed) else event for event in events]
        return honest(self, known, now)

    patch.setattr(Core, "handle", stubborn)


def let_a_dead_link_hold_all_up(patch: pytest.MonkeyPatch) -> None:
    """Unreachable pairs are known, but nobody has to stand aside for them."""
    patch.setattr(triggers, "_apart", lambda *_: "")


def believe_one_refusal(patch: pytest.MonkeyPatch) -> None:
    """A refused member holds the other for dead, whatever the other's neighbours find."""
    patch.setattr(witness, "conclude", lambda *_, **__: witness.Conclusion.DEAD)


def take_stalls_of_any_generation(patch: pytest.MonkeyPatch) -> None:
    """What nodes said of an earlier generation is held against the present one."""

    def all_of(self: Stalls, key: str, ids: Iterable[str], now: float) -> dict[str, Stall]:
        return {id: replace(self._standing[id].stall, key=key) for id in ids if id in self._standing}

    patch.setattr(Stalls, "of", all_of)
    patch.setattr(Stalls, "count", lambda self, key: len(self.ids()))


def never_take_a_stall_back(patch: pytest.MonkeyPatch) -> None:
    """A node whose ranks move again says so only when the generation ends."""
    patch.setattr(OwnStall, "moving", lambda *_: None)


def keep_a_verdict(patch: pytest.MonkeyPatch) -> None:
    """A verdict once given holds until the generation ends, whoever moves meanwhile."""
    honest = core.conclude

    def stubborn(situation: Situation, *, hindered: bool) -> tuple[acts.Concluded, ...]:
        before = situation.leader_state.standstill
        findings = honest(situation, hindered=hindered)
        after = situation.leader_state.standstill
        if after.verdict is None and before.concluded:
            after.verdict = replace(before.concluded[-1], key=after.key)
        return findings

    patch.setattr(core, "conclude", stubborn)


def do_not_act_on_verdicts(patch: pytest.MonkeyPatch) -> None:
    """Who holds all others up is found, and nothing is done."""
    honest = core.conclude

    def idle(situation: Situation, *, hindered: bool) -> tuple[acts.Concluded, ...]:
        findings = honest(situation, hindered=hindered)
        situation.leader_state.standstill.verdict = None
        return findings

    patch.setattr(core, "conclude", idle)


def blame_nobody(patch: pytest.MonkeyPatch) -> None:
    """Nodes that hold all others up again and again are never set aside."""
    patch.setattr(leader, "blame", lambda *_: None)


def seal_without_the_verdict(patch: pytest.MonkeyPatch) -> None:
    """Why a generation had to end is not written with the next one."""
    patch.setattr(transactions, "_ruled", lambda *_: ())


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (drop_the_fence, "was sealed"),
        (compare_wall_clocks, "without cause|nothing had been done"),
        (forget_the_relist, ""),
        (accept_stale_acknowledgements, "had not"),
        (take_a_lost_lease_for_death, "without cause|nothing had been done"),
        (resume_in_whatever_history, ""),
        (believe_old_revisions, ""),
        (leave_the_old_whole, ""),
        (let_the_cut_off_confirm_each_other, "without cause|nothing had been done"),
        (forget_what_was_reached, "forgets that step"),
        (leave_without_refuge, "was planned, and goes back"),
        (let_one_node_end_the_job, "the job was ended without cause"),
        (let_a_dead_link_hold_all_up, "the job has not trained for"),
        (believe_one_refusal, "without cause|nothing had been done"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_bug_is_found(plant: Plant, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a few hundred schedules, by the invariant it breaks; the unmodified code passes the same schedule."""
    it_is_found(plant, words, monkeypatch)


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (take_stalls_of_any_generation, "and its ranks moved"),
        (never_take_a_stall_back, "and its ranks moved|still stands"),
        (keep_a_verdict, "and its ranks moved"),
        (do_not_act_on_verdicts, "has stood still for"),
        (blame_nobody, "held all others up"),
        (seal_without_the_verdict, "no verdict with it"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_bug_about_standstills_is_found(plant: Plant, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, within those schedules in which ranks stand still."""
    it_is_found(plant, words, monkeypatch, standstills())


def trust_one_step_too_many(patch: pytest.MonkeyPatch) -> None:
    """The state that the last clean audit led to is trusted too, though nobody compared what came of it."""
    patch.setattr(Distrust, "refuses", lambda rule, number, step: number < rule.before and step > rule.step + 1)


def trust_whatever_there_is(patch: pytest.MonkeyPatch) -> None:
    """A device is convicted, and the run goes on from what it took part in."""
    patch.setattr(leader, "distrust", lambda situation: None)


def keep_the_convicted(patch: pytest.MonkeyPatch) -> None:
    """Why a generation ended is known, and the machine takes part in the next one."""
    patch.setattr(leader, "shut_out", lambda *_: None)


def set_all_aside(patch: pytest.MonkeyPatch) -> None:
    """All whose trainers ended for a conviction are taken for those that compute wrongly."""
    honest = Core.handle

    def confused(self: Core, events: Sequence[e.Event], now: float) -> list[acts.Action]:
        lost = (e.TrainerLostPeer,)
        heard = [
            e.TrainerFailed(
                key=event.key, detail=event.detail, clean=event.clean, accused={self._id: self.record.node.place}
            )
            if isinstance(event, lost) and event.clean >= 0
            else event
            for event in events
        ]
        return honest(self, heard, now)

    patch.setattr(Core, "handle", confused)


def vet_one_step_too_many(patch: pytest.MonkeyPatch) -> None:
    """The state that an audited step led to counts as compared."""
    honest = vetted.vets
    patch.setattr(vetted, "vets", lambda made_by, step, clean: honest(made_by, step - 1, clean))


def vet_for_those_who_are_left(patch: pytest.MonkeyPatch) -> None:
    """Nobody asks after a node that left before it was audited."""
    honest = vetted.vets

    def partial(made_by: Mapping[str, int], step: int, clean: Mapping[str, int]) -> bool:
        return honest({node: said for node, said in made_by.items() if node in clean}, step, clean)

    patch.setattr(vetted, "vets", partial)


@pytest.mark.parametrize(
    "plant", [vet_one_step_too_many, vet_for_those_who_are_left], ids=lambda value: getattr(value, "__name__", "")
)
def test_a_planted_bug_about_vetted_checkpoints_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the first schedules, since each of them saves and audits."""
    it_is_found(plant, "is vetted, and no audit has compared", monkeypatch, map(draw, range(1, VETTED + 1)))


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (trust_one_step_too_many, "audits vouch for step"),
        (trust_whatever_there_is, "audits vouch for step"),
        (keep_the_convicted, "was convicted in generation"),
        (set_all_aside, "and it never did"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_bug_about_convictions_is_found(plant: Plant, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, within those schedules in which audits convict devices, and nothing else happens."""
    it_is_found(plant, words, monkeypatch, convictions())


def convictions() -> Iterator[Schedule]:
    """Yield schedules in which devices are convicted, first at moments around a step that is audited."""
    for seed in range(1, 9):
        yield parse(f"job seed={seed} members=4 minimum=2 maximum=4\n{2.5 + seed / 20} lie n2")
    for schedule in map(draw, range(1, MOST + 1)):
        lies = tuple(command for command in schedule.commands if command.do in (Do.LIE, Do.START))
        if any(command.do is Do.LIE for command in lies):
            yield replace(schedule, commands=lies)


def hear_nothing_late(patch: pytest.MonkeyPatch) -> None:
    """What is said of a generation counts only until the next one is sealed."""
    patch.setattr(core_convictions, "_late", lambda situation: {})


def test_a_conviction_that_is_not_heard_after_a_death_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next generation, formed for the death alone, may not go on from what the device took part in."""
    late = parse("job seed=5 members=5 minimum=2 maximum=5\n2.6 lie n2 for 1\n2.65 kill n2")
    it_is_found(hear_nothing_late, "is in its state", monkeypatch, [late])


def hear_what_is_known_again(patch: pytest.MonkeyPatch) -> None:
    """What was said of a generation counts in each that follows, whether the record has it or not."""
    patch.setattr(core_convictions, "_refused", lambda generation, word: False)


def test_a_conviction_that_is_acted_upon_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that were made since count, and no rule may refuse them."""
    twice = parse("job seed=5 members=5 minimum=2 maximum=5\n2.6 lie n2\n12.0 kill n3")
    it_is_found(hear_what_is_known_again, "no conviction says so", monkeypatch, [twice])


def put_out_whoever_raises(patch: pytest.MonkeyPatch) -> None:
    """One error is enough, however many steps the node has made."""
    patch.setattr(
        leader,
        "raising",
        lambda situation: Raising(out=dict.fromkeys(script_errors.raised_in(situation.view, situation.roster), "")),
    )


def test_a_node_that_is_put_out_for_one_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first step a node may be put out for it, and after that it may not."""
    error = parse("job seed=1 members=4 minimum=2 maximum=4\n6.0 error n2")
    it_is_found(put_out_whoever_raises, "was buried by", monkeypatch, [error])


def forget_what_is_left_out(patch: pytest.MonkeyPatch) -> None:
    """Only the generation that goes back knows what is left out, and none that follows."""
    patch.setattr(View, "rollbacks", ())


def make_what_is_left_out_again(patch: pytest.MonkeyPatch) -> None:
    """The run ends for a spike, and goes on from the newest state."""
    patch.setattr(leader, "distrust", lambda situation: None)


@pytest.mark.parametrize(
    ("plant", "words"),
    [(forget_what_is_left_out, "forgets what is left out"), (make_what_is_left_out_again, "forgets")],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_bug_about_spikes_is_found(plant: Plant, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, within those schedules in which the loss jumps up, and nothing else happens."""
    it_is_found(plant, words, monkeypatch, spikes())


def spikes() -> Iterator[Schedule]:
    """Yield schedules in which the loss jumps up."""
    for schedule in map(draw, range(1, MOST + 1)):
        own = tuple(command for command in schedule.commands if command.do in (Do.SPIKE, Do.START))
        if any(command.do is Do.SPIKE for command in own):
            yield replace(schedule, commands=own)


def standstills() -> Iterator[Schedule]:
    """Yield schedules in which ranks stand still: first some in which that ends when it is just being noticed."""
    for seed in range(1, 9):
        yield parse(f"job seed={seed} members=4 minimum=2 maximum=3\n4.0 stick n2 for {3 + seed / 10}")
    for schedule in map(draw, range(1, MOST + 1)):
        if any(command.do in STANDING for command in schedule.commands):
            yield schedule


def it_is_found(
    plant: Plant, words: str, monkeypatch: pytest.MonkeyPatch, schedules: Iterable[Schedule] | None = None
) -> None:
    plant(monkeypatch)
    outcome = first_failure(map(draw, range(1, MOST + 1)) if schedules is None else schedules)
    assert outcome is not None, f"{MOST} schedules did not show it"
    said = "\n".join(outcome.violations)
    assert any(word in said for word in words.split("|")), outcome.report()
    monkeypatch.undo()
    assert play(outcome.schedule).violations == []
