"""What one reading of all keys of a run says of how the job stands.

Pure. Times in records are durations, or wall clocks "for people only", which are read here and nowhere else: a clock
that is wrong shows a wrong age and decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from elastic3d.accounting.recorded_events import SECOND
from elastic3d.accounting.spans import Category
from elastic3d.membership.inspection.keys import RunKeys
from elastic3d.membership.inspection.status import (
    GenerationStatus,
    GoodputStatus,
    HealthStatus,
    JobState,
    NodeRole,
    NodeState,
    NodeStatus,
    StateAge,
    Status,
    SuspectRank,
    VerdictStatus,
)
from elastic3d.membership.inspection.uncovered import uncovered
from elastic3d.membership.records import Flap, Out, Pulse
from elastic3d.membership.stalls import VerdictKind, suspected
from elastic3d.planner import place_of
from elastic3d.values import Generation, Node


def status(run_id: str, run_keys: RunKeys, *, revision: int, remaining: Mapping[int, float], wall: float) -> Status:
    """Return how the job stands.

    remaining: the seconds that leases have left, where known. wall: the reader's wall clock.
    """
    generation = run_keys.generation
    rows = _Rows(run_keys, remaining, wall)
    nodes = rows.all()
    minimum = max((record.minimum for record in run_keys.members.values()), default=0)
    state, detail = _job(run_keys, nodes, minimum)
    active = [node.pulse for node in nodes if node.pulse is not None and node.role is NodeRole.ACTIVE]
    current = [pulse for pulse in active if generation is not None and pulse.generation == generation.number]
    # The leader commits the checkpoints, even if it is a spare.
    pulses = [node.pulse for node in nodes if node.pulse is not None]
    newest = max(current, key=lambda pulse: pulse.step, default=None)
    preparing = run_keys.proposal.generation if run_keys.proposal is not None and run_keys.end is None else None
    return Status(
        run_id=run_id,
        revision=revision,
        state=state,
        detail=detail,
        leader=run_keys.leader.name if run_keys.leader is not None else "",
        generation=_sealed(generation, run_keys, wall) if generation is not None else None,
        preparing=_sealed(preparing, run_keys, wall) if preparing is not None else None,
        nodes=nodes,
        step=newest.step if newest is not None else -1,
        until=newest.until if newest is not None else 0,
        step_seconds=newest.step_seconds if newest is not None else 0.0,
        loss=newest.loss if newest is not None else None,
        snapshot=_snapshot(current),
        snapshot_every=max((pulse.snapshot_every for pulse in current), default=0),
        checkpoint=_newest([(p.checkpoint_step, p.checkpoint_age, p.every) for p in pulses]),
        verified=_newest([(p.verified_step, p.verified_age, p.every) for p in pulses]),
        vetted=_newest([(p.vetted_step, p.vetted_age, p.every) for p in pulses]),
        unvetted=next((p.unvetted for p in pulses if p.unvetted), ""),
        suspects=_suspects(run_keys),
        verdict=_verdict(run_keys),
        health=_watched(current),
        goodput=_goodput(run_keys, wall),
        injectable=tuple(sorted({record.node.name for record in run_keys.members.values() if record.chaos})),
        minimum=minimum,
        maximum=max((record.maximum for record in run_keys.members.values()), default=0),
        problems=tuple(run_keys.problems),
    )


def _sealed(generation: Generation, run_keys: RunKeys, wall: float) -> GenerationStatus:
    history = run_keys.history.get(f"{generation.number:010d}.{generation.attempt}")
    proposal = run_keys.proposal
    return GenerationStatus(
        number=generation.number,
        attempt=generation.attempt,
        cause=generation.cause,
        detail=generation.detail,
        layout=generation.layout,
        world=generation.world,
        nodes=tuple(node.name for node in generation.nodes),
        spares=tuple(node.name for node in generation.spares),
        mesh=_mesh(generation),
        memory=generation.memory,
        age=max(0.0, wall - history.at) if history is not None and history.at else None,
        switching=proposal is not None and proposal.generation.key == generation.key and proposal.switch,
    )


def _mesh(generation: Generation) -> tuple[tuple[str, ...], ...]:
    layout = generation.layout
    if layout is None or not layout.world or layout.world != generation.world:
        return ()
    rows: list[list[str]] = [[""] * layout.dp for _ in range(layout.pp)]
    for rank, node in enumerate(generation.node_of_rank):
        place = place_of(rank, layout)
        rows[place.pp][place.dp] = node.name
    return tuple(map(tuple, rows))


def _suspects(run_keys: RunKeys) -> tuple[SuspectRank, ...]:
    generation = run_keys.generation
    key = generation.key if generation is not None and run_keys.end is None else ""
    suspects = [
        SuspectRank(
            node=_name(id),
            rank=rank.rank,
            step=rank.step,
            phase=rank.phase,
            state=str(rank.state),
            seconds=rank.silent / 1000,
            detail="; ".join(filter(None, (rank.odd, rank.where))),
        )
        for id, stall in run_keys.stalls.items()
        for rank in stall.ranks
        if stall.key == key and suspected(rank)
    ]
    return tuple(sorted(suspects, key=lambda suspect: suspect.rank))


def _verdict(run_keys: RunKeys) -> VerdictStatus | None:
    stuck = [key for key, verdict in run_keys.verdicts.items() if verdict.kind is VerdictKind.STUCK]
    if not stuck:
        return None
    newest = run_keys.verdicts[max(stuck)]
    return VerdictStatus(
        number=int(newest.key.partition(".")[0]),
        fault=newest.fault,
        nodes=tuple(map(_name, newest.culprits)),
        ranks=newest.ranks,
        step=newest.step,
        detail=newest.detail,
        acted=newest.act,
    )


def _watched(pulses: list[Pulse]) -> HealthStatus | None:
    """Return how the nodes that train say they watch their ranks: all by the same script."""
    given = [pulse.watch for pulse in pulses if pulse.watch is not None]
    if not given:
        return None
    # Those that have not begun yet do not know what is audited.
    watch = next((one for one in given if one.coverage is not None), given[0])
    unchecked = tuple(sorted({why for one in given for why in one.unchecked}))
    return HealthStatus(
        idle=watch.idle,
        busy=watch.busy,
        acts=watch.acts,
        audit=watch.audit,
        coverage=watch.coverage,
        clean=min(one.clean for one in given),
        slow_from=watch.slow_from,
        slow=max((one.slow for one in given), key=len),
        left_out=max(one.left_out for one in given),
        skipped=max(one.skipped for one in given),
        spike=max(one.spike for one in given),
        uncovered=uncovered(replace(watch, unchecked=unchecked)),
    )


def _goodput(run_keys: RunKeys, wall: float) -> GoodputStatus | None:
    record = run_keys.goodput
    if record is None:
        return None
    held = sum(spent for name, spent in record.by_category.items() if name != Category.AWAY)
    return GoodputStatus(
        share=record.by_category.get(Category.USEFUL, 0) / held if held else 0.0,
        held=held / SECOND,
        steps=record.steps,
        by_category={str(one): record.by_category.get(one, 0) / SECOND for one in Category},
        by_cause={
            cause: {name: spent / SECOND for name, spent in table.items()} for cause, table in record.by_cause.items()
        },
        since=record.since,
        age=max(0.0, wall - record.at),
    )


def _clean(pulse: Pulse | None) -> int:
    return -1 if pulse is None or pulse.watch is None else pulse.watch.clean


def _snapshot(pulses: list[Pulse]) -> StateAge | None:
    """Return the snapshot that all active nodes hold: as new as the oldest of theirs."""
    if not pulses or any(pulse.snapshot_step < 0 for pulse in pulses):
        return None
    oldest = min(pulses, key=lambda pulse: (pulse.snapshot_step, -pulse.snapshot_age))
    return StateAge(step=oldest.snapshot_step, age=max(0.0, oldest.snapshot_age), within=oldest.every)


def _newest(reported: list[tuple[int, float, float]]) -> StateAge | None:
    """Return the newest of (step, age, seconds between reports); the leader reports checkpoints."""
    step, age, within = max(reported, key=lambda one: (one[0], -one[1]), default=(-1, 0.0, 0.0))
    return None if step < 0 else StateAge(step=step, age=max(0.0, age), within=within)


def _job(run_keys: RunKeys, nodes: tuple[NodeStatus, ...], minimum: int) -> tuple[JobState, str]:
    generation = run_keys.generation
    if run_keys.end is not None:
        return (JobState.FAILED if run_keys.end.failed else JobState.ENDED), run_keys.end.detail
    able = sum(f"{node.name}@{node.incarnation}" in run_keys.members and node.state not in _UNABLE for node in nodes)
    few = f"{_nodes(able)} of at least {minimum}" if minimum > able else ""
    if generation is None:
        return JobState.FORMING, few or f"{_nodes(able)} registered"
    active = [node for node in nodes if node.role is NodeRole.ACTIVE]
    out = [node.name for node in active if node.state is NodeState.OUT]
    if not run_keys.members:
        return JobState.WAITING, "no node is registered: all are gone, or etcd lost their leases"
    if out:
        what = f"{', '.join(out)} {'is' if len(out) == 1 else 'are'} out"
        return (JobState.WAITING, f"{what}; there is {few}") if few else (JobState.REFORMING, what)
    left = [report for report in run_keys.reports.values() if report.left == generation.key]
    if left:
        return JobState.REFORMING, f"trainers left at the boundary after step {max(report.step for report in left)}"
    done = sum(node.state is NodeState.FINISHED for node in active)
    return JobState.TRAINING, f"main has returned on {done} of {len(active)} nodes" if done else ""


_UNABLE = (
    NodeState.DRAINING,
    NodeState.QUARANTINED,
    NodeState.APART,
    NodeState.OUT,
    NodeState.LOST_LEASE,
    NodeState.REFUSED,
    NodeState.UNREADABLE,
)


def _nodes(count: int) -> str:
    return f"{count} node{'' if count == 1 else 's'}"


class _Rows:
    """The nodes of a status: those of the generation in rank order, then spares, then everybody else by name."""

    def __init__(self, run_keys: RunKeys, remaining: Mapping[int, float], wall: float) -> None:
        self.run_keys, self.wall = run_keys, wall
        self.left = {key: remaining[lease] for key, lease in run_keys.leases.items() if lease in remaining}
        generation, proposal = run_keys.generation, run_keys.proposal
        self.key = generation.key if generation is not None else ""
        self.active = {node.id: node for node in generation.nodes} if generation is not None else {}
        self.spares = {node.id: node for node in generation.spares} if generation is not None else {}
        self.ranks: dict[str, int] = {}
        rank = 0
        for node in self.active.values():
            self.ranks[node.id] = rank
            rank += len(node.slots)
        coming = (*proposal.generation.nodes, *proposal.generation.spares) if proposal is not None else ()
        self.coming = {node.id for node in coming}
        self.accusers: dict[str, list[str]] = {}
        for id, report in sorted(run_keys.reports.items()):
            for silent in report.silent:
                self.accusers.setdefault(silent, []).append(_name(id))
        self.unreached: dict[str, set[str]] = {}
        for id, report in run_keys.reports.items():
            for other in report.unreachable:
                if id in run_keys.members and other in run_keys.members:
                    self.unreached.setdefault(id, set()).add(other)
                    self.unreached.setdefault(other, set()).add(id)

    def all(self) -> tuple[NodeStatus, ...]:
        run_keys = self.run_keys
        known = {record.node.id: record.node for record in run_keys.members.values()}
        others = {id: known[id] for id in sorted(known) if id not in self.active and id not in self.spares}
        rows = [self._row(node) for node in (*self.active.values(), *self.spares.values(), *others.values())]
        here = {row.name for row in rows}
        machines = {row.machine for row in rows}
        for id, why in sorted(run_keys.unreadable.items()):
            if id not in self.active and id not in self.spares:
                rows.append(_bare(_name(id), NodeState.UNREADABLE, why))
        for name, refusal in sorted(run_keys.refused.items()):
            if name not in here:
                failed = "; ".join(f"{check.name}: {check.detail}" for check in refusal.checks if not check.ok)
                rows.append(_bare(name, NodeState.REFUSED, failed, self.left.get(f"refused/{name}")))
        for id, tomb in sorted(run_keys.tombs.items()):
            if tomb.how is Out.REFUSED and _name(id) not in here:
                rows.append(_bare(_name(id), NodeState.REFUSED, tomb.detail))
        for machine, quarantine in sorted(run_keys.quarantine.items()):
            if machine not in machines:
                left = self.left.get(f"quarantine/{machine}", quarantine.seconds)
                rows.append(_bare(machine, NodeState.QUARANTINED, _said(quarantine.reason, quarantine.by), left))
        return tuple(rows)

    def _row(self, node: Node) -> NodeStatus:
        id, run_keys = node.id, self.run_keys
        role = NodeRole.ACTIVE if id in self.active else NodeRole.SPARE if id in self.spares else NodeRole.NONE
        state, detail, left = self._state(node)
        return NodeStatus(
            name=node.name,
            incarnation=node.incarnation,
            machine=node.place,
            state=state,
            role=role,
            leads=run_keys.leader is not None and f"{run_keys.leader.name}@{run_keys.leader.incarnation}" == id,
            detail=detail,
            seconds_left=left,
            first_rank=self.ranks.get(id) if node.slots else None,
            slots=len(node.slots),
            address=node.address,
            labels=dict(sorted(node.labels.items())),
            device=run_keys.members[id].device if id in run_keys.members else None,
            health=self._health(node),
            pulse=run_keys.pulses.get(id),
            clean=_clean(run_keys.pulses.get(id)),
        )

    def _state(self, node: Node) -> tuple[NodeState, str, float | None]:
        id, run_keys = node.id, self.run_keys
        tomb = run_keys.tombs.get(id)
        if tomb is not None:
            return NodeState.OUT, f"{tomb.how}: {tomb.detail}" if tomb.detail else str(tomb.how), None
        if id in run_keys.unreadable:
            return NodeState.UNREADABLE, run_keys.unreadable[id], None
        if id not in run_keys.members:
            if run_keys.end is not None:
                return NodeState.GONE, "", None
            return NodeState.LOST_LEASE, "its keys are gone from etcd; nobody has declared it out", None
        parted = sorted(map(_name, self.unreached.get(id, set()) & self.active.keys()))
        if parted and id not in self.active:
            detail = f"no connection between it and {', '.join(parted)}: it stands aside until there is one"
            return NodeState.APART, detail, None
        accusers = self.accusers.get(id)
        if accusers:
            return NodeState.SILENT, f"not heard by {', '.join(accusers)}", None
        doubt, report = run_keys.doubts.get(id), run_keys.reports.get(id)
        if doubt is not None and (report is None or report.answered != doubt.mark):
            return NodeState.DOUBTED, f"{_name(doubt.by)} asks through etcd whether it lives", None
        drained = self._drain(node)
        if drained is not None:
            return NodeState.DRAINING, *drained
        quarantine = run_keys.quarantine.get(node.place)
        if quarantine is not None:
            left = self.left.get(f"quarantine/{node.place}", quarantine.seconds)
            return NodeState.QUARANTINED, _said(quarantine.reason, quarantine.by), left
        if id in self.active:
            finished = report is not None and report.finished == self.key
            return (NodeState.FINISHED if finished else NodeState.ACTIVE), "", None
        if id in self.coming:
            assert run_keys.proposal is not None
            prepared = report is not None and report.prepared == run_keys.proposal.generation.key
            return (NodeState.PREPARED if prepared else NodeState.PREPARING), "", None
        return (NodeState.SPARE if id in self.spares else NodeState.JOINING), "", None

    def _drain(self, node: Node) -> tuple[str, float | None] | None:
        drain, report = self.run_keys.drains.get(node.name), self.run_keys.reports.get(node.id)
        if drain is not None and drain.incarnation in ("", node.incarnation):
            return _said(drain.reason, drain.by), self._until(drain.seconds, drain.at)
        if report is not None and report.notice is not None:
            notice = report.notice
            return _said(notice.detail, notice.kind), self._until(notice.seconds, notice.at)
        return None

    def _until(self, seconds: float | None, at: float) -> float | None:
        if seconds is None or not at:
            return seconds
        return min(max(0.0, seconds - (self.wall - at)), seconds)

    def _health(self, node: Node) -> tuple[str, ...]:
        report, pulse = self.run_keys.reports.get(node.id), self.run_keys.pulses.get(node.id)
        flap = self.run_keys.flaps.get(node.place)
        wrong = []
        if pulse is not None and pulse.health != "ok":
            wrong.append(pulse.health)
        if report is not None and self.key:
            for mark, what in (
                (report.error, "its code raised"),
                (report.failed, "a trainer failed"),
                (report.peer_lost, "a trainer lost a peer"),
            ):
                if mark == self.key:
                    wrong.append(f"{what}: {report.detail}" if report.detail else what)
        if report is not None and report.silent:
            wrong.append(f"does not hear {', '.join(map(_name, report.silent))}")
        if report is not None and report.unreachable:
            wrong.append(f"cannot connect to {', '.join(map(_name, report.unreachable))}")
        if flap is not None:
            wrong += _lately(flap)
        return tuple(wrong)


def _lately(flap: Flap) -> list[str]:
    said = ((flap.count, "lost"), (flap.stuck, "held all others up"))
    return [f"{what} {count} time{'' if count == 1 else 's'} lately" for count, what in said if count]


def _bare(name: str, state: NodeState, detail: str, left: float | None = None) -> NodeStatus:
    return NodeStatus(name=name, machine=name, state=state, detail=detail, seconds_left=left, labels={})


def _said(reason: str, by: str) -> str:
    return f"{reason} (by {by})" if reason and by else reason or (f"by {by}" if by else "")


def _name(id: str) -> str:
    return id.rpartition("@")[0] or id
