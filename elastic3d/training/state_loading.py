"""Loading a generation's state: rank 0 decides which, all ranks load it, and together go back from damaged tiles."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from checkpointing.errors import MissingTile
from checkpointing.reading.sources import TileSource
from elastic3d.clock import SYSTEM
from elastic3d.data import Batches
from elastic3d.data.ledger import Ledger
from elastic3d.data.noise import NoiseScale
from elastic3d.errors import StateError, StateUnfit, UsageError
from elastic3d.log import process_log
from elastic3d.parallel.assembly import Assembly
from elastic3d.parallel.numerics.scale import LossScale
from elastic3d.port import Assignment, Go
from elastic3d.pretrained.weights import KeptWeights, Weights
from elastic3d.provenance import record
from elastic3d.provenance.record import Provenance
from elastic3d.rollback import Rollback, new_to
from elastic3d.training import identity, initial_weights, loading, restoring, starting, state_facts
from elastic3d.training.checkpoint_timer import NOTHING_UNSAVED, Unsaved
from elastic3d.training.extras import Extras
from elastic3d.training.state_facts import AskedState, HealthFacts, StateFacts
from elastic3d.training.tiers import announced_read

READS = 3
"""How often a state is read before a copy that cannot be reached is given up; its holder is put out by then if dead."""
_PAUSE = 0.5
"""Seconds before it is read again: who refuses a connection does so at once."""

_DECIDED, _REFUSED = b"\0", b"\1"
"""What a decision begins with as rank 0 sends it, and what the error begins with that is in its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedState:
    """What was loaded besides the weights and the optimizer's state, which are in place."""

    decision: restoring.Decision
    ledger: Ledger
    scale: LossScale
    changes: tuple[str, ...]
    """In words, where the script differs from the one that saved the state."""
    accepted: tuple[str, ...]
    """Likewise, what is from here on as it was not before, because the script asks for it or may do so."""
    health: HealthFacts
    """How far the state can be relied on, as it says itself."""
    loss: float
    """Of the state's last step, NaN where there is none or it does not say."""
    noise: NoiseScale | None
    """What the state knows of its gradient's noise, None for nothing."""
    changed: str
    """What the state says is otherwise from its next step on, "" for nothing."""
    unsaved: Unsaved
    """What the state says of the run's last checkpoint."""
    provenance: str
    """Of the states that are made from here on, the same on all ranks; "" where nothing is known."""
    weights: KeptWeights | None
    """What the run began with, None for what its seed gave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLoader:
    """Loads a state into this rank's part of the model; made once per generation."""

    assignment: Assignment
    tiers: restoring.Tiers
    assembly: Assembly
    optimizer: torch.optim.Optimizer
    schedule: Any
    """The learning-rate schedule, None for none."""
    batches: Batches
    asked: AskedState
    """What the script asks for."""
    extras: Extras
    """What else the script has kept."""
    accept: frozenset[str]
    """What may have changed since the state was saved."""
    provenance: Provenance | None
    """What this rank knows of where its states come from; rank 0's is that of all."""
    config: str | None
    """Version of this rank's configuration, "" for none; None where nothing is known of it."""
    weights: Weights | None
    """What a run that begins is to begin with, None for what its seed gives."""
    peers: Callable[[], AbstractContextManager[None]]
    """Surrounds what all ranks do together, and ends the process if one of them is lost."""

    def load(self, go: Go, scale: LossScale) -> LoadedState:
        """Load the decided state, the same on all ranks. scale: the loss scale of a run that begins.

        Damage shows when tiles are read. If any rank finds one that has no good copy, all go back to an older state: in
        memory, else in the store, else to the beginning. So none goes on from what it has read before all have.
        """
        store, rank = self.assignment.store, self.assignment.rank
        with self.peers():
            self.extras.meet(self.assembly.mesh)
            self._compare_samples()
        ledger: Ledger = ()
        own = dict(self.optimizer.state)
        begins_again = False
        damaged: tuple[str, ...] = ()
        spoilt: tuple[tuple[int, int], ...] = ()
        while True:
            with self.peers():
                decision = self._decide(go, damaged, spoilt)
            now = record.decode(decision.provenance)
            identity.check_same_config(self.config, now, self.assignment.node)
            missing: MissingTile | None = None
            begun, renamed = None, ""
            if begins_again:
                self.optimizer.state.clear()
                self.optimizer.state.update(own)
            if decision.source == restoring.NONE:
                if self.weights is not None:
                    with self.peers():
                        begun = initial_weights.agree(self.weights, self.assembly.mesh)
                self.assembly.initialise(again=begins_again)
            else:
                if restoring.is_foreign(decision):
                    initial_weights.check_imported(self.weights)
                else:
                    loading.check_model(decision, self.assembly.specs)
                    self._changes(decision)  # only for what it refuses, before anything is loaded
                    then = state_facts.made_by(state_facts.parse(decision.facts, decision.step))
                    identity.check_config(then, now, decision.step, self.accept)
                    begun = state_facts.parse(decision.facts, decision.step).weights
                    renamed = initial_weights.check_resumed(begun, self.weights, decision.step, self.accept)
                self._give_copies_values(decision)
                try:
                    with announced_read(decision, store):
                        self._read(decision, partial(self.tiers.sources, decision, store, rank, go.near))
                except MissingTile as error:
                    if not error.damaged:
                        raise
                    missing = error
            with self.peers():
                found_damaged = (
                    decision.source != restoring.NONE and self.assembly.mesh.highest(missing is not None) > 0
                )
            begins_again = found_damaged
            if not found_damaged:
                saved = self._facts(decision)
                if decision.source != restoring.NONE:
                    ledger = loading.take(self.optimizer, self.schedule, self.batches, decision, accept=self.accept)
                if saved is not None:
                    scale = scale.restored(saved.loss_scale)
                with self.peers():
                    if saved is not None:
                        self.extras.load(saved.extra)
                    self.extras.compare()
                changes = tuple(self._changes(decision))
                if begun is not None and saved is None and self.weights is not None:
                    changes = (*changes, self.weights.in_words())
                facts = saved or HealthFacts()
                rollbacks = (*facts.rollbacks, *self._new_to(decision, go))
                self.batches.leave_out((one.first, one.stop) for one in rollbacks)
                return LoadedState(
                    decision=decision,
                    ledger=ledger,
                    scale=scale,
                    changes=changes,
                    accepted=() if saved is None else (*self._accepted(saved, now), *filter(None, [renamed])),
                    health=replace(
                        HealthFacts(**state_facts.fields_of(facts)),
                        rollbacks=rollbacks,
                        spike=max((facts.spike, *(one.spike for one in rollbacks))),
                    ),
                    loss=saved.last_loss if saved is not None else math.nan,
                    noise=saved.noise if saved is not None else None,
                    changed=saved.changed if saved is not None else "",
                    unsaved=saved.unsaved if saved is not None else NOTHING_UNSAVED,
                    provenance=decision.provenance,
                    weights=begun,
                )
            if decision.source == restoring.MEMORY:
                if missing is not None:
                    process_log().emit(
                        "copy.damaged", source=restoring.MEMORY, tensor=missing.key, error=str(missing), more=0
                    )
                spoilt = (*spoilt, (decision.step, decision.generation))
                continue
            process_log().emit(
                "checkpoint.damaged", checkpoint=decision.checkpoint, error=str(missing or "another rank's tile")
            )
            damaged = (*damaged, decision.checkpoint)

    def _read(self, decision: restoring.Decision, open_sources: Callable[[], Mapping[str, TileSource]]) -> None:
        """Read the state. Copies that cannot be reached are asked for again: a link that loses packets is no loss."""
        left = READS
        while True:
            sources = open_sources()
            left -= 1
            try:
                loading.read(
                    self.assembly.model,
                    self.optimizer,
                    self.batches,
                    decision,
                    sources,
                    self.assembly.mesh.computes_on,
                    extras=self.extras,
                    accept=self.accept,
                    arrived=self.assembly.mesh.progress.tick,
                )
                return
            except MissingTile as error:
                if error.damaged or not left:
                    raise
                SYSTEM.sleep(_PAUSE)
            finally:
                restoring.close_sources(sources)

    def _give_copies_values(self, decision: restoring.Decision) -> None:
        """Have initial values made where the script has copies of the model that the decided state does not bring."""
        saved, deferred = self._facts(decision), self.assembly.deferred
        brought = [] if saved is None else self.extras.brought(saved.extra)
        if deferred is not None and deferred.without_values(brought):
            self.assembly.initialise()

    def _compare_samples(self) -> None:
        """Raise UsageError where ranks make other samples of the same numbers, each of them the same each time.

        Those that are only drawn are no error, and states say nothing of them: all ranks have to say the same.
        """
        mesh, batches = self.assembly.mesh, self.batches
        samples = mesh.gather(batches.samples.encode())
        if len(set(samples)) == 1:
            return
        drawn = not all(samples)
        batches.samples = ""
        mine = [] if drawn else batches.later_samples()
        later = [json.loads(said) for said in mesh.gather(json.dumps(mine).encode())]
        for rank, there in enumerate(later):
            if there and all(one and other and one != other for one, other in zip(later[0], there, strict=True)):
                raise UsageError(
                    f"run.restore: the data set makes other samples of the same numbers on rank {rank} than on rank 0: "
                    "some would be trained twice, and others never. Make it alike in every process: sort what it "
                    "lists, and shuffle by a seed of its own, such as random.Random(17).shuffle(files), or not at all: "
                    "run.batches shuffles"
                )

    def _decide(self, go: Go, damaged: tuple[str, ...], spoilt: tuple[tuple[int, int], ...]) -> restoring.Decision:
        given, mesh = self.assignment, self.assembly.mesh
        newest = mesh.highest(go.newest)
        # A node that was not there when the code raised cannot know that nothing would be skipped.
        failed_after = -mesh.highest(-go.failed_after)
        decided: bytes | StateError | None = None
        if given.rank == 0:
            known = restoring.Known(
                generation=given.generation,
                newest=newest,
                reached=go.reached,
                fresh=given.fresh,
                wanted=given.restore,
                damaged=damaged,
                spoilt=spoilt,
                failed_after=failed_after,
                failure=go.failure,
                distrusted=go.distrusted,
                rollbacks=go.rollbacks,
            )
            try:
                decision = restoring.decide(self.tiers, go.servers, given.store, self.assembly.specs, known)
                untrained = max(known.reached, known.newest) <= 0 and not known.fresh
                if decision.source == restoring.NONE and given.store is not None and untrained:
                    starting.check_imported(given.store)
                decided = restoring.dump(replace(decision, provenance=self._provenance(decision)))
            except StateError as error:
                decided = error
        return restoring.load(self._shared(decided))

    def _shared(self, decided: bytes | StateError | None) -> bytes:
        """Return rank 0's decision on all ranks; StateError on all of them where there is none.

        If it were rank 0 alone that raised, its node would be blamed for it.
        """
        data = _DECIDED + decided if isinstance(decided, bytes) else None
        if isinstance(decided, StateError):
            data = _REFUSED + json.dumps([isinstance(decided, StateUnfit), str(decided)]).encode()
        data = self.assembly.mesh.broadcast(data)
        if isinstance(decided, StateError):
            raise decided
        if data.startswith(_REFUSED):
            final, words = json.loads(data.removeprefix(_REFUSED))
            raise (StateUnfit if final else StateError)(words)
        return data.removeprefix(_DECIDED)

    def _provenance(self, decision: restoring.Decision) -> str:
        """Return what makes the states from here on, with what made those before it."""
        if self.provenance is None:
            return ""
        try:
            facts = self._facts(decision)
        except StateUnfit:
            facts = None  # each rank reads them next, and refuses them
        saved = None if facts is None else state_facts.made_by(facts)
        return record.encode(record.follow(self.provenance, saved, generation=decision.generation, step=decision.step))

    @staticmethod
    def _new_to(decision: restoring.Decision, go: Go) -> tuple[Rollback, ...]:
        """Return what the decided state does not know that the run leaves out."""
        if decision.source == restoring.NONE or restoring.is_foreign(decision):
            # Where nothing was passed over it is another run that begins, and finds its own.
            return new_to(go.rollbacks, 0, 0) if decision.distrusted >= 0 else ()
        return new_to(go.rollbacks, decision.generation, decision.step)

    @staticmethod
    def _facts(decision: restoring.Decision) -> StateFacts | None:
        if decision.source == restoring.NONE or restoring.is_foreign(decision):
            return None
        return state_facts.parse(decision.facts, decision.step)

    def _changes(self, decision: restoring.Decision) -> list[str]:
        """Return in words where the script differs from the one that saved the state; older states do not say."""
        if decision.source == restoring.NONE or restoring.is_foreign(decision):
            return []
        saved = state_facts.parse(decision.facts, decision.step)
        identity.check_sums(saved.asked, self.asked)
        lines = [] if saved.asked is None else identity.changes(saved.asked, self.asked, self.accept)
        return [*lines, *self.extras.changes(saved.extra, self.accept)]

    def _accepted(self, saved: StateFacts, now: Provenance | None) -> tuple[str, ...]:
        config = identity.config_change(state_facts.made_by(saved), now)
        data = state_facts.data_change(saved, self.batches.order, self.batches.fingerprint, self.batches.samples)
        schedule = "" if saved.asked is None else identity.schedule_change(saved.asked, self.asked)
        return tuple(filter(None, (config, data, schedule, *self.extras.accepted(saved.extra))))
