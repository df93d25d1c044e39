"""A checkpoint's model, for a run that evaluates and does not train, over data- or tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkpointing import Checkpoint
from checkpointing.reading.resolver import resolve
from elastic3d.parallel.assembly import Assembly
from elastic3d.parallel.restore_buffers import RestoreBuffers
from elastic3d.parallel.state import held_by_model
from elastic3d.training import loading, restoring, starting

SOURCE = "store"


class EvaluatedState:
    """A checkpoint that a run is to evaluate."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.step = checkpoint.step
        """The number of steps that the run had made."""
        order = checkpoint.facts.get("order")
        cut = isinstance(order, Mapping) and not order.get("budget")
        size = order.get("micro_batch") if isinstance(order, Mapping) and cut else None
        self.micro_batch: int | None = size if isinstance(size, int) else None
        """Samples of a micro-batch of training, None where the checkpoint does not say."""

    def load(self, assembly: Assembly) -> None:
        """Give a model the checkpoint's weights, and make its passes ready; nothing is left to train with.

        StateUnfit for the checkpoint of another model, LayoutError for pipeline stages; errors of checkpointing where
        tiles cannot be read.
        """
        assembly.prepare_to_evaluate()
        assembly.stop_watching()
        opened, device = self._checkpoint, assembly.mesh.computes_on
        decision = restoring.Decision(
            source=restoring.STORE,
            step=opened.step,
            generation=opened.made_in,
            facts=opened.facts,
            offers=tuple(opened.offers(SOURCE)),
            checkpoint=opened.name,
        )
        sources: Mapping[str, Any] = {SOURCE: opened.source(SOURCE)}
        if restoring.is_foreign(decision):
            starting.load_weights(assembly.model, decision, sources, device)
            return
        loading.check_model(decision, assembly.specs)
        buffers = RestoreBuffers(held_by_model(assembly.model), device)
        wanted = list(buffers.wanted())
        resolve(wanted, restoring.offers(decision, sources, wanted), sources, buffers.destination)
        buffers.settle()
