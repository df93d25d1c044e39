"""The events of elastic3d: one list of names, one file of JSON lines per keeper, and lines for people on stderr.

Every event has a level. `ELASTIC3D_LOG` says which are shown on stderr: `debug` shows all, `info` those that people
should know, and `json` the same as `info`, one JSON object per line. stdout belongs to the user's own code.

Every line has `event` (a name of `EVENTS`), `at` (wall clock, for people and for order within one machine) and the
fields that the log was bound with: `run`, `generation`, `node`, `slot`, `rank`, each if it is known. Fields that are
None were not known and mean nothing. Floats that must survive bit for bit (losses) are written as `float.hex()` text.

The log is an interface: its readers (the demo, a dashboard, a test) need nothing else of the runtime.

Emitting an event never waits for the disk: a separate thread (output.py) hands lines to a process that writes them
(event_file.py), so that the keeper can end whatever the disk does. If they cannot keep up, events are dropped, and
`events.dropped` says how many.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType, TracebackType
from typing import Any, Self

import structlog

from elastic3d.clock import SYSTEM, Clock
from elastic3d.event_process import EventProcess
from elastic3d.output import LineWriter, Verbosity, flush, say, show, verbosity


class Level(IntEnum):
    """How much an event matters to people."""

    DEBUG = 10
    """Only to people who look for something: not shown unless asked for."""
    INFO = 20
    """The job's life."""
    WARNING = 30
    """Training goes on, but somebody should look at it."""
    ERROR = 40
    """Something ended that should not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventKind:
    """One event in the list."""

    level: Level
    """How much it matters, unless the emitter knows better."""
    fields: tuple[str, ...]
    """Names of its fields, besides those that a log is bound with."""


def _debug(*fields: str) -> EventKind:
    return EventKind(level=Level.DEBUG, fields=fields)


def _info(*fields: str) -> EventKind:
    return EventKind(level=Level.INFO, fields=fields)


def _warning(*fields: str) -> EventKind:
    return EventKind(level=Level.WARNING, fields=fields)


def _error(*fields: str) -> EventKind:
    return EventKind(level=Level.ERROR, fields=fields)


EVENTS: Mapping[str, EventKind] = MappingProxyType(
    {
        # A node's keeper has begun: the first event of a node, and of each life of one that comes back.
        "node.started": _debug(),
        # Membership, as one keeper sees it. `nodes` and `spares` are lists of node names in rank order.
        # A keeper joins again, as a newcomer, after the others put it out: `member.fenced` says why.
        "member.joined": _debug("incarnation"),
        "member.fenced": _warning("incarnation", "detail"),
        # The machine had no memory or descriptor for a trainer's progress record: that it stands still is not found. Or
        # something in the trainer wrote over it: that it stands still is found after a minute, and not where.
        "rank.unwatched": _warning("error"),
        # What was taken of a rank that stands still could not be written: the folder is full, refuses, or hangs. Once.
        "evidence.lost": _warning("error"),
        # One for each check that this node did not pass; it then ends without joining.
        "admission.failed": _error("check", "detail", "seconds"),
        # The script's model, before the node joins: operations for one sample, forward and backward, without what is
        # computed again, and what this node's devices could make in a second. `detail` says why one is not known.
        "model.measured": _debug("parameters", "sample_flops", "peak_flops", "detail"),
        # From the node of rank 0, of a generation that begins: bytes of gradients that all ranks send to other nodes,
        # for each `turn_samples` samples of a step and once a step besides. `detail`: why that is not known.
        "reduction.planned": _debug("turn_bytes", "turn_samples", "step_bytes", "detail"),
        # An exception ended a background thread, or one turn of it; `consequence` says what follows.
        "thread.failed": _error("thread", "error", "traceback", "consequence", "times"),
        # `metrics=`: this node's are served there for Prometheus. `metrics.failed`: something of them could not be
        # counted or read, once.
        "metrics.served": _info("address"),
        "metrics.failed": _warning("error"),
        # This node leads, and begins the account of where the time of the nodes goes anew: `detail` says why. Once.
        "goodput.restarted": _warning("detail"),
        # `telemetry=`: this node's metrics and spans are sent there. `telemetry.failed`: the collector does not take
        # them, with `signal` "traces" or "metrics"; once, until `telemetry.mended`: it does again, and of `failures`
        # tries in between, `lost` spans are left out for good. `telemetry.unsent`: nor were these when the node ended.
        "telemetry.started": _info("endpoint", "every"),
        "telemetry.failed": _warning("signal", "endpoint", "error", "detail"),
        "telemetry.mended": _info("signal", "failures", "lost"),
        "telemetry.unsent": _warning("spans", "error"),
        # The disk was too slow for `count` events, which are lost.
        "events.dropped": _debug("count"),
        "generation.proposed": _debug("number", "attempt", "cause", "nodes", "spares", "layout", "detail"),
        # `layout` is {"pp", "dp", "cp", "tp", "zero"}; `leader` is the node that leads the membership now.
        "generation.sealed": _info("number", "cause", "nodes", "spares", "layout", "leader", "detail"),
        # `peer` is a node name, `evidence` says how its end was noticed.
        "peer.lost": _warning("peer", "evidence"),
        # The trainers stand still, and this node cannot connect to `peer`. While two nodes cannot, one of them stands
        # aside (a spare, see the detail of `generation.sealed`), until `peer.reachable`: they can, or one of them left.
        "peer.unreachable": _warning("peer", "detail"),
        "peer.reachable": _info("peer"),
        # A trainer of this node has made no progress for `seconds` and waits for no other one, or something about it is
        # `odd`: it may be what the others wait for. `state` is that of its processes; `detail` says where it is. Once
        # for each, until `rank.recovered`.
        "rank.suspected": _warning("step", "phase", "seconds", "state", "odd", "detail"),
        "rank.recovered": _info(),
        # From the leader: nothing moves, because of these `ranks` of `nodes` (empty lists where nobody can be singled
        # out). `act`: the generation ends for it, all trainers are started again. `waits`: who waits for whom.
        # `silent`: for how many seconds each rank had been silent, by rank.
        "rank.stuck": _warning("fault", "ranks", "nodes", "step", "act", "confidence", "detail", "waits", "silent"),
        # From the leader: nothing moves, no node is at fault, and nothing is done about it.
        "training.stalled": _warning("fault", "step", "confidence", "detail", "waits", "silent"),
        # From the leader: what was done because `nodes` are slow, or, if the list is empty, are well again. `remedy` is
        # "swap", "recut", "shares", "back" or, which is only reported, "evict". `act`: a generation was formed for it,
        # at a boundary between two steps. `before`, `after`: predicted seconds of a step. `rungs`: all that could be
        # done.
        "layout.rebalanced": _info("remedy", "step", "nodes", "ranks", "act", "before", "after", "rungs", "detail"),
        # From the leader: memory ran out on `ranks` of `nodes`, and the next generation needs less, by `rung`: "leaner
        # schedule", a higher ZeRO stage, "recompute full", "more stages"; "none" where the script leaves nothing open,
        # said once. `act`: it is done, and not only reported.
        "memory.short": _warning("rung", "ranks", "nodes", "step", "act", "detail"),
        # A caller was turned away at one of this node's ports: `port` is "links", "tiles-<slot>", "table" or "metrics",
        # `peer` its address, `more` how many others were since the last such event. Or, with `port` "links": a
        # neighbour's port at `peer` refuses this node, and that is not a death, since no second node finds the same.
        "peer.refused": _warning("port", "peer", "reason", "more"),
        # The key of the run's secret was "missing" or held "garbage": this node, which leads, writes it again.
        "secret.restored": _warning("was"),
        # Another secret than this node's is there now, and is used from now on: etcd had lost this node's.
        "secret.adopted": _info(),
        # This node has to leave in `seconds`, without a deadline if that is None.
        "node.draining": _info("seconds", "detail"),
        "node.leaving": _info("detail"),
        # By `elastic3d chaos inject`, on its own stderr: a fault was ordered of `node`, which allows it.
        "fault.ordered": _info("fault", "seconds", "by"),
        # This node does to its processes `pids` what was ordered: written, as far as the disk allows, before it acts.
        # `seconds`: for how long.
        "fault.injected": _warning("fault", "seconds", "pids", "by"),
        # A fault was ordered of this node, which does not do it. Where `--rdzv-conf=chaos=allow` was not given: once.
        "fault.refused": _warning("fault", "by", "detail"),
        "etcd.lost": _warning("error"),
        "etcd.back": _info("seconds"),
        # etcd answers, but takes no writes from us until somebody has mended what `error` says.
        "etcd.impaired": _warning("error"),
        "etcd.mended": _info(),
        # etcd does not compact old versions for the leader: it fills up unless somebody does what `error` says.
        "compaction.refused": _warning("error"),
        "compaction.resumed": _info(),
        # etcd came back empty or from a backup, at `revision`: the members write there again what they know.
        "etcd.rolled_back": _warning("revision"),
        # The keeper's trainer. `kind` is how it ended: "done", "left", "measured", "peer_lost", "error" (of the
        # script), "out_of_memory", "stopped" (by its keeper), "crash" (it or a process of its data loader was killed)
        # or "template" (its template died).
        "trainer.started": _debug("pid"),
        # The script raised `error`. `final`: trying again cannot mend it.
        "script.raised": _error("error", "traceback", "final"),
        # What the script raised says that memory ran out; `error` also names who held it, and what helps. Or the kernel
        # killed the trainer for that.
        "memory.exhausted": _error("error", "traceback", "final"),
        "trainer.exited": _debug("kind", "step", "error"),
        # `source` is "none", "memory" or "store"; `step` is the number of steps that led to the state. Events under
        # `generation` g are about the state from which that generation starts. `detail` is there if a person should
        # know more: steps that are lost or repeated beyond the cost of a death, checkpoints that are damaged. `parts`:
        # where the time since the trainer's beginning went, in order: [name, seconds, seconds of processor time] each.
        # `loss`: of the last of these steps, where there is one. A rank 0 that ends before it tells of a step leaves no
        # `step.committed` of it; another rank may have a copy of the whole state, from which training goes on.
        "state.restored": _debug("source", "step", "detail", "parts", "loss"),
        # Written only by the slot that holds rank 0. `step` counts the updates made, this one included. `samples` is
        # [first, stop) in positions of the run, and `sample_sum` a check over the samples themselves. `processor`:
        # seconds of processor time that rank 0 has used for the step. `data`, `copy`: of its `seconds`, those in which
        # rank 0 waited for its data loader, and for the copy of a snapshot. `read`, where there are any: bytes from
        # object storage that rank 0's samples were made of. `excluded`, where there are any: positions among `samples`
        # that are no part of it, as [first, stop) each. `tokens`: of the others, where the data set says how many its
        # samples have. `logged`: what scripts gave to `run.log` for it, by name. `noise_scale`: of the gradient, in
        # samples, where the global batch follows it.
        "step.committed": _debug(
            "step",
            "loss",
            "gradient_norm",
            "seconds",
            "safe_step",
            "samples",
            "sample_sum",
            "processor",
            "data",
            "copy",
            "read",
            "tokens",
            "excluded",
            "logged",
            "noise_scale",
        ),
        # From the node of rank 0: the global batch is another one from step `step` on, and `detail` says which and why.
        # Once more where the step before it is made again.
        "batch.resized": _info("step", "detail"),
        # From the node of rank 0: a script called `run.stop`, `detail` says why, and no step follows step `step`. Once
        # more where that step is made again.
        "run.stopped": _info("step", "detail"),
        # From the node that writes the curves: `tracker` is as `trackers=` gives it. It writes from now on, and had all
        # points up to `step`.
        "tracker.opened": _debug("tracker", "step"),
        # It does not take points. Training goes on; they are kept within a bound, and written when it does. Once, until
        # `tracker.mended`: everything up to `step` is written.
        "tracker.failed": _warning("tracker", "error", "detail"),
        "tracker.mended": _info("tracker", "step"),
        # It has no points of the steps [first, last] of `steps`, and no node has them any more.
        "tracker.gap": _warning("tracker", "steps", "detail"),
        # The run went back, and this tracker cannot forget its points of the steps [first, last] of `steps`.
        "tracker.kept": _warning("tracker", "steps", "detail"),
        # The run is over, and the `count` points of the steps [first, last] of `steps` could not be written.
        "tracker.unwritten": _error("tracker", "steps", "count", "error"),
        # From the node that holds rank 0, every ten seconds: `left` is the time until step `until`, for people.
        # `logged`: the latest of what scripts gave to `run.log`, for people too.
        "training.progress": _info("step", "until", "loss", "logged", "steps_per_second", "left"),
        # The first non-finite loss in a row; training goes on; `numerics=` may skip its update.
        "loss.nonfinite": _warning("step", "loss"),
        # For some steps the loss has been far above the last ones, whose median is `usual`; once, until it is not.
        # `detail`: why nothing is done about it, though the run asks for that (an error then).
        "loss.spiked": _warning("step", "loss", "usual", "detail"),
        # Instead of step `step`, in which the loss had jumped up, the run goes back to a state of at most `clean`
        # updates, and leaves out the positions [first, stop) of `samples`.
        "run.rolled_back": _warning("step", "clean", "samples", "detail"),
        # Nobody can repeat what the ranks of this generation compute; with dp 1 for one.
        "audit.off": _info("detail"),
        # What an audited step takes longer than others became known, and from the next audits on one step in `every`
        # is audited, so that they stay within their budget.
        "audit.planned": _info("step", "every", "detail"),
        # Two ranks that ran micro-batch `micro_batch` of step `step` came to other bits, first at `where`; `finding` is
        # that of the ranks which then repeated it: "transient", "persistent", "nondeterministic" or "undecided".
        # `ranks` and `nodes` are those that computed wrongly. `compared`: "passes"; or, without a micro-batch, what was
        # exchanged: "transit" for a piece of a gradient that arrived as something else, whose ends are both in `ranks`
        # since it may be either, "weights" that a rank had gathered, "sum" of gradients. `seconds`: how long it took to
        # find that out; `parts`: of them, those in which each rank computed again, by rank.
        "audit.failed": _warning(
            "step", "micro_batch", "compared", "where", "finding", "ranks", "nodes", "detail", "seconds", "parts"
        ),
        # Nobody could be convicted, and training goes on with what may be wrong.
        "audit.inconclusive": _error(
            "step", "micro_batch", "compared", "where", "finding", "detail", "seconds", "parts"
        ),
        # The passes of step `step` were made again before its update, because what `nodes` had computed was wrong once.
        "step.redone": _warning("step", "nodes", "detail"),
        # Samples of step `step`, at the positions [first, stop) of `samples`, are no part of its update: because their
        # loss or gradient is not finite, wherever it is computed; or because the run knew of them, which is not shown.
        "batch.excluded": _warning("step", "samples", "detail"),
        # The device of a rank of `nodes` computes wrongly: step `step` is not made with it, and its machine is set
        # aside. `clean` is the newest step that audits vouch for: states after it are not gone on from. `compared` is
        # as in `audit.failed`, or "update".
        "node.lying": _error("step", "micro_batch", "compared", "where", "ranks", "nodes", "detail", "clean"),
        # Before the first step of a generation, its newcomers `nodes` computed what all others did, over the state of
        # `step`; or nobody could ask them to.
        "node.examined": _info("step", "nodes", "detail"),
        "node.unexamined": _warning("step", "nodes", "detail"),
        # Ranks came to other bits in that exam; the rest is as in `audit.failed`. Newcomers that differ are set aside
        # (`node.lying`), and no step was made with them.
        "exam.failed": _error(
            "step", "micro_batch", "compared", "where", "finding", "ranks", "nodes", "detail", "seconds", "parts"
        ),
        # A device was convicted, or the loss jumped up: states of more than `step` updates that were made in
        # generations before `before` are not gone on from any more, in memory and in the store. From the leader's node,
        # when it sealed the next generation.
        "state.distrusted": _warning("step", "before", "detail"),
        # Something is not checked in this generation, though the run asks for it: `where`.
        "check.off": _warning("where", "detail"),
        # Bits of a rank's parameters or optimizer state changed in memory (`where`: which tensor) though nothing wrote
        # to them. `acted`: its step is not made, and training goes on from the last state that is held twice; a second
        # time within an hour, the node is set aside.
        "state.altered": _error("step", "where", "ranks", "nodes", "detail", "acted"),
        # `ranks` left the vote of step `step` with another outcome than all others; none where that is not certain.
        "vote.split": _error("step", "ranks", "nodes", "detail", "acted"),
        # A piece of a rank's update in step `step` came to other bits when others computed it again. `ranks`: who was
        # wrong, in the words of `finding`, as in `audit.failed`.
        "update.wrong": _error("step", "ranks", "nodes", "finding", "detail", "acted"),
        # From the node that holds rank 0: one of `nodes` takes `rho` times as long as others for the same work, or, of
        # `kind` "data" and "host", the step does, because of these `ranks`; it shows since step `since`, and costs
        # `cost` seconds of a step; `seconds` of steps since then. Once in each generation in which it shows. Later: it
        # does so no more.
        "node.slow": _warning("nodes", "ranks", "rho", "kind", "since", "step", "cost", "seconds", "detail"),
        "node.well": _info("nodes", "ranks", "rho", "kind", "since", "step", "cost", "seconds", "detail"),
        # From the node that holds rank 0, for each eight steps (`first` to `last`), where steps are measured: seconds
        # of each of them in which nodes waited for `data`, for the copy of a snapshot (`saving`), and for ranks that
        # took longer for the same work (`slow`), themselves or because another one did. As the mean of all but those in
        # `apart`, each a node's name and its own three numbers.
        "steps.waited": _debug("first", "last", "data", "saving", "slow", "apart"),
        # The node that holds rank 0 has seen no step for `seconds`; repeated each minute.
        "step.late": _warning("seconds", "detail"),
        # A rank of this node shows no progress for `seconds`, or died (`state`). `waits`: for the n-th operation of
        # an axis; without it, others may wait for it. `odd`: its step is none like its last one. Later: it moves.
        "rank.silent": _debug("step", "phase", "state", "seconds", "waits", "odd", "frame"),
        "rank.moving": _debug(),
        # From the leader, while fewer nodes are there than the job may train with, or no layout is for as many.
        "nodes.awaited": _warning("count", "detail"),
        # A slot's snapshot is held twice. `sent`: bytes of snapshots that its buddy has taken since the one before.
        "snapshot.held": _debug("step", "sent"),
        # From the node that holds rank 0: snapshots are taken every so many steps from now on, by what they cost
        # the rank where they cost most (-1: little). A node's death then costs at most `at_risk` steps.
        "snapshot.interval": _info("step", "every", "former", "costliest", "at_risk"),
        # A slot's snapshot in this node's memory is not as it was written: `tensor` is the first that differs. `acted`:
        # the rank was ended, so that all go back to the safe step, since no newer one could become safe.
        "snapshot.altered": _error("step", "tensor", "acted"),
        # A death would cost more than it should: no step has been safe for long. `slots` of this node are the reason.
        "snapshot.stale": _warning("step", "safe_step", "age", "slots"),
        "snapshot.fresh": _info("step", "safe_step"),
        # Snapshots are copied to another node because the one before does not take them; None: to none for now, so that
        # checkpoints go on.
        "buddy.changed": _warning("buddy", "former", "detail"),
        # A slot's tiles are in the store: `bytes` in all, of which `new` were written and the rest was there already.
        # `seconds`: how long that took. `made_in`: the generation that made the step.
        "checkpoint.written": _debug("step", "made_in", "bytes", "new", "seconds"),
        # A step is the newest checkpoint. `moved`: by this node; otherwise another one had committed the same save.
        # `seconds`: since all nodes had written it. `made_in`: as above.
        "checkpoint.committed": _debug("step", "made_in", "moved", "seconds"),
        # Training goes on. `age` is that of the newest checkpoint this node has committed, in seconds.
        "checkpoint.failed": _warning("step", "error", "age"),
        # The store is busy or away: an operation was tried `tries` times in `seconds`, and is tried on for the time
        # that `patience=` gives. At most one each half minute.
        "store.waiting": _warning("error", "tries", "seconds"),
        # The store's record of what is committed was damaged. It has been written anew from what the store holds, of
        # which `checkpoint` is the newest, "" for none; saves go on.
        "store.repaired": _warning("checkpoint"),
        # At the end: saving has not worked again since it failed; `step` is the newest checkpoint this node knows of.
        "checkpoint.behind": _warning("step", "error"),
        # At the end: the write of `step` is under way yet, and left. If it waits within the kernel for a file system
        # that does not answer, as a FUSE one whose server hangs, this process can only end once that does.
        "checkpoint.abandoned": _warning("step"),
        # Saving, which failed before, works again.
        "checkpoint.mended": _info("step"),
        # A checkpoint was read back: `kind` is how much of it, "sample" or "all".
        "checkpoint.verified": _debug("step", "kind", "seconds"),
        # Every node that was active when it was made agreed with others in an audit of its step, or of a later one.
        # `checkpoint.unvetted`: whether that is so could not be read from the store; tried again later.
        "checkpoint.vetted": _debug("step"),
        "checkpoint.unvetted": _warning("error"),
        # Retention deleted `checkpoints` of them, and `bytes` of objects that nothing needs any more.
        "checkpoint.collected": _debug("checkpoints", "bytes"),
        # Protected checkpoints (latest, verified, tags, pins, those being read) take `over` bytes more than `limit`,
        # that is `keep_bytes`; `store.limit_kept`: they no longer do.
        "store.limit_exceeded": _warning("over", "limit"),
        "store.limit_kept": _debug("limit"),
        # It could not be read back as it was written, or others could not be deleted; tried again later.
        "checkpoint.unverified": _warning("step", "error"),
        "checkpoint.uncollected": _debug("error"),
        # `kind` is "done" or "error"; the last event of a keeper.
        "job.ended": _info("kind", "error"),
        # The events below are shown on stderr only, by the process of a node in which they happen.
        #
        # A slot's template died, and with it its trainers; another takes its place.
        "template.died": _error("detail"),
        # The one kept in reserve died, or could not be started; another is tried, three times in all.
        "template.spare_died": _warning("detail"),
        # It did not carry out an order in time, and is killed.
        "template.stuck": _error("pid"),
        # It takes no commands; its death follows, or it is killed as stuck.
        "template.deaf": _debug("error"),
        # The script's own imports make forks unsafe, for `reason`.
        "template.unsafe": _warning("reason", "consequence"),
        # The slot's thread ended because of a bug in elastic3d, and with it the node.
        "slot.failed": _error("error", "traceback"),
        # A trainer is still there long after SIGKILL: it waits in the kernel, at `wchan`, and its node leaves for good.
        "trainer.unkillable": _error("pid", "seconds", "state", "wchan", "detail"),
        # A slot's standby has its device's context and libraries, and waits to be the next trainer.
        "standby.ready": _debug("seconds"),
        # It is the next trainer.
        "standby.taken": _debug("pid"),
        # It could not get them, or ended: the next trainer gets them itself, as without a standby.
        "standby.failed": _warning("error"),
        # The slot keeps none any more, for `reason`.
        "standby.off": _info("reason"),
        # A trainer sent something that its keeper cannot read, and is stopped.
        "trainer.garbled": _error("trainer", "error"),
        # The keeper gave a trainer no buffer for its snapshot for `seconds`; the trainer ends.
        "buffer.withheld": _error("seconds"),
        # A device's memory did not come back after its last trainer had ended: others hold it.
        "device.occupied": _warning("free", "expected", "seconds"),
        # Triton is not there or cannot build: many kernels add gradients and their squares, with the same bits.
        "device.kernel_missing": _info("error"),
        # The device's clock of a rank cannot be read: in this generation no node is found to be slow.
        "device.unmeasured": _warning("error"),
        # Variables of the user's environment were set otherwise: the run's bits or the end of a hang depend on them.
        "environment.replaced": _info("variables"),
        # A snapshot could not be copied to the buddy; tried again.
        "replica.failed": _info("step", "buddy", "error"),
        # The buddy did not take it: its copy is out of date.
        "replica.stale": _info("step", "error"),
        # Bytes of a rank's state by where they came from: the memory of this node and of others, this node's disk, the
        # store. `unread`: copies whose source could not be reached.
        "state.read": _debug("here", "peers", "disk", "store", "unread"),
        # A rank has read its part of the weights that the run begins with: so many bytes of so many tensors. `fresh`:
        # how many of the model's tensors they do not have, which the seed initialises.
        "weights.read": _info("weights", "tensors", "bytes", "fresh"),
        # A copy of a tile does not have its digest, in memory or in the store, and so have `more` others of this rank:
        # other copies were used, or an older state where there are none.
        "copy.damaged": _warning("source", "tensor", "error", "more"),
        # A keeper of this node did not lend its memory: the same bytes were asked for over TCP.
        "memory.unlent": _info("server", "error"),
        # `run.batches(exclude=)` names positions that the state from which the run goes on has consumed already.
        "exclude.late": _warning("detail"),
        # The run goes on from `step` with weights, or sources, of a mixture that its state did not have; see `detail`.
        "mixture.changed": _info("step", "detail"),
        # This job is an island among others: it begins a round at inner step `step` from the outer parameters after
        # outer step `outer` alone.
        "island.joined": _info("island", "outer", "step", "detail"),
        # It took outer step `outer` with the deltas of `islands`; the work of `lost` since the last one is not part of
        # it. Bytes of deltas: `sent` by all ranks, `read` by rank 0. `seconds`: for which it stood still.
        "island.merged": _info("island", "outer", "step", "islands", "lost", "sent", "read", "seconds"),
        # Its own work since its last outer step is merged nowhere: it joins anew.
        "island.behind": _warning("island", "outer", "detail"),
        # A replay came to all bits of an island that were merged, up to outer step `outer`.
        "island.replayed": _info("island", "outer", "detail"),
        # It waits, for `why`: "others", "admission" or "store"; once for each `detail`.
        "island.waiting": _info("why", "detail"),
        # `cache=` cannot be used: tiles are read from the store each time.
        "cache.unfit": _warning("error"),
        # A rank's `Cached` keeps no more samples in its folder, or not those of which `detail` speaks: they are made
        # each time. Once for each reason.
        "samples.uncached": _warning("folder", "detail"),
        # A sample's file in the folder of a `Cached` was damaged, and the sample was made again. Once for each rank.
        "sample.remade": _warning("folder", "sample", "error"),
        # A node did not say at the start of a generation what it holds: what only it holds does not count.
        "inventory.missed": _warning("server", "error"),
        # A snapshot that a node offers for the start of a generation is ignored: it belongs to another history.
        "snapshot.unbelieved": _warning("step", "made_in", "newest"),
        # A tile of it is damaged: state is restored from an older one.
        "checkpoint.damaged": _warning("checkpoint", "error"),
        # Notices of the cloud: which metadata server is listened to, and whether it answers.
        "notices.watched": _info("cloud", "url"),
        "notices.unknown": _warning("url", "error"),
        "notices.lost": _warning("source", "error"),
        "notices.back": _info("source", "seconds"),
        "notices.unacknowledged": _warning("source", "error"),
        # The cloud will take this machine away in `seconds`; `told`: the node leaves for that.
        "notice.heard": _warning("kind", "action", "seconds", "told", "detail"),
        "notice.withdrawn": _info("kind", "action", "detail"),
    }
)

LIMIT = 1 << 30
"""Bytes of events that one keeper keeps by default."""

PATIENCE = 5.0
"""Seconds that events have to be written when their log is closed."""

OPENING = 10.0
"""Seconds that a log waits for its file to be made; where that takes longer, it is no error if it cannot be."""

BOUND = ("run", "generation", "node", "slot", "rank")
"""Fields with which a log may be bound: any event may carry them."""

_LATER = ("script.raised", "memory.exhausted")
"""Events whose traceback is not shown with them: torchrun shows it at the end."""

_process: dict[str, Any] = {}
_observe_process: Callable[[str, Mapping[str, Any]], None] | None = None


def bind_process(**fields: Any) -> None:
    """Have the events of `process_log` carry `fields` too; for the code that begins a process.

    A forked child inherits them. ValueError for fields with which a log cannot be bound.
    """
    for name in fields:
        if name not in BOUND:
            raise ValueError(f"{name!r} is not one of {', '.join(BOUND)}")
    _process.update(fields)


def observe_process(observe: Callable[[str, Mapping[str, Any]], None] | None) -> None:
    """Have `observe` called with each event of `process_log` and all its fields, so that the node's file gets it too.

    On the thread that emits it; it must not raise. None for no more. A forked child inherits it.
    """
    global _observe_process
    _observe_process = observe


def process_log() -> EventLog:
    """Return the log for code in this process that has no event file at hand.

    Its events are shown on stderr, and reach the node's event file where the process has a keeper or is one.
    """
    return EventLog(None, observe=_observe_process, **_process)


def check(name: str, fields: Iterable[str]) -> EventKind:
    """Return what is known of an event; ValueError where it or one of these fields is not in the list of events."""
    known = EVENTS.get(name)
    if known is None:
        raise ValueError(f"{name!r} is not an event of elastic3d; add it to elastic3d/log.py")
    for field in fields:
        if field not in known.fields and field not in BOUND:
            raise ValueError(f"event {name!r} has no field {field!r}; add it to elastic3d/log.py")
    return known


class EventLog:
    """Append events to one file as JSON lines, to none if the path is None, and show them on stderr by their level.

    Each line is written soon and whole, so that a reader may follow the file while it grows. May be called from
    several threads, and never blocks. `bind` gives a log with more fields on the same file. limit: bytes that the
    events of one keeper may take; past half of them the file is renamed to `<name>.1`, replacing an older one. observe:
    called with each event and all its fields, on the thread that emits it, before its line can be read, so that
    whoever has read a line finds it counted; must not raise or block.

    Raises OSError if the file cannot be made.
    """

    __slots__ = ("_clock", "_lines", "_logger", "_observe")

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        limit: int = LIMIT,
        clock: Clock = SYSTEM,
        observe: Callable[[str, Mapping[str, Any]], None] | None = None,
        **bound: Any,
    ) -> None:
        self._clock, self._observe = clock, observe
        self._lines: _Lines | None = None
        if path is not None:
            self._lines = _Lines(path, limit, lambda count: self.emit("events.dropped", count=count))
        self._logger = structlog.wrap_logger(
            self._lines,
            processors=[structlog.processors.JSONRenderer(separators=(",", ":"), default=str)],
            wrapper_class=structlog.BoundLogger,
            cache_logger_on_first_use=True,
        ).bind(**bound)

    def bind(self, **fields: Any) -> EventLog:
        """Return a log on the same file whose events also carry `fields`."""
        other = object.__new__(EventLog)
        other._clock, other._observe = self._clock, self._observe
        other._lines = self._lines
        other._logger = self._logger.bind(**fields)
        return other

    def emit(self, name: str, **fields: Any) -> None:
        """Write event `name` with `fields`; ValueError if the list of events lacks one of them."""
        self.emit_at(None, name, **fields)

    def emit_at(self, level: Level | None, name: str, **fields: Any) -> None:
        """Write an event that matters more, or less, than the list says; None for the list's level."""
        known = check(name, fields)
        at = self._clock.wall()
        if self._observe is not None:
            self._observe(name, {**structlog.get_context(self._logger), **fields})
        if self._lines is not None:
            self._logger.info(name, at=at, **fields)
        level = known.level if level is None else level
        wanted = verbosity()
        if level >= (Level.DEBUG if wanted is Verbosity.DEBUG else Level.INFO):
            every = {**structlog.get_context(self._logger), **fields}
            show(_as_json(name, level, at, every) if wanted is Verbosity.JSON else _as_text(name, level, every))

    def record(self, name: str, at: float, fields: Mapping[str, Any]) -> None:
        """Write an event that another process of this node has shown. at: its wall time. ValueError as for `emit`."""
        check(name, fields)
        log = self.bind(**fields)
        if log._observe is not None:
            log._observe(name, structlog.get_context(log._logger))
        if log._lines is not None:
            log._logger.info(name, at=at)

    def flush(self, patience: float) -> bool:
        """Wait until all events are written, at most `patience` seconds; return whether they are."""
        return self._lines is None or self._lines.flush(patience)

    def close(self, patience: float = PATIENCE) -> None:
        """Close the file, also for every log bound from this one, after at most `patience` seconds for what waits."""
        if self._lines is not None:
            self._lines.close(patience)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Lines:
    """A structlog logger whose every message becomes a line of the file, by the process that writes it.

    A full disk costs events, not the training: stderr says so, once each time it begins.
    """

    def __init__(self, path: str | os.PathLike[str], limit: int, missed: Callable[[int], None]) -> None:
        self._path = os.fspath(path)
        self._process = EventProcess(self._path, limit)
        self._process.open(OPENING)
        self._failing = False
        self._writer = LineWriter(self._write, name="elastic3d-events", missed=missed)

    def info(self, message: str) -> None:
        self._writer.put(message.encode() + b"\n")

    def flush(self, patience: float) -> bool:
        return self._writer.flush(patience)

    def close(self, patience: float) -> None:
        if self._writer.close(patience):
            # Otherwise a write is under way, and its descriptors must not become other files'.
            self._process.close(patience)
        else:
            say(f"events are lost: {self._path} could not be written in {patience:g} s")
        flush(1.0)

    def _write(self, line: bytes) -> None:
        """Have a line written, on the writer's thread."""
        try:
            self._process.write(line)
            self._failing = False
        except OSError as error:
            if not self._failing:
                self._failing = True
                say(f"events are lost until {self._path} can be written: {error.strerror}")


def _as_json(name: str, level: Level, at: float, fields: Mapping[str, Any]) -> str:
    line = {"event": name, "level": level.name.lower(), "at": at, **fields}
    return json.dumps(line, separators=(",", ":"), default=str)


def _as_text(name: str, level: Level, fields: Mapping[str, Any]) -> str:
    """Return one line, and below it the traceback of a bug: fields that are not known, and the run, are left out."""
    own = {key: value for key, value in fields.items() if key not in (*BOUND, "traceback")}
    own |= {key: fields[key] for key in ("node", "slot", "generation", "rank") if key in fields}
    words = [f"{key}={_first_line(value)}" for key, value in own.items() if value not in (None, "", [])]
    traceback = str(fields.get("traceback") or "").rstrip() if name not in _LATER else ""
    line = " ".join([f"elastic3d: {level.name.lower()}: {name}", *words])
    return f"{line}; this is a bug in elastic3d, please report it\n{traceback}" if traceback else line


def _first_line(value: object) -> str:
    return str(value).partition("\n")[0]
