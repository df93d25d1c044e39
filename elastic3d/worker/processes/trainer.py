"""The trainer's side: a `Port` that talks to the keeper, and how a trainer begins and ends."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import socket
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from elastic3d import environment, source_waits, threads
from elastic3d.admission.check import CheckResult
from elastic3d.admission.devices import check_devices
from elastic3d.clock import SYSTEM, Clock
from elastic3d.devices import contract, device_at, oom_killer
from elastic3d.devices.exhaustion import asked, is_out_of_memory, of_host
from elastic3d.errors import Elastic3dError
from elastic3d.health import record, stacks
from elastic3d.log import bind_process, observe_process, process_log
from elastic3d.port import (
    UNRECORDED,
    Assignment,
    AuditReport,
    Flags,
    Go,
    LocalState,
    Port,
    Progress,
    StateRestored,
    StepRecord,
)
from elastic3d.shortfall import Shortfall
from elastic3d.snapshots import table as tables
from elastic3d.snapshots.arena import Arena
from elastic3d.snapshots.holdings import Cadence
from elastic3d.snapshots.interval import Cost
from elastic3d.snapshots.table import SnapshotTable
from elastic3d.values import DeviceFacts, ModelProfile, ProvenChain, from_json
from elastic3d.worker.processes import channel, copying, loaders, process, temporary
from elastic3d.worker.processes.channel import FromKeeper, TrainerEnd
from elastic3d.worker.processes.events import EventSaid, RaisedException
from elastic3d.worker.processes.process import ExitCode

if TYPE_CHECKING:
    pass

Entry = Callable[[Port], str | None]
"""Runs the user's main as a `Run` on this port; returns the digest of the final state if one was asked for."""

_CREDIT_SECONDS = 30.0
_FIRST_STEPS = 3
"""Steps that a trainer makes before its slot starts a standby: recovery comes first."""


class ChannelPort:
    """The port of a trainer with a keeper. Called from the main thread; one thread reads, one copies."""

    def __init__(
        self,
        assignment: Assignment,
        end: socket.socket,
        buffers: Sequence[int],
        progress: Progress = UNRECORDED,
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        self.assignment, self.progress, self._clock = assignment, progress, clock
        # A trainer that measures has its model on meta.
        self.device = device_at("cpu" if assignment.measuring else assignment.device, assignment.slot)
        self._end = TrainerEnd(end)
        self._copier = copying.Copier([Arena(descriptor) for descriptor in buffers], self.device)
        self._cadence = Cadence()
        self._cost = Cost()
        self._stalled: float | None = None  # of the snapshot that is being copied
        self._table: SnapshotTable | None = None
        self._last_taken = -1
        self._checkpoint_due = False
        self._asked = self._heard = 0
        self._steps = 0
        self._variables = contract.read_by_libraries()
        self._changed = threading.Condition()
        self._go: Go | None = None
        self._flags = Flags(leave=False, etcd_away=False)
        self._held = -1
        self._credits: list[int] = []
        threads.start(self._listen, name="keeper")

    def measured(self, profile: ModelProfile, proven: ProvenChain | None = None) -> NoReturn:
        """Report a measuring trainer's profile, and the node's devices if they are to be checked, and end it."""
        # Checked here, since this process ends: what it leaves on a device is gone with it.
        kind, places = self.assignment.device, self.assignment.places
        checks = check_devices(kind, places) if places else ()
        self._say(channel.Profiled(profile=profile, checks=checks, device=self._facts(checks), proven=proven))
        process.leave(ExitCode.MEASURED)

    def _facts(self, checks: Sequence[CheckResult]) -> DeviceFacts | None:
        """Return what this node's devices are, None where the checks found them wanting."""
        if not all(check.ok for check in checks):
            return None
        device = device_at(self.assignment.device, 0)
        device.open()
        facts = device.facts(int(environment.LOCAL_WORLD_SIZE.read()))
        beside = device.standby_bytes if self.assignment.standby else 0
        return dataclasses.replace(facts, reserve=facts.reserve + beside)

    def await_go(self) -> Go:
        """Tell the keeper that everything is built, and block until it says go."""
        self._say(channel.MainReady())
        with self._changed:
            self._changed.wait_for(lambda: self._go is not None)
            assert self._go is not None
            return self._go

    def flags(self) -> Flags:
        """Return the keeper's last flags; not ready until it has learned of the last checkpoint asked for."""
        heard, flags = self._heard, self._flags  # read in this order, since they are written in the other
        return flags if heard == self._asked else dataclasses.replace(flags, ready=False)

    def held(self) -> int:
        """Return the newest step of this generation held at home and at the buddy, -1 for none."""
        return self._held

    def snapshot_needs(self) -> float:
        """Return how many steps apart snapshots should be by what they cost this rank."""
        with self._changed:
            return self._cost.needed()

    def snapshot(self, state: LocalState, *, checkpoint: bool, wait: bool) -> None:
        """Start copying this rank's state in a thread; with `wait`, return when it is copied.

        While two snapshots wait to become safe none is taken, on any rank; a checkpoint that is due then is made of the
        next snapshot. With `wait` one is always taken.
        """
        step = state.step
        self.finish_copy()
        begun = self._clock.monotonic()
        self._checkpoint_due |= checkpoint
        if step != self._last_taken and (wait or self._cadence.take()):
            checkpoint, self._checkpoint_due = self._checkpoint_due, False
            self._asked += checkpoint
            self._last_taken = step
            self._cadence.taken(step)
            facts = copy.deepcopy(state.facts)  # sent from the copying thread, after training has gone on

            def complete(buffer: int, digests: Sequence[str]) -> None:
                self._say(
                    channel.SnapshotWritten(
                        buffer=buffer, step=step, checkpoint=checkpoint, facts=facts, digests=tuple(digests)
                    )
                )

            job = copying.prepare(
                state.tiles,
                self._table,
                self.device,
                tile_bytes=self.assignment.tile_bytes,
                acquire=lambda: self._acquire(wait),
                complete=complete,
            )
            if job.table is not self._table:
                self._table = job.table
                self._say(channel.Tabled(table=tables.to_wire(job.table)))
            self._copier.start(job)
            self._stalled = self._clock.monotonic() - begun
        if wait:
            self._finish_copy(hurry=False)

    def finish_copy(self) -> None:
        """Block until no copy reads the state any more."""
        self._finish_copy(hurry=True)

    def _finish_copy(self, *, hurry: bool) -> None:
        begun = self._clock.monotonic()
        self._copier.finish(hurry=hurry)
        if self._stalled is not None:
            self._cost.stalled(self._stalled + self._clock.monotonic() - begun)
            self._stalled = None

    def copied(self, step: int, key: str, at: int) -> int | None:
        """Return a byte of the snapshot of this step, which nobody writes to before the next one."""
        return self._copier.byte(key, at) if step == self._last_taken else None

    def committed(self, record: StepRecord) -> None:
        """Tell the keeper of a step, and take note of the vote's safe step."""
        self._cadence.voted(record.safe_step)
        self._cost.stepped(record.seconds)
        self._say(channel.StepTaken(record=record))
        self._steps += 1
        if self._steps == _FIRST_STEPS and self.assignment.standby and self.device.exclusive:
            now, then = contract.read_by_libraries(), self._variables
            changed = sorted(name for name in {*now, *then} if now.get(name) != then.get(name))
            self._say(channel.FirstStepsTaken(changed=tuple(changed)))

    def restored(self, state: StateRestored) -> None:
        """Tell the keeper where the state came from, so that it frees what is no longer needed."""
        self._say(state)

    def audited(self, report: AuditReport) -> None:
        """Tell the keeper what an audit found."""
        self._say(channel.AuditTold(report=report))

    def convicted(self, report: AuditReport) -> NoReturn:
        """End this trainer before its update, whoever computes wrongly. A snapshot being copied is completed."""
        self._finish_quietly()
        self._say(channel.AuditTold(report=report, last=True))
        process.leave(ExitCode.CONVICTED)

    def leave(self, step: int) -> NoReturn:
        """End this trainer at a step boundary."""
        self.finish_copy()
        self._say(channel.MainLeft(step=step))
        process.leave(ExitCode.LEFT)

    def peer_lost(self, error: BaseException, *, patience: float | None = None) -> NoReturn:
        """End this trainer because a collective failed. A snapshot being copied is completed: its step was made."""
        self._finish_quietly(patience)
        self._say(channel.MainRaised(peer=True, exception=_raised(error)))
        process.leave(ExitCode.PEER_LOST)

    def done(self, digest: str | None, unsaved: int = -1) -> NoReturn:
        """End this trainer because main returned."""
        self.finish_copy()
        self._say(channel.MainReturned(digest=digest, unsaved=unsaved))
        process.leave(ExitCode.DONE)

    def failed(self, error: BaseException) -> NoReturn:
        """End this trainer because the user's code raised."""
        self._finish_quietly()
        raised = _raised(error)
        if is_out_of_memory(error):
            raised = dataclasses.replace(raised, memory_use=self._memory_use(), short=self._short(error))
        else:
            raised = dataclasses.replace(raised, loader=loaders.killed_by(error))
        self._say(channel.MainRaised(peer=False, exception=raised))
        process.leave(ExitCode.ERROR)

    def said(self, name: str, fields: Mapping[str, Any]) -> None:
        """Tell the keeper of an event, for the node's file."""
        self._say(EventSaid.now(self.assignment.slot, name, fields))

    def _say(self, message: channel.FromTrainer) -> None:
        try:
            self._end.send(message)
        except OSError:
            process.leave(ExitCode.ORPHANED)

    def _acquire(self, wait: bool) -> int:
        """Return a buffer to write; whenever `Cadence` has a snapshot taken, one is about to be free."""
        with self._changed:
            if not self._credits and wait:
                self._say(channel.BufferWanted())
            if not self._changed.wait_for(lambda: bool(self._credits), _CREDIT_SECONDS):
                # The other ranks take this snapshot, and would assume that this one has it.
                process_log().emit("buffer.withheld", seconds=_CREDIT_SECONDS)
                process.leave(ExitCode.ORPHANED)
            return self._credits.pop(0)

    def _memory_use(self) -> str:
        try:
            return self.device.memory_use()
        except Exception as error:  # noqa: BLE001 - a device that has failed may not answer: the error itself matters more
            return f"who holds the memory could not be found out: {error}"

    def _short(self, error: BaseException) -> Shortfall:
        """Return what was missing; of a host, what the process itself may have is not known."""
        device = self.device
        short = Shortfall(
            rank=self.assignment.rank,
            host=of_host(error) or not device.exclusive,
            device=device.kind,
            asked=asked(error),
        )
        if short.host:
            return short
        try:
            return dataclasses.replace(short, free=device.free(), total=device.facts(1).memory)
        except Exception:  # noqa: BLE001 - a device that has failed may not answer: the error itself matters more
            return short

    def _finish_quietly(self, patience: float | None = None) -> None:
        try:
            self._copier.finish(patience)
        except BaseException:  # noqa: BLE001 - the trainer is ending for another reason, which is the one to report
            traceback.print_exc()

    def _listen(self) -> None:
        while True:
            try:
                messages = self._end.receive()
            except OSError:
                messages = []
            if not messages:
                # The keeper is gone, and the parent-death signal will arrive through the template.
                process.leave(ExitCode.ORPHANED)
            with self._changed:
                for message in messages:
                    self._hear(message)
                self._changed.notify_all()

    def _hear(self, message: FromKeeper) -> None:
        match message:
            case channel.Start():
                self._go = message.go
            case channel.Raised():
                self._flags = message.flags
                self._heard = message.saves
            case channel.Granted():
                self._credits.append(message.buffer)
            case channel.SnapshotSafe():
                self._held = max(self._held, message.step)
                self._cost.moved(message.seconds)


def _raised(error: BaseException) -> RaisedException:
    return RaisedException(
        kind=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        final=isinstance(error, Elastic3dError) and error.final,
    )


def run_trainer(entry: Entry, spec: str, descriptors: tuple[int, ...]) -> NoReturn:
    """Be a trainer in a fresh child, and end the process.

    descriptors: the channel, the two of the progress record if the assignment says so, and the home buffers.
    """
    assignment = from_json(Assignment, json.loads(spec))
    bind_process(
        run=assignment.run_id,
        generation=assignment.generation,
        node=assignment.node,
        slot=assignment.slot,
        rank=assignment.rank,
    )
    end = socket.socket(fileno=descriptors[0])
    process.children_die_too()
    temporary.use(assignment.sockets)
    oom_killer.be_killed_first()
    process.overwrite_environment(os.environ, assignment)
    tp = assignment.layout.tp if assignment.layout is not None else 1
    replaced = contract.apply(contract.settings(assignment.device, interface=assignment.interface, tp=tp))
    # torch read it when it was imported, in the template.
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]  # torch exports it from a private module
    if assignment.threads:
        torch.set_num_threads(assignment.threads)
    buffers = descriptors[1:]
    progress = None
    if assignment.recorded:
        page, written, *buffers_after = buffers
        buffers, progress = tuple(buffers_after), record.inherited(page)
        if progress is not None:
            source_waits.record_in(progress.awaited)
            stacks.write_stacks_to(written)
    port = ChannelPort(assignment, end, buffers, progress or UNRECORDED)
    observe_process(port.said)
    if replaced:
        process_log().emit("environment.replaced", variables=replaced)
    try:
        digest = entry(port)
    except SystemExit as error:
        if error.code not in (None, 0):
            port.failed(error)
        digest = None
    except BaseException as error:  # noqa: BLE001 - the edge of a process; the traceback travels to the keeper
        port.failed(error)
    port.done(digest)
