"""`elastic3d.run`: the call of a script, which decides which of a job's processes it is.

Started by torchrun with `mode=resident`, the process becomes a keeper: the first of its node speaks for the node, the
others serve it. A process that a keeper started becomes its template. Started by hand, the script trains alone.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Never

from elastic3d import devices, environment, output
from elastic3d.admission.host import available_memory
from elastic3d.calibration.record import load
from elastic3d.calibration.script_question import answer_if_asked
from elastic3d.errors import ConfigurationError, UsageError
from elastic3d.evaluation import answering
from elastic3d.evaluation.answering import Evaluation
from elastic3d.health.evidence import EvidenceWriter
from elastic3d.health.options import Health, watching
from elastic3d.islands import Islands
from elastic3d.log import bind_process, observe_process, process_log
from elastic3d.metrics.address import metrics_address
from elastic3d.metrics.exposition import require_client
from elastic3d.paths import expanded
from elastic3d.port import Port
from elastic3d.provenance.record import begin
from elastic3d.quantities import seconds, size
from elastic3d.rendezvous import agent
from elastic3d.rendezvous.settings import Settings, from_environment
from elastic3d.snapshots.interval import AUTO
from elastic3d.telemetry.address import collector_address, require_sdk
from elastic3d.trackers.choice import chosen
from elastic3d.trackers.tracker import Tracker
from elastic3d.training import Run, run_alone, train
from elastic3d.training.identity import script_digest
from elastic3d.training.tiers import KeepersAndStore
from elastic3d.trust.listening import raise_file_limit
from elastic3d.values import Layout
from elastic3d.worker.keeper.keeper import Keeper
from elastic3d.worker.keeper.warming import Inbox
from elastic3d.worker.options import Checkpointing, RunOptions, refuse_moved, saving, snapshot_interval, store_at
from elastic3d.worker.processes.events import EventSaid
from elastic3d.worker.processes.failure import FLUSH_PATIENCE, guarded
from elastic3d.worker.processes.process import ExitCode, die_with_agent
from elastic3d.worker.processes.remote import RemoteSlot
from elastic3d.worker.processes.slot import LocalSlot, SlotPort, serve_role
from elastic3d.worker.processes.slot_frames import private_name
from elastic3d.worker.processes.slot_server import SlotServer
from elastic3d.worker.safety import MOST_SECONDS, MOST_SNAPSHOTS

COMPANION_PATIENCE = 120.0
"""Seconds that the keepers of one node wait for each other: the slowest has to import everything first."""


def run(
    main: Callable[[Run], None],
    *,
    store: str | os.PathLike[str] | None = None,
    every: int | str = 10,
    checkpointing: Checkpointing | None = None,
    layout: Layout | None = None,
    device: str = devices.AUTO,
    events: str | os.PathLike[str] | None = None,
    events_limit: int | str = "1GB",
    snapshot_every: int | str = AUTO,
    stale_after: float | str = MOST_SECONDS,
    stale_snapshots: int = MOST_SNAPSHOTS,
    threads: int = 1,
    calibration: str | os.PathLike[str] | None = None,
    restore: str = "latest",
    fresh: bool = False,
    health: Health | str = "on",
    trackers: Sequence[str | Tracker] = (),
    metrics: str | None = None,
    telemetry: str | None = None,
    config: object = None,
    evaluate: Evaluation | None = None,
    islands: Islands | None = None,
    **moved: Never,
) -> None:
    """Train `main` on whatever nodes are there, and return when the job is over.

    A failed job ends the process with a non-zero code, and leaves the reason where torchrun looks for it.

    Args:
        main: Entered once per generation, in a fresh process; and once before the first, up to `run.restore`, to
            measure the model.
        store: URL (any fsspec one) or path of the checkpoints. None, the default, keeps them in memory only.
        every: Steps from one checkpoint to the next (10 by default; 0 for never), or a time ("30s"), or "continuous":
            the next begins when the last is committed.
        checkpointing: How checkpoints are written, kept and read. None, the default: as in `Checkpointing()`.
        layout: Axes to fix, such as `Layout(pp=2)`; free ones are planned, and all are by default.
        device: What to train on: "cpu", "cuda" (NVIDIA's devices, or AMD's under ROCm), or "auto", the default: the
            accelerators of this host, the CPU where it has none. ELASTIC3D_DEVICE says what "auto" means on one host.
        events: Folder for one event file per node, and an older one beside it. None, the default, for none.
        events_limit: Most that these take on each node, in bytes or as "500MB"; 1 GB by default.
        snapshot_every: In steps. "auto", the default: each step, and less often where taking them would take more than
            3% of the time, or sending them to another node more than half of it. 0 for never: after a failure, training
            then goes on from an older checkpoint.
        stale_after: Age of the newest step that all hold, in seconds or as "30s", the default, beyond which an event
            and status say so, and another node may be asked to take copies.
        stale_snapshots: How many snapshots behind the newest step that all hold may be before the same happens, 8 or
            more; 20 by default.
        threads: CPU threads per trainer for tensor operations, 1 by default; part of what fixes the bits.
        calibration: File of `elastic3d calibrate`, made on a machine like these: layouts are then chosen by predicted
            time. None, the default: by shape.
        restore: The checkpoint to go on from when no node has the state in memory: "latest", the default, "verified",
            "vetted", or a tag, step or name. The first three fall back to an older one if theirs is damaged, or a
            device that computes wrongly may have spoilt it; any other is where this run begins, and no longer matters
            once the run has its own checkpoints.
        fresh: Begin at step 0 even if steps were made before and nothing is left of them, which is an error by
            default.
        health: Whether ranks that stand still are found, by what every trainer records of its own progress: "on", the
            default, "log" to report them and do nothing else, "off", or a `Health` with more to choose.
        trackers: Where the curves of the run are written, each step once whatever nodes die: "tensorboard:FOLDER",
            "csv:FILE", "jsonl:FILE", "mlflow:EXPERIMENT", "wandb:PROJECT", those of other packages, or objects of an
            `elastic3d.Tracker`. Empty, the default, for nowhere.
        metrics: Where each node serves its metrics for Prometheus: ":9464" for its own machine alone, "node:9464" for
            the node's own address, or another address of it; port 0 asks the system for one. None, the default, for
            nowhere. Needs `pip install 'elastic3d[metrics]'`.
        telemetry: Where each node sends the same metrics, and spans of what happens to the job, by OpenTelemetry's
            OTLP over HTTP: "otlp" for the collector that OTEL_EXPORTER_OTLP_ENDPOINT names (http://localhost:4318
            where it is not set), or an address. None, the default, for nowhere. Needs `pip install 'elastic3d[otel]'`.
        config: The run's configuration, a dataclass object or a mapping of plain values, at most 64 KiB as JSON: each
            checkpoint has it, and going on from a state that was made with other values is refused, unless
            `run.restore(..., accept="config")` takes them. Nothing secret: all who can read the store can read it.
            None, the default, for none.
        evaluate: What `elastic3d eval` calls instead of `main`, for one checkpoint: it makes the model with
            `run.shard`, calls `run.restore(model=model)`, and returns numbers by name, such as
            `{"eval/loss": run.evaluate(model, held_out, losses)}`. None, the default, for a script that is not
            evaluated so.
        islands: An `elastic3d.Islands`: this job is one of several that train apart and merge what they learned every
            so many steps (local SGD, DiLoCo). None, the default, for a job by itself.
        moved: Takes nothing; says where options of checkpoints that used to be here are now.

    Raises:
        UsageError: A value makes no sense; nothing was started.
        ConfigurationError: The device asked for cannot be used here, or a package that an option needs is missing;
            nothing was started.
    """

    def enter(port: Port) -> None:
        train(main, port, tiers=KeepersAndStore(port.assignment.credentials), origin=origin, islands=islands)

    refuse_moved(moved)
    if checkpointing is None:
        checkpointing = Checkpointing()
    elif not isinstance(checkpointing, Checkpointing):
        raise UsageError(
            f"elastic3d.run(checkpointing={checkpointing!r}): give an elastic3d.Checkpointing, such as "
            "Checkpointing(keep=3)"
        )
    if islands is not None and not isinstance(islands, Islands):
        raise UsageError(
            f"elastic3d.run(islands={islands!r}): give an elastic3d.Islands, such as Islands(every=500, ...)"
        )
    script_digest()  # of the running script: processes forked from here have it
    origin = begin(config)
    output.checked_verbosity()
    serve_role(enter)
    answer_if_asked(main)
    answering.answer_if_asked(evaluate, device=device, threads=threads)
    served = metrics_address(metrics)
    if served is not None:
        require_client()
    collector = collector_address(telemetry)
    if collector is not None:
        require_sdk()
    device = devices.choose(device)
    at = store_at(store, checkpointing)
    options = RunOptions(
        store=at,
        saving=saving(checkpointing, every),
        layout=layout,
        events=str(expanded(events, "elastic3d.run: events")) if events else None,
        events_limit=size(events_limit, "elastic3d.run: events_limit"),
        snapshot_every=snapshot_interval(snapshot_every),
        stale_after=seconds(stale_after, "elastic3d.run: stale_after"),
        stale_snapshots=stale_snapshots,
        threads=threads,
        restore=restore,
        fresh=fresh,
        device=device,
        health=watching(health, patience=at.patience if at is not None else 0.0, device=device),
        trackers=chosen(trackers),
        metrics=served,
        telemetry=collector,
        costs=(
            load(expanded(calibration, "elastic3d.run: calibration"), device=device).costs()
            if calibration is not None
            else None
        ),
    )
    settings = from_environment()
    if settings is not None:
        code = guarded(lambda: _keep(enter, settings, options))
        if code:
            raise SystemExit(code)
    elif environment.TORCH_RUN_ID.read():
        raise ConfigurationError(
            "elastic3d.run was started by torchrun without its keepers: "
            "add --rdzv-backend=etcd --rdzv-conf=mode=resident to torchrun's options"
        )
    else:
        output.say(_by_hand(options))
        run_alone(main, device=device, islands=islands)


def _by_hand(options: RunOptions) -> str:
    """Say what a script that was started by hand lacks."""
    without = f"no checkpoints are written to or read from {options.store.url}, and " if options.store else ""
    if options.trackers:
        without = f"no curves are written to {', '.join(one.name for one in options.trackers)}, {without}"
    without += "no metrics are served, and " if options.metrics else ""
    without += "no telemetry is sent, and " if options.telemetry else ""
    return (
        f"started by hand, so this process trains alone: {without}nothing is kept when it ends. For a job, on one node "
        "or many, start it with torchrun --rdzv-backend=etcd --rdzv-conf=mode=resident"
    )


def _keep(enter: Callable[[Port], None], settings: Settings, options: RunOptions) -> None:
    """Be one slot's keeper until the node's part in the job is over."""
    identity = environment.AGENT_PROCESS.read()
    die_with_agent(identity)
    output.survive_readers()
    raise_file_limit()
    local_rank, slots = int(environment.LOCAL_RANK.need()), int(environment.LOCAL_WORLD_SIZE.need())
    bind_process(run=settings.run_id, node=settings.node, slot=local_rank)
    inbox: Inbox = queue.SimpleQueue()
    evidence = EvidenceWriter(
        options.events or "",
        settings.node,
        local_rank,
        limit=options.health.evidence if options.health is not None else 0,
        failed=lambda error: process_log().emit("evidence.lost", error=error),
    )
    # The template is forked here, before this process has any thread.
    mine = LocalSlot(
        index=local_rank,
        host=settings.address,
        entry=enter,
        events=inbox,
        replica_bytes=available_memory(lambda path: Path(path).read_text()) // slots,
        health=options.health,
        taken=evidence.take,
        moved=evidence.moved,
    )
    observe_process(lambda name, fields: inbox.put(EventSaid.now(local_rank, name, fields)))
    output.unblock()
    if identity and agent.pid_of(identity) != os.getppid():
        agent.end_with(identity, lambda: os._exit(ExitCode.ORPHANED))
    restarts = environment.TORCH_RESTARTS.read()

    def name(index: int) -> str:
        return private_name(environment.NODE_TOKEN.need(), restarts, index)

    try:
        if local_rank:
            SlotServer(mine, inbox, name(local_rank)).serve(COMPANION_PATIENCE)
            return
        others: list[SlotPort] = []
        try:
            others += [RemoteSlot(name(index), inbox, patience=COMPANION_PATIENCE) for index in range(1, slots)]
            Keeper(settings, options, [mine, *others], inbox, evidence).run()
        finally:
            for slot in others:
                slot.close()
    finally:
        mine.close()
        evidence.flush(FLUSH_PATIENCE)
        output.flush(FLUSH_PATIENCE)
