"""What can happen to a job of `mode=restart`: a script that torchrun restarts, and that writes no events.

Faults within a script, of its snapshots and its store are those of `elastic3d.run`, and so are most events. Nobody
there notices a worker that stands still: what stops one for good is left out, too.
"""

from __future__ import annotations

from collections.abc import Iterable

from chaos.faults import etcd, network, orders, process
from chaos.faults.fault import Fault
from chaos.faults.moment import Phase
from chaos.faults.process import Pause
from chaos.machine.processes import Part
from elastic3d.errors import UsageError

WORDS: tuple[str, ...] = tuple(
    kind.WORD
    for kind in (
        *(process.Kill, process.KillTrainer, process.Stop, process.Continue, process.Pause, process.Flap),
        *(process.Slow, process.Crowd, orders.Join, orders.Terminate),
        *(network.Cut, network.CutFromEtcd, network.Delay, network.Loss, network.Narrow),
        *(etcd.EtcdPause, etcd.EtcdRestart, etcd.EtcdMemberPause, etcd.EtcdMemberRestart, etcd.EtcdEmpty),
        *(etcd.EtcdRestored, etcd.EtcdCompact, etcd.EtcdSlow, etcd.EtcdMoveLeader, etcd.EtcdDeleted, etcd.Revoke),
    )
)
"""The faults that such a job can meet."""
WHY = "it is not for --mode restart; --mode resident plays it, with a script that calls elastic3d.run"
TELL = "have it print lines such as `step 12`, or say by --step-pattern how it tells them"
"""What to do where no step was seen."""
EVENTS = ("generation.sealed", "member.joined", "peer.lost", "step.committed", "job.ended")
"""The events that such a job is seen to make."""
PARTS = (Part.AGENT, Part.TRAINERS)
PHASES = (Phase.SEALED, Phase.STEPPED)


def check_restart(faults: Iterable[Fault], *, steps: int | None = None) -> None:
    """Raise UsageError where one of `faults` cannot happen to such a job. steps: that it tells; None if unknown."""
    for fault in faults:
        when = fault.when
        if fault.WORD not in WORDS:
            raise UsageError(f"{fault}: {WHY}")
        if isinstance(fault, Pause) and fault.part not in PARTS:
            raise UsageError(f"{fault}: under --mode restart a node has no {fault.part}; give {' or '.join(PARTS)}")
        if when.phase is not None and when.phase not in PHASES:
            raise UsageError(f"{fault}: under --mode restart nobody sees that phase; give {' or '.join(PHASES)}")
        if when.event and when.event not in EVENTS:
            raise UsageError(f"{fault}: under --mode restart nobody writes {when.event}; give {', '.join(EVENTS)}")
        if steps == 0 and (when.step or when.event == "step.committed" or when.phase is Phase.STEPPED):
            raise UsageError(f"{fault}: the script tells no step; {TELL}")
