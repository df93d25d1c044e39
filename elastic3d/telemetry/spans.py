"""Events of one node's keeper as spans. Pure: no clock, no thread, no network.

A trace is a generation:

    generation                    from what ended the one before to its own end
      recovery | beginning        until its first step; "recovery" where this node trained before
        recovery.notice, .seal, .restore, .first_step
        trainer.begin             of each rank of each node: until it has its state
          trainer.begin.<part>    as event `state.restored` has them
      trainer                     of each rank: from its start to its exit
      checkpoint                  from the first write that the leader's node made to the commit
        checkpoint.write          of each slot of each node
        checkpoint.commit
      hearing                   from when ranks differed until it is known who is wrong
        hearing.repeat          of each rank: what differed is computed again
      verdict                   from the hearing, the first silence, or the first slow step, until it is said
        verdict.silence         of each rank, where nothing moves
      checkpoint.verify, rank.silent, ...

Of what is one for all nodes, one sends it: a generation the node that leads the next one, or the first of its nodes
that saw this one; its beginning the node of rank 0; a checkpoint the node that committed it. A node that dies takes
with it what it had not sent. Times are of each node's own wall clock: between nodes they differ by as much as clocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic3d.telemetry.checkpoint_spans import CheckpointSpans
from elastic3d.telemetry.generation_spans import GenerationSpans
from elastic3d.telemetry.span import NodeTrace, TraceSpan
from elastic3d.telemetry.trainer_spans import TrainerSpans
from elastic3d.telemetry.verdict_spans import VerdictSpans


class SpanMaker:
    """Takes a node's events in their order. All times are wall seconds.

    run, node: its names. life: tells the spans of a node that was started again from those it sent before.
    """

    def __init__(self, run: str, node: str, life: str = "") -> None:
        trace = NodeTrace(run, node, life)
        self._generations, self._trainers = GenerationSpans(trace), TrainerSpans(trace)
        self._checkpoints, self._verdicts = CheckpointSpans(trace), VerdictSpans(trace)

    def observe(self, event: str, fields: Mapping[str, Any], at: float) -> list[TraceSpan]:
        """Take an event with all its fields, those of its log included; return the spans that it ends."""
        number = fields.get("generation")
        generation = self._generations.number if number is None else int(number)
        spans = [
            *self._verdicts.observe(event, fields, at, generation),
            *self._trainers.observe(event, fields, at, generation),
            *self._checkpoints.observe(event, fields, at, generation),
            *self._generations.observe(event, fields, at),
        ]
        if event == "generation.sealed":
            self._checkpoints.forget(before=self._generations.number)
        return spans

    def stepped(self, generation: int, at: float) -> list[TraceSpan]:
        """Take a step of this node's first trainer, after its event if there is one."""
        return self._generations.stepped(generation, at)

    def end(self, at: float) -> list[TraceSpan]:
        """Return the spans that end with this node's part in the job."""
        return [*self._verdicts.end(at), *self._generations.end(at)]
