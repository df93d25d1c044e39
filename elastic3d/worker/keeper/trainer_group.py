"""A node's trainers of one generation, and their assignments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elastic3d.health.numerics import NonFinite, Spike
from elastic3d.port import Assignment, AuditReport
from elastic3d.rendezvous.settings import Settings
from elastic3d.trust.credentials import Credentials
from elastic3d.values import DeviceFacts, Generation, ProvenChain
from elastic3d.worker.checkpoints.uploader import LONGEST_REST, TilesUploaded, WriteFailed
from elastic3d.worker.keeper.network import interface_of
from elastic3d.worker.options import RunOptions

if TYPE_CHECKING:
    from elastic3d.worker.checkpoints.node_checkpoints import Checkpoints


@dataclass(slots=True)
class TrainerGroup:
    """One trainer per slot. By slot, `trainers` has its number, `pids` its pid once it began, `ended` its last step,
    `held` its newest safe step.

    unsaved: where `main` returned, the step that goes to the store before other nodes learn of it, -1 for none. failed:
    a trainer ended otherwise than by returning or leaving. last: no node takes over from memory, so that its last state
    goes to the store; `flushed`: slots that have written theirs; `again`: when those whose write failed try it again.
    convicted: what an audit, or another check of what a rank made, found for which its trainers ended, None otherwise;
    said: the membership knows. asked: the membership has asked them to leave.
    """

    generation: Generation
    first_rank: int
    trainers: dict[int, int]
    prepared: set[int] = field(default_factory=set)
    pids: dict[int, int] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    stopping: bool = False
    asked: bool = False
    leaving_since: float | None = None
    returned_at: float | None = None
    unsaved: int = -1
    failed: bool = False
    last: bool = False
    flushing: bool = False
    flushed: set[int] = field(default_factory=set)
    again: dict[int, float] = field(default_factory=dict)
    convicted: AuditReport | None = None
    said: bool = False

    @property
    def over(self) -> bool:
        """Whether all its trainers have ended."""
        return len(self.ended) == len(self.trainers)

    @property
    def step(self) -> int:
        """The step its trainers ended at."""
        return max(self.ended.values())

    def left_safely(self) -> bool:
        """Whether the last snapshots are at home and at the buddies, and in the store where no node takes over."""
        held = all(self.held.get(slot, -1) >= self.step for slot in self.trainers)
        return held and (not self.flushing or len(self.flushed) == len(self.trainers))

    def wrote(
        self, event: TilesUploaded | WriteFailed, step: int, now: float, *, longest_rest: float = LONGEST_REST
    ) -> None:
        """Take note of how a write ended; if one of its last `step` failed, it is due again after a rest."""
        made = self.generation
        if isinstance(event, TilesUploaded):
            saved = event.saved
            if (saved.step, saved.made_in, saved.attempt) == (step, made.number, made.attempt):
                self.flushed.add(event.slot)
        elif event.step == step:
            self.again[event.slot] = now + min(event.rest, longest_rest)

    def write(self, checkpoints: Checkpoints, step: int, now: float) -> None:
        """Have the last state, of `step`, written to the store, and again where that failed and is due again."""
        if not self.flushing:
            self.flushing = True
            self.flushed |= checkpoints.flush(step, self.generation)
        for slot in [slot for slot, at in self.again.items() if at <= now]:
            del self.again[slot]
            checkpoints.retry(slot, step, self.generation)


def assignment(
    settings: Settings,
    options: RunOptions,
    *,
    slot: int,
    rank: int = 0,
    generation: Generation | None = None,
    places: int = 0,
    credentials: Credentials | None = None,
    device: DeviceFacts | None = None,
    proven: ProvenChain | None = None,
    newcomer: bool = False,
    accident: float | None = None,
) -> Assignment:
    """Return the assignment of a slot's trainer; without a generation it only measures the model.

    places: how many device places a measuring trainer also checks. device: what those are, None while measuring.
    proven: what that trainer proved of the model. newcomer, accident: as `Assignment` takes them.
    """
    first = generation.nodes[0] if generation is not None else None
    return Assignment(
        run_id=settings.run_id,
        generation=generation.number if generation is not None else 0,
        attempt=generation.attempt if generation is not None else 0,
        measuring=generation is None,
        rank=rank,
        world=generation.world if generation is not None else 1,
        node=settings.node,
        slot=slot,
        layout=generation.layout if generation is not None else None,
        store_host=first.address if first is not None else "",
        store_port=first.store_port if first is not None else 0,
        store_prefix=generation.key if generation is not None else "",
        interface=interface_of(settings.address),
        store=options.store,
        threads=options.threads,
        snapshot_every=options.snapshot_every,
        checkpoint_every=options.saving.every.steps if options.store else 0,
        checkpoint_seconds=options.saving.every.seconds if options.store else 0.0,
        seed_digest=generation.job.partition(" ")[0] if generation is not None else "",
        places=places,
        restore=options.restore,
        fresh=options.fresh,
        tile_bytes=options.saving.tile_bytes,
        credentials=credentials,
        device=options.device,
        audit=options.health.audit if options.health is not None else 0.0,
        at_rest=options.health.at_rest if options.health is not None else 0.0,
        audit_acts=options.health is not None and options.health.act,
        numerics=str(options.health.numerics) if options.health is not None else NonFinite.OFF,
        spike=str(options.health.spike) if options.health is not None else Spike.OFF,
        rollback_steps=options.health.rollback_steps if options.health is not None else 0,
        newcomer=newcomer,
        accident=accident,
        nodes=tuple(node.name for node in generation.nodes) if generation is not None else (),
        expects_state=generation is not None and generation.reached > 0,
        proven=proven,
        recompute=generation.memory.recompute if generation is not None and generation.memory is not None else "none",
        recorded=generation is not None and options.health is not None,
        sheets=generation is not None and generation.world > 1 and bool(options.health and options.health.slow),
        device_free=device.memory - device.reserve if device is not None else 0,
        standby=settings.standby,
    )
