"""A slot's standby, as its loop has it: when one is forked, what is said of it, and when there is none any more."""

from __future__ import annotations

import json

from elastic3d.log import process_log
from elastic3d.port import Assignment
from elastic3d.values import to_json
from elastic3d.worker.processes import template
from elastic3d.worker.processes.channel import FirstStepsTaken
from elastic3d.worker.processes.events import ExitKind, TrainerExited
from elastic3d.worker.processes.supervisor import TemplateSupervisor

TRIES = 2
"""Standbys that may fail one after the other before there are no more."""


class SlotStandby:
    """For the slot's thread. The template has the process; this has what is decided about it."""

    def __init__(self, slot: int, supervisor: TemplateSupervisor) -> None:
        self._slot, self._supervisor = slot, supervisor
        # A new interpreter for each trainer loads everything anew.
        self._off = not supervisor.forks
        self._failed = 0
        self._spec = ""  # for which one was forked last

    def fork(self, trainer: int, assignment: Assignment) -> template.Fork:
        """Return the order for a trainer. A standby may become it unless it only measures."""
        serves = assignment.standby and not assignment.measuring
        return template.Fork(trainer=trainer, spec=json.dumps(to_json(assignment)), standby=serves)

    def wanted(self, assignment: Assignment, message: FirstStepsTaken) -> None:
        """Have one forked for the next trainer: that of this assignment has made its first steps."""
        if self._off:
            return
        if message.changed:
            self._stop(
                f"main sets {', '.join(message.changed)}, which libraries read when they are loaded; set before "
                "elastic3d.run, or in the job's environment, a standby has it too"
            )
            return
        self._spec = json.dumps(to_json(assignment))
        self._supervisor.send(template.Stand(spec=self._spec))

    def heard(self, packet: template.Packet) -> None:
        """Take note of what the template says of it; of other packets, nothing."""
        match packet:
            case template.StandbyReady():
                self._failed = 0
                process_log().emit("standby.ready", slot=self._slot, seconds=packet.seconds)
            case template.StandbyTaken():
                process_log().emit("standby.taken", slot=self._slot, pid=packet.pid)
            case template.StandbyEnded():
                self._failed += 1
                process_log().emit("standby.failed", slot=self._slot, error=packet.error)
                if self._failed == TRIES:
                    self._stop(f"{TRIES} have failed one after the other")
            case _:
                pass

    def exited(self, trainer: TrainerExited, *, beside: bool) -> None:
        """Leave its memory to the trainers to come if one has run out.

        beside: it was made ready beside one that trains on, for which there is to be a standby again.
        """
        if trainer.kind is ExitKind.OUT_OF_MEMORY:
            self._stop("a trainer ran out of memory, of which a standby takes some")
        if beside and self._spec and not self._off:
            self._supervisor.send(template.Stand(spec=self._spec))

    def _stop(self, reason: str) -> None:
        if not self._off:
            self._off = True
            process_log().emit("standby.off", slot=self._slot, reason=reason)
