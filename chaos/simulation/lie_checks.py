"""What has to hold where a run goes back: nobody goes on from later states, and what is left out is never forgotten.

For a device that was convicted: it stays out, and nobody else does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from chaos.simulation.network import State
from chaos.simulation.node import Member
from chaos.simulation.stuck_checks import LATE, NOTICED
from chaos.simulation.world import World
from elastic3d.distrust import Distrust, refused
from elastic3d.membership import events as e
from elastic3d.membership.machine.convictions import WITNESSES
from elastic3d.membership.machine.flaps import WRONG
from elastic3d.membership.records import End
from elastic3d.rollback import Rollback
from elastic3d.values import Cause, Generation

WRITTEN = 0.1
"""Seconds after a node was told within which its word is in etcd."""


@dataclass(slots=True, kw_only=True)
class Conviction:
    """What was said to every node whose trainers ended for it. passed_on: nothing had kept them from
    telling it lately.

    clean: audits vouch for so many steps, and `number` is the generation in which that was. rollback: it was no device,
    but the loss that jumped up; then there is no place. node: its id, and witnesses: those of the others. told_at: when
    the first may hear it, and known_at: when all have acted upon it. heard: whether a word of anybody, and certain:
    whether enough words to keep the machine out, have come to be in etcd. kept_out: whether it is by now. meanwhile:
    numbers of generations that were sealed before that; True for those in which the device took part, or what it did to
    the state.
    """

    place: str
    number: int
    clean: int
    passed_on: bool
    rollback: Rollback | None = None
    node: str = ""
    witnesses: tuple[str, ...] = ()
    heard: bool = True
    certain: bool = True
    kept_out: bool = False
    told_at: float = 0.0
    known_at: float = 0.0
    meanwhile: dict[int, bool] = field(default_factory=dict)

    def explains(self, rule: Distrust) -> bool:
        """Return whether this may have led to a rule: it refuses what was made until all had acted, and no more."""
        since = range(self.number + 1, rule.before)
        acted = not (self.passed_on and self.heard) or all(number in self.meanwhile for number in since)
        return rule.step == self.clean and rule.before > self.number and acted


@dataclass(slots=True)
class LieChecks:
    """Checks of one world. disturbed_until: when the last fault was over that is no conviction.

    Where others are at work, the news of a conviction may be lost with the nodes that have it: nothing is said then of
    what others do. Who never lied is never kept out for it, whatever happens.
    """

    world: World
    disturbed_until: float = -LATE
    convictions: list[Conviction] = field(default_factory=list)

    def convicted(self, member: Member, generation: Generation, clean: int, seconds: float) -> None:
        """A device of this node was convicted; that is heard after `seconds`."""
        now = self.world.loop.now
        conviction = Conviction(
            place=member.record.node.place,
            node=member.id,
            witnesses=tuple(node.id for node in generation.nodes if node.id != member.id),
            number=generation.number,
            clean=clean,
            passed_on=now > self.disturbed_until + LATE,
            told_at=now + seconds,
            known_at=now + seconds + NOTICED if seconds else now,
        )
        self.convictions.append(conviction)
        if seconds:
            self.world.loop.later(seconds + WRITTEN, self._count, conviction)

    def _count(self, one: Conviction) -> None:
        """Note who was there to say what they were told."""
        members = [self.world.by_id[id] for id in (one.node, *one.witnesses)]
        itself, *others = (member.state is State.RUNNING for member in members)
        one.heard = itself or any(others)
        one.certain = itself or sum(others) >= WITNESSES
        if any(member.state is State.PAUSED for member in members):
            # It says so later.
            one.passed_on = False

    def spiked(self, generation: Generation, rollback: Rollback) -> None:
        """The loss jumped up."""
        passed_on = self.world.loop.now > self.disturbed_until + LATE
        spike = Conviction(
            place="", number=generation.number, clean=rollback.step, passed_on=passed_on, rollback=rollback
        )
        self.convictions.append(spike)

    def disturb(self, until: float) -> None:
        """Note that until `until` something else happens: convictions of a moment ago may not have been passed on."""
        self.disturbed_until = max(self.disturbed_until, until)

    def forget(self) -> None:
        """Note that etcd lost what was written: who is kept out may be lost with it."""
        for one in self.convictions:
            one.passed_on = False

    def kept_out(self, event: e.QuarantinePut) -> list[str]:
        """Return what is wrong with a machine's being kept out."""
        if event.quarantine.reason != WRONG:
            return []
        known = [one for one in self.convictions if one.place == event.place]
        for one in known:
            one.kept_out = True
        if known:
            return []
        return [f"{event.place} is kept out for computing wrongly, and it never did"]

    def sealed(self, formed: Generation) -> list[str]:
        """Return what is wrong with the nodes that train in a generation, and with what it leaves out."""
        for one in self._unknown(formed):
            one.meanwhile[formed.number] = any(node.place == one.place for node in formed.nodes)
        again = [
            f"{formed.key} refuses steps after {rule.step} made before {rule.before}, and no conviction says so"
            for rule in formed.distrusted
            if not any(one.explains(rule) for one in self.convictions)
        ]
        forgotten = [
            f"{formed.key} forgets what is left out for the spike of generation {one.number}"
            for one in self._heeded(formed)
            if one.rollback is not None and one.rollback not in formed.rollbacks
        ]
        return (
            again
            + forgotten
            + [
                f"{node.name} was convicted in generation {one.number}, and {formed.key} holds it"
                for one in self._heeded(formed)
                for node in formed.nodes
                if node.place == one.place and formed.number not in one.meanwhile and self._certain(one)
            ]
        )

    def _certain(self, one: Conviction) -> bool:
        """Return whether the machine has to be kept out: as long as it is not, the words of the dead are lost."""
        if one.kept_out or not one.certain:
            return one.certain
        itself, *others = map(self._says, (one.node, *one.witnesses))
        return itself or sum(others) >= WITNESSES

    def _says(self, id: str) -> bool:
        member = self.world.by_id[id]
        rejoined = member.exit is not None and member.exit.rejoin and self.world.member(member.host) is not None
        return member.alive or rejoined

    def ends(self, generation: Generation) -> bool:
        """Return whether a generation was sealed before a conviction was heard, and may have to end for it."""
        return any(generation.number in one.meanwhile for one in self.convictions)

    def ended(self, current: Generation, end: End) -> list[str]:
        """Return what is wrong with a job's end in this generation.

        What a run that is through has come to has to count, and what does not count the next job has to know.
        """
        known = [one for one in self._heeded(current) if self.world.loop.now >= one.known_at]
        return [
            f"the run is through in {current.key}, and what generation {one.number} made wrongly is in its state"
            for one in known
            if one.meanwhile.get(current.number) and not end.failed and not end.detail
        ] + [
            f"the job ends in {current.key}, and its record does not refuse what generation {one.number} made wrongly"
            for one in known
            if not refused(current.distrusted, one.number, one.clean + 1)
        ]

    def settled(self, current: Generation) -> list[str]:
        """Return what is wrong with the generation that trains once everything was heard long ago."""
        return [
            f"{current.key} goes on, and what generation {one.number} made wrongly is in its state"
            for one in self._heeded(current)
            if one.meanwhile.get(current.number)
        ]

    def restored(self, generation: Generation, step: int, made: int) -> list[str]:
        """Return what is wrong with a generation's going on from a state of `step`, made in generation `made`."""
        wrong = [
            one
            for one in self.convictions
            if one.number < generation.number and step > one.clean and (made <= one.number or one.meanwhile.get(made))
        ]
        for one in wrong:
            if generation.number in one.meanwhile:
                one.meanwhile[generation.number] = True
        return [
            f"{generation.key} goes on from step {step} of generation {made}: audits vouch for step {one.clean} only"
            for one in wrong
            if one in self._heeded(generation) and self.world.loop.now >= one.known_at
        ]

    def _unknown(self, generation: Generation) -> list[Conviction]:
        """Return the convictions that were not acted upon when a generation was sealed."""
        for_one = generation.cause is Cause.LYING
        return [
            one
            for one in self.convictions
            if self.world.loop.now < (one.told_at if for_one else one.known_at) and one.number < generation.number
        ]

    def _heeded(self, generation: Generation) -> list[Conviction]:
        said = [one for one in self.convictions if one.passed_on and one.heard]
        return [one for one in said if one.number < generation.number]
