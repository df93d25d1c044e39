"""State into a built model, and the part of it that is not tensors out again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from checkpointing.format.tiles import TensorSpec
from checkpointing.reading.resolver import Resolved, resolve
from checkpointing.reading.sources import TileSource
from elastic3d.data import Batches, Cursor
from elastic3d.data.ledger import Ledger
from elastic3d.data.noise import NoiseScale
from elastic3d.devices import ComputeDevice
from elastic3d.errors import StateUnfit
from elastic3d.log import process_log
from elastic3d.parallel import facts as written
from elastic3d.parallel.numerics.scale import LossScale
from elastic3d.parallel.restore_buffers import RestoreBuffers
from elastic3d.parallel.state import create_optimizer_state, held_by_model, held_by_optimizer
from elastic3d.pretrained.weights import KeptWeights
from elastic3d.snapshots.lending import BorrowedMemory
from elastic3d.training import identity, restoring, starting, state_facts
from elastic3d.training.checkpoint_timer import Unsaved
from elastic3d.training.extras import Extras
from elastic3d.training.state_facts import AskedState, HealthFacts, KeptExtra, StateFacts


def read(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    decision: restoring.Decision,
    sources: Mapping[str, TileSource],
    device: ComputeDevice,
    *,
    extras: Extras,
    accept: Collection[str] = (),
    arrived: Callable[[], object] = lambda: None,
) -> None:
    """Read the tensors of the decided state into this rank's model and optimizer; all else of it is for `take`.

    accept: what may have changed since it was saved (`identity.ACCEPTED`). arrived: called after each tile that was
    read. The extras' state is read, and given to them by `Extras.load`.
    From a checkpoint that no run has saved only the weights are taken. StateError for the state of other batches;
    checkpointing's MissingTile or SpecMismatch where tiles do not fit: then some of the tensors are read.
    """
    if restoring.is_foreign(decision):
        starting.load_weights(model, decision, sources, device, arrived=arrived)
        return
    facts = state_facts.parse(decision.facts, decision.step)
    state_facts.check_facts(facts, decision.step, batches.order, batches.fingerprint, accept=accept)
    saved = decision.specs()
    create_optimizer_state(model, optimizer, saved.values())
    held = [*held_by_model(model), *held_by_optimizer(model, optimizer), *extras.rooms(saved, facts.extra)]
    buffers = RestoreBuffers(held, device)
    wanted = list(buffers.wanted())
    offers = restoring.offers(decision, sources, wanted)
    resolved = resolve(wanted, offers, sources, buffers.destination, arrived=arrived)
    tell_read(resolved, sources)
    buffers.settle()


def take(
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    batches: Batches,
    decision: restoring.Decision,
    *,
    accept: Collection[str] = (),
) -> Ledger:
    """Go on from the state of which every rank has read the tensors: its schedule and batches; return its ledger.

    Not before, since ranks that went ahead of one which finds damage would not begin where that one does. Another
    schedule than the state's, which `accept` allows, begins anew, with the learning rates that the script has set. The
    run begins at step 0 where no run has saved the state, which has an empty ledger.
    """
    if restoring.is_foreign(decision):
        return ()
    facts = state_facts.parse(decision.facts, decision.step)
    mixed = state_facts.check_facts(facts, decision.step, batches.order, batches.fingerprint, accept=accept)
    if mixed:
        process_log().emit("mixture.changed", step=decision.step, detail=mixed)
    another = "schedule" in accept and facts.asked is not None and facts.asked.schedule != identity.kind_of(schedule)
    written.set_optimizer_groups(optimizer, facts.optimizer_groups, besides=identity.OF_SCHEDULES if another else ())
    if not another:
        written.set_schedule_state(schedule, facts.schedule)
    cursor = facts.cursor
    said = batches.go_on(decision.step, None if cursor is None else Cursor(**written.decode(cursor)), facts.order)
    if said:
        process_log().emit("exclude.late", detail=said)
    return facts.ledger


def tell_read(resolved: Resolved, sources: Mapping[str, TileSource]) -> None:
    """Log how many bytes came from where, and the copies that were found damaged or could not be read."""
    nbytes = dict.fromkeys(("here", "peers", "disk", "store"), 0)
    for name, tally in resolved.sources.items():
        here = "here" if isinstance(sources[name], BorrowedMemory) else "peers"
        nbytes[name if name in nbytes else here] += tally.bytes
    damaged = [failure for failure in resolved.failures if not failure.unreachable]
    process_log().emit("state.read", **nbytes, unread=len(resolved.failures) - len(damaged))
    if damaged:
        first = damaged[0]
        process_log().emit(
            "copy.damaged", source=first.source, tensor=first.key, error=first.reason, more=len(damaged) - 1
        )


def check_model(decision: restoring.Decision, specs: Iterable[TensorSpec]) -> None:
    """Raise StateUnfit if the decided state is that of another model. specs: all parameters and buffers of this one."""
    saved = {key: spec for key, spec in decision.specs().items() if key.startswith("model/")}
    here = {spec.key: spec for spec in specs}
    problems = [
        _few("the state lacks", [key for key in here if key not in saved]),
        _few("the model lacks", [key for key in saved if key not in here]),
        _few(
            "of another shape or dtype are",
            [
                f"{key} ({saved[key].dtype}{list(saved[key].shape)}, now {spec.dtype}{list(spec.shape)})"
                for key, spec in here.items()
                if key in saved and saved[key] != spec
            ],
        ),
    ]
    if any(problems):
        raise StateUnfit(
            f"the state of step {decision.step} is not that of this model: {'; '.join(filter(None, problems))}. Trying "
            "again does not help: go back to the model it was saved from, or start a new run"
        )


def _few(what: str, names: list[str]) -> str:
    """Return these names in words, "" for none."""
    if not names:
        return ""
    return f"{what} {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def facts(
    batches: Batches,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    ledger: Ledger,
    scale: LossScale,
    *,
    asked: AskedState | None,
    begun_from: str,
    health: HealthFacts,
    loss: float,
    extra: dict[str, KeptExtra],
    weights: KeptWeights | None,
    adapters: dict[str, Any],
    provenance: str,
    noise: NoiseScale | None,
    changed: str,
    unsaved: Unsaved,
) -> StateFacts:
    """Return the state that is not tensors, equal on all ranks. loss: of the last step, NaN for none."""
    cursor = batches.cursor
    return StateFacts(
        step=batches.step,
        cursor=None if cursor is None else written.encode(asdict(cursor), "the data set's cursor"),
        order=batches.order,
        data=batches.fingerprint,
        samples=batches.samples,
        optimizer_groups=tuple(written.optimizer_groups(optimizer)),
        schedule=written.schedule_state(schedule),
        ledger=tuple(ledger),
        loss_scale=None if scale.fixed else scale,
        asked=asked,
        begun_from=begun_from,
        loss=loss.hex(),
        extra=extra,
        weights=weights,
        adapters=adapters,
        provenance=provenance,
        noise=noise,
        changed=changed,
        unsaved=unsaved,
        **state_facts.fields_of(health),
    )
