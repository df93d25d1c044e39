"""The one thread that owns a slot's template and trainers: commands in, reports and messages in, events out.

A trainer's events are handled here in the order in which they happened there: the last messages of a dead trainer are
read before its exit is reported.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import queue
import selectors
import socket
import traceback
from collections.abc import Callable

from elastic3d.devices import device_at
from elastic3d.devices.oom_killer import KillCount
from elastic3d.health.watch import SlotWatch
from elastic3d.log import process_log
from elastic3d.port import Assignment, Flags, Go, StateRestored
from elastic3d.snapshots import table as tables
from elastic3d.snapshots.holdings import Mark
from elastic3d.snapshots.memory import SnapshotMemory
from elastic3d.worker.processes import channel, events, template, temporary
from elastic3d.worker.processes.channel import FromKeeper, FromTrainer, KeeperEnd
from elastic3d.worker.processes.events import EventSaid, ExitKind, SlotEvent
from elastic3d.worker.processes.process import ExitCode
from elastic3d.worker.processes.slot_standby import SlotStandby
from elastic3d.worker.processes.slot_trainer import SlotTrainer
from elastic3d.worker.processes.supervisor import TemplateLost, TemplateSupervisor
from elastic3d.worker.processes.survivors import TrainerUnkillable
from elastic3d.worker.processes.watching import Watchers

_CLEAN_SECONDS = 0.02
_WATCH_SECONDS = 1.0


class SlotLoop:
    """See the module. Only `post` may be called from another thread."""

    def __init__(
        self,
        *,
        index: int,
        supervisor: TemplateSupervisor,
        memory: SnapshotMemory,
        events: queue.SimpleQueue[SlotEvent],
        watch: SlotWatch | None = None,
    ) -> None:
        self._watchers = Watchers(watch)
        self._index = index
        self._supervisor = supervisor
        self._standby = SlotStandby(index, supervisor)
        self._memory = memory
        self._events = events
        self._trainers: dict[int, SlotTrainer] = {}
        self._lost: list[SlotTrainer] = []
        self._etcd_away = False
        self._ready = True
        self._newest = -1
        self._writer: int | None = None
        self._sent = 0
        self._taken: dict[Mark, tuple[int, bool]] = {}
        self._posted: collections.deque[Callable[[], object]] = collections.deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ, self._wakened)
        self._ended = False

    def post(self, call: Callable[[], object]) -> None:
        """Have the loop's thread make a call, soon and in order."""
        self._posted.append(call)
        if not self._ended:
            os.eventfd_write(self._wake, 1)

    # Commands, on the loop's thread.

    def prepare(self, number: int, assignment: Assignment) -> None:
        """Ask the template for a trainer."""
        ours, theirs = channel.pair()
        assignment = dataclasses.replace(self._watchers.prepare(number, assignment), sockets=temporary.name())
        trainer = SlotTrainer(number=number, assignment=assignment, end=KeeperEnd(ours), theirs=theirs)
        self._trainers[number] = trainer
        self._selector.register(trainer.end, selectors.EVENT_READ, lambda: self._hear(trainer))
        self._flag(trainer)
        self._fork(trainer)

    def go(self, number: int, go: Go) -> None:
        """Let a trainer start, once nobody else holds the slot's device where that has one trainer at a time."""
        trainer = self._trainers.get(number)
        if trainer is not None:
            trainer.go = go
            self._let_go()

    def _let_go(self) -> None:
        for trainer in self._trainers.values():
            if trainer.go is None:
                continue
            exclusive = device_at(trainer.assignment.device, self._index).exclusive
            if exclusive and any(other.gone for other in self._trainers.values()):
                continue
            self._send(trainer, channel.Start(go=dataclasses.replace(trainer.go, newest=self._newest)))
            trainer.go, trainer.gone = None, True
            if trainer.pid is not None:
                self._watchers.begin(trainer.number, trainer.pid, trainer.assignment)

    def ask_leave(self, number: int) -> None:
        """Raise a trainer's leave flag."""
        trainer = self._trainers.get(number)
        if trainer is not None:
            trainer.leave = True
            self._flag(trainer)

    def set_etcd_away(self, away: bool) -> None:
        """Set the flag of every trainer."""
        self._etcd_away = away
        for trainer in self._trainers.values():
            self._flag(trainer)

    def set_ready(self, ready: bool) -> None:
        """Set whether the store would take another checkpoint."""
        self._ready = ready
        for trainer in self._trainers.values():
            self._flag(trainer)

    def stop(self, number: int) -> None:
        """Kill a trainer's group."""
        trainer = self._trainers.get(number)
        if trainer is not None and not trainer.stopped:
            trainer.stopped = True
            self._supervisor.send(template.Kill(trainer=number))

    def stop_all(self) -> None:
        """Kill every trainer's group."""
        for number in list(self._trainers):
            self.stop(number)

    def grant(self) -> None:
        """Hand free buffers to the trainer that writes snapshots."""
        trainer = self._trainers.get(self._writer or 0)
        if trainer is not None:
            for buffer in self._memory.grant(trainer.number):
                self._send(trainer, channel.Granted(buffer=buffer))

    def digested(self, mark: Mark) -> None:
        """Report that a snapshot is complete and its digests are known."""
        number, checkpoint = self._taken.get(mark, (0, False))
        self._tell(
            events.SnapshotTaken(
                slot=self._index, trainer=number, generation=mark.generation, step=mark.step, checkpoint=checkpoint
            )
        )

    def altered(self, mark: Mark, tensor: str, fatal: bool) -> None:
        """Report a snapshot that is not as it was written; where no newer one can be safe, have all go back."""
        trainer = self._trainers.get(self._writer or 0)
        acted = fatal and trainer is not None and trainer.assignment.generation == mark.generation
        process_log().emit("snapshot.altered", slot=self._index, step=mark.step, tensor=tensor, acted=acted)
        if acted and trainer is not None:
            self._supervisor.send(template.Kill(trainer=trainer.number))

    def replicated(self, mark: Mark, newer: bool, seconds: float, sent: int, buddy: str | None) -> None:
        """Note that a snapshot was sent in so many seconds, or could not be. sent: bytes that the buddy has taken."""
        self.grant()
        self._sent += sent
        if not newer:
            return
        trainer = self._trainers.get(self._writer or 0)
        if trainer is not None and trainer.assignment.generation == mark.generation:
            self._send(trainer, channel.SnapshotSafe(step=mark.step, seconds=seconds))
        sent, self._sent = self._sent, 0
        self._tell(
            events.SnapshotHeld(slot=self._index, generation=mark.generation, step=mark.step, sent=sent, buddy=buddy)
        )

    def unreachable(self, address: str, seconds: float, error: str) -> None:
        """Report that nothing can be sent to the buddy."""
        self._tell(events.BuddyUnreachable(slot=self._index, address=address, seconds=seconds, error=error))

    def end(self) -> None:
        """Kill and reap everything; the loop returns."""
        self._ended = True

    # The loop.

    def run(self) -> None:
        """Run until `end`."""
        self._watch_template()
        try:
            while not self._ended:
                timeout = _CLEAN_SECONDS if self._supervisor.cleaning else _WATCH_SECONDS
                for key, mask in self._selector.select(timeout):
                    if mask & selectors.EVENT_WRITE:
                        self._flush(key)
                    # An earlier event of the batch may have closed this descriptor, and its number may be in use again.
                    current = self._selector.get_map().get(key.fd)
                    if mask & selectors.EVENT_READ and current is not None and current.data is key.data:
                        key.data()
                self._supervisor.check(
                    owes_answer=any(t.pid is None or t.stopped or t.hung_up for t in self._trainers.values())
                )
                if self._lost and self._supervisor.clean():
                    self._bury()
        except TrainerUnkillable as error:
            survivor = error.survivor
            process_log().emit(
                "trainer.unkillable",
                slot=self._index,
                pid=survivor.pid,
                seconds=error.seconds,
                state=survivor.state,
                wchan=survivor.wchan or None,
                detail=str(error),
            )
            self._tell(events.SlotLost(slot=self._index, detail=str(error)))
        except TemplateLost as error:
            self._tell(events.SlotLost(slot=self._index, detail=str(error)))
        except Exception as error:
            process_log().emit("slot.failed", error=repr(error), traceback=traceback.format_exc(), slot=self._index)
            self._tell(events.SlotLost(slot=self._index, detail=f"this is a bug: {error!r}"))
            raise
        finally:
            self._ended = True
            self._supervisor.end()
            self._bury()
            for trainer in list(self._trainers.values()):
                self._exited(trainer, -9)
            self._selector.close()

    def _wakened(self) -> None:
        os.eventfd_read(self._wake)
        while self._posted:
            self._posted.popleft()()

    def _watch_template(self) -> None:
        self._selector.register(self._supervisor.control, selectors.EVENT_READ, self._hear_template)
        self._selector.register(self._supervisor.pidfd, selectors.EVENT_READ, self._template_died)

    def _unwatch(self, watched: socket.socket | int | KeeperEnd) -> None:
        if watched in self._selector.get_map():
            self._selector.unregister(watched)

    def _fork(self, trainer: SlotTrainer) -> None:
        assert trainer.theirs is not None
        trainer.early.clear()
        descriptors = [trainer.theirs.fileno(), *self._watchers.descriptors(trainer.number)]
        if not trainer.assignment.measuring:
            descriptors.extend(self._memory.descriptors())
        self._supervisor.send(self._standby.fork(trainer.number, trainer.assignment), descriptors)

    def _hear_template(self) -> None:
        packets = self._supervisor.receive()
        if not packets:
            # End of file: the pidfd will report its death; until then there is nothing more to read.
            self._unwatch(self._supervisor.control)
        for packet in packets:
            match packet:
                case template.Forked():
                    trainer = self._trainers[packet.trainer]
                    trainer.pid, trainer.kills = packet.pid, KillCount.of(packet.pid)
                    if trainer.gone:
                        self._watchers.begin(trainer.number, packet.pid, trainer.assignment)
                    self._close_theirs(trainer)
                    self._tell(events.Started(slot=self._index, trainer=trainer.number, pid=packet.pid))
                    early, trainer.early = trainer.early, []
                    for message in early:
                        self._heard(trainer, message)
                case template.Unforked():
                    trainer = self._trainers[packet.trainer]
                    self._close_theirs(trainer)
                    self._exited(trainer, ExitCode.ORPHANED, detail=f"could not be forked: {packet.error}")
                case template.ProcessExited():
                    self._exited(self._trainers[packet.trainer], packet.code)
                case _:
                    self._standby.heard(packet)

    def _template_died(self) -> None:
        self._hear_template()  # its last reports
        for watched in (self._supervisor.control, self._supervisor.pidfd):
            self._unwatch(watched)
        detail = self._supervisor.replace()
        process_log().emit("template.died", slot=self._index, detail=detail)
        self._tell(events.TemplateDied(slot=self._index, detail=detail))
        self._watch_template()
        for trainer in list(self._trainers.values()):
            if any(lost is trainer for lost in self._lost):
                continue  # with the template before this one, which has not been cleaned up after yet
            if trainer.pid is not None:
                self._lost.append(trainer)
            elif trainer.stopped:
                self._exited(trainer, -9)
            else:
                self._fork(trainer)

    def _bury(self) -> None:
        for trainer in self._lost:
            # One that had ended by itself, of which a template that was stopped could not tell, did not die with it.
            code = trainer.code_of_its_words() if trainer.hung_up and not trainer.stopped else None
            if code is not None:
                self._exited(trainer, code)
            else:
                self._exited(trainer, -9, kind=None if trainer.stopped else ExitKind.TEMPLATE)
        self._lost.clear()

    # Trainers.

    def _say(self, number: int, message: FromKeeper) -> None:
        trainer = self._trainers.get(number)
        if trainer is not None:
            self._send(trainer, message)

    def _send(self, trainer: SlotTrainer, message: FromKeeper) -> None:
        trainer.end.send(message)
        self._watch_writes(trainer.end)

    def _watch_writes(self, end: KeeperEnd) -> None:
        key = self._selector.get_map().get(end)
        if key is not None:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if end.wants_write else 0)
            if key.events != wanted:
                self._selector.modify(end, wanted, key.data)

    def _flush(self, key: selectors.SelectorKey) -> None:
        assert isinstance(key.fileobj, KeeperEnd)
        key.fileobj.flush()
        self._watch_writes(key.fileobj)

    def _flag(self, trainer: SlotTrainer) -> None:
        flags = Flags(leave=trainer.leave, etcd_away=self._etcd_away, ready=self._ready)
        self._send(trainer, channel.Raised(flags=flags, saves=trainer.saves))

    def _hear(self, trainer: SlotTrainer) -> None:
        try:
            messages = trainer.end.receive()
        except (ValueError, KeyError, TypeError) as error:
            process_log().emit("trainer.garbled", slot=self._index, trainer=trainer.number, error=repr(error))
            messages = None
            # Not by `stop`: nobody has asked for its end, so that it has to be heard of.
            trainer.garbled = f"what the trainer of rank {trainer.assignment.rank} said was not understood: {error!r}"
            self._supervisor.send(template.Kill(trainer=trainer.number))
        if messages is None:
            trainer.hung_up = True
            self._unwatch(trainer.end)
            return
        if trainer.pid is None:
            # On a busy machine the trainer may be faster than the template that forked it.
            trainer.early += messages
            return
        for message in messages:
            self._heard(trainer, message)

    def _heard(self, trainer: SlotTrainer, message: FromTrainer) -> None:
        slot, number, generation = self._index, trainer.number, trainer.assignment.generation
        match message:
            case channel.MainReady():
                self._tell(events.TrainerReady(slot=slot, trainer=number))
            case channel.Profiled():
                trainer.last = message
                self._tell(
                    events.ProfileMeasured(
                        slot=slot,
                        trainer=number,
                        profile=message.profile,
                        checks=message.checks,
                        device=message.device,
                        proven=message.proven,
                    )
                )
            case StateRestored():
                self._newest = max(self._newest, message.step)
                self._writer = number
                base = Mark(message.generation, message.step) if message.source == "memory" else None
                self._memory.set_generation(generation)
                self._memory.restored(generation, base)
                self.grant()
                self._tell(events.Restored(slot=slot, trainer=number, state=message))
            case EventSaid():
                self._tell(message)
            case channel.Tabled():
                table = tables.from_wire(message.table)
                trainer.table = table.identity
                self._memory.learn(table)
            case channel.SnapshotWritten() if number == self._writer:
                self._written(trainer, message)
            case channel.BufferWanted() if number == self._writer:
                self._memory.want(number)
                self.grant()
            case channel.StepTaken():
                trainer.step = message.record.step
                self._newest = max(self._newest, message.record.step)
                if number == self._writer and message.record.safe_step >= 0:
                    self._memory.safe(Mark(generation, message.record.safe_step))
                    self.grant()
                self._tell(events.StepFinished(slot=slot, trainer=number, record=message.record))
            case channel.FirstStepsTaken():
                self._standby.wanted(trainer.assignment, message)
            case channel.AuditTold():
                if message.last:
                    trainer.last = message
                self._tell(events.AuditHeard(slot=slot, trainer=number, report=message.report))
            case channel.MainLeft():
                trainer.step = message.step
                trainer.last = message
            case channel.MainReturned() | channel.MainRaised():
                trainer.last = message

    def _written(self, trainer: SlotTrainer, message: channel.SnapshotWritten) -> None:
        mark = Mark(trainer.assignment.generation, message.step)
        self._taken = {m: taken for m, taken in self._taken.items() if m.step > mark.step - 64}
        self._taken[mark] = (trainer.number, message.checkpoint)
        self._memory.written(
            message.buffer,
            mark,
            rank=trainer.assignment.rank,
            world=trainer.assignment.world,
            facts=message.facts,
            table=trainer.table,
            checkpoint=message.checkpoint,
            digests=message.digests,
        )
        if message.checkpoint:
            # Cleared here, until the keeper sets it again: in between no vote may ask for the next one.
            trainer.saves += 1
            self.set_ready(False)

    def _exited(
        self, trainer: SlotTrainer, code: int, *, kind: ExitKind | None = None, detail: str | None = None
    ) -> None:
        while (messages := self._last_words(trainer)) is not None:
            for message in messages:
                self._heard(trainer, message)
        self._unwatch(trainer.end)
        trainer.end.close()
        self._close_theirs(trainer)
        temporary.remove(trainer.assignment.sockets)
        del self._trainers[trainer.number]
        self._let_go()
        if self._writer == trainer.number:
            self._writer = None
        self._memory.trainer_gone(trainer.number)
        self.grant()
        exited = trainer.exited(self._index, code, kind, detail, waited=self._watchers.waited(trainer.number))
        self._watchers.ended(trainer.number, exited.kind)
        self._standby.exited(exited, beside=not trainer.gone and any(other.gone for other in self._trainers.values()))
        self._tell(exited)

    def _last_words(self, trainer: SlotTrainer) -> list[FromTrainer] | None:
        """Return further messages of a dead trainer, None when there are no more.

        This does not wait for the end of the file: a process that escaped its group may hold the socket open.
        """
        try:
            return trainer.end.receive() or None
        except (ValueError, KeyError, TypeError):
            return None

    def _close_theirs(self, trainer: SlotTrainer) -> None:
        if trainer.theirs is not None:
            trainer.theirs.close()
            trainer.theirs = None

    def _tell(self, event: SlotEvent) -> None:
        self._events.put(event)
