"""What has to hold where ranks stand still: somebody is found in time, and nobody who moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from chaos.simulation.etcd_store import ROOT, Change
from chaos.simulation.node import Member
from chaos.simulation.standstills import DEADLINE, GATHER
from chaos.simulation.world import World
from elastic3d import etcd_keys as keys
from elastic3d.membership.machine.flaps import STUCK
from elastic3d.membership.machine.standstill import HEARING
from elastic3d.membership.records import decode
from elastic3d.membership.stalls import Verdict
from elastic3d.values import Generation

NOTICED = 1.5
"""Seconds by which a rank may move again before those that began to act upon its standstill hear of it."""

LATE = 12.0
"""The same where etcd or the network was disturbed lately: a node may be unable to take back what it said."""

FOUND = DEADLINE + GATHER + HEARING + 4.0
"""Seconds within which a standstill ends the generation if nothing else happens."""


@dataclass(slots=True)
class StuckChecks:
    """Checks of one world. interfered_until: when the last fault was over that is no standstill.

    seals: how many generations came to be because of a standstill. named_at: by machine, when a rank of it was named.
    """

    world: World
    interfered_until: float = 0.0
    seals: int = 0
    named_at: dict[str, list[float]] = field(default_factory=dict)

    @property
    def quiet(self) -> bool:
        """Whether nothing but standstills has happened for a while."""
        return self.world.loop.now > self.interfered_until + LATE

    def watch(self, member: Member, key: str, current: Generation | None) -> str:
        """Return what is wrong some time after a rank of this node stood still in the generation `key`."""
        world = self.world
        if world.ended or not world.policy.beside or not self.quiet or current is None or current.key != key:
            return ""
        if world.trainers.moves(key):
            return ""
        return f"a rank of {member.name} has stood still for {FOUND:g} s, and {key} goes on"

    def sealed(self, before: Generation, formed: Generation, changes: Sequence[Change]) -> list[str]:
        """Return what is wrong with a generation that came to be because ranks of the one before stood still."""
        self.seals += 1
        wrong = []
        verdict = next((v for v in map(_verdict, changes) if v is not None and v.key == before.key), None)
        if verdict is None:
            return [f"{formed.key} was sealed because ranks of {before.key} stood still, and no verdict with it"]
        stuck = self.world.trainers.stuck_in(before.key, NOTICED if self.quiet else LATE)
        for id in verdict.culprits:
            if id not in stuck:
                wrong.append(f"{id} was found to stand still in {before.key}, and its ranks moved")
        if not wrong:
            wrong += self._again(verdict, before, formed)
        return wrong

    def _again(self, verdict: Verdict, before: Generation, formed: Generation) -> list[str]:
        world, now, wrong = self.world, self.world.loop.now, []
        active = {node.id for node in formed.nodes}
        for node in before.nodes:
            if node.id not in verdict.culprits:
                continue
            times = self.named_at.setdefault(node.place, [])
            times[:] = [at for at in times if now - at < world.policy.flap_memory - 1.0]
            times.append(now)
            again = len(times) >= STUCK and node.id in active and self.quiet
            if again and world.active(self._others(verdict)):
                wrong.append(f"{node.name} held all others up {len(times)} times, and {formed.key} holds it")
        return wrong

    def _others(self, verdict: Verdict) -> int:
        """Return how many nodes could train without those at fault."""
        roll = self.world.etcd.store.tiers.get(keys.ROLL.strip("/"), {})
        there = [m for m in self.world.alive() if m.exit is None and not m.leaving and m.id not in verdict.culprits]
        return sum(ROOT + keys.quarantine(member.record.node.place) not in roll for member in there)

    def settled(self) -> list[str]:
        """Return what is wrong once everything has moved for long: nobody says that it stands still."""
        roll = self.world.etcd.store.tiers.get(keys.ROLL.strip("/"), {})
        return [f"{key} still stands" for key in roll if key.startswith(ROOT + keys.STALLS)]


def _verdict(change: Change) -> Verdict | None:
    if change.item is None or not change.key.startswith(ROOT + keys.VERDICTS):
        return None
    return decode(Verdict, change.item.value, change.key)
