"""Jobs at moments of their lives, as the keys that the membership's own writes leave in etcd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from chaos.simulation import standstills
from chaos.simulation.standstills import At
from elastic3d.accounting.live_record import GoodputRecord
from elastic3d.coverage import AuditCoverage
from elastic3d.etcd import Delete, KeyValue, Put
from elastic3d.membership import actions as acts
from elastic3d.membership.inspection.keys import AdmissionCheck, AdmissionFailure
from elastic3d.membership.records import (
    Doubt,
    Drain,
    End,
    Flap,
    GenerationHistory,
    HealthFigures,
    MemberRecord,
    Notice,
    Out,
    Proposal,
    Pulse,
    Quarantine,
    Report,
    SlowFigures,
    Tomb,
    encode,
)
from elastic3d.membership.stalls import Verdict, VerdictKind
from elastic3d.membership.transactions import lease_of, transaction
from elastic3d.shortfall import MemoryBound
from elastic3d.values import Cause, DeviceFacts, Generation, Layout, Node, Slot

ROOT = "/elastic3d/gpt-1b/"
WALL = 1_790_000_000.0
H200 = DeviceFacts(
    kind="cuda",
    name="NVIDIA H200",
    memory=143_771 << 20,
    devices=1,
    torch="2.13.0",
    runtime="CUDA 12.8, cuDNN 91002",
    driver="570.133.20",
    products="float32",
)


@dataclass(slots=True)
class Scene:
    """Keys by name. leases: the remaining seconds of leases, by an id of the scene's own."""

    keys: dict[str, bytes] = field(default_factory=dict)
    leases: dict[str, int] = field(default_factory=dict)
    remaining: dict[int, float] = field(default_factory=dict)

    def write(self, me: Node, *actions: acts.Write) -> Scene:
        """Apply the writes of member `me`, whatever their conditions."""
        for action in actions:
            ttl = lease_of(action, 3.0)
            lease = 0 if ttl is None else len(self.remaining) + 1
            if lease:
                self.remaining[lease] = ttl or 0.0
            for operation in transaction(ROOT, me, action, lease).operations:
                match operation:
                    case Put(key, value, of):
                        self.put(key.removeprefix(ROOT), value, of)
                    case Delete(key, prefix):
                        for name in [name for name in self.keys if _covers(key, name, prefix)]:
                            del self.keys[name]
        return self

    def put(self, key: str, value: bytes, lease: int = 0) -> Scene:
        """Put one key below the root."""
        self.keys[ROOT + key] = value
        self.leases[ROOT + key] = lease
        return self

    def items(self) -> tuple[KeyValue, ...]:
        """Return the keys as a read of etcd would."""
        return tuple(
            KeyValue(key=key, value=value, create_revision=n, mod_revision=n, version=1, lease=self.leases.get(key, 0))
            for n, (key, value) in enumerate(sorted(self.keys.items()), start=1)
        )


def _covers(key: str, name: str, prefix: bool) -> bool:
    return name.startswith(key) if prefix else name == key


def node(name: str, slots: int = 1, incarnation: str = "1", **labels: str) -> Node:
    """Return a node with its labels."""
    labels = labels or {"zone": "z1", "rack": f"r{ord(name[-1]) % 2}"}
    places = tuple(Slot(tile_port=7000 + slot) for slot in range(slots))
    return Node(name=name, incarnation=incarnation, address="10.0.0.1", slots=places, labels=labels)


def generation(number: int, nodes: tuple[Node, ...], cause: Cause = Cause.START, **more: object) -> Generation:
    """Return a generation led by the first of its nodes."""
    return Generation(number=number, cause=cause, nodes=nodes, leader=nodes[0].name, **more)  # type: ignore[arg-type]


def sealed(
    of: Generation, *, joined: tuple[str, ...] = (), left: tuple[str, ...] = (), ago: float = 200.0
) -> acts.Seal:
    """Return the leader's write that seals a generation."""
    history = GenerationHistory(
        number=of.number,
        attempt=of.attempt,
        cause=of.cause,
        detail=of.detail,
        leader=of.leader,
        active=len(of.nodes),
        spares=len(of.spares),
        joined=joined,
        left=left,
        layout=str(of.layout) if of.layout is not None else "",
        at=WALL - ago,
    )
    return acts.Seal(generation=of, history=history, token=1, previous=1)


def pulse(step: int = 1240, **more: object) -> bytes:
    """Return the pulse of an active node of generation 4."""
    figures = Pulse(
        state="active",
        generation=4,
        every=5.0,
        step=step,
        step_seconds=0.49,
        snapshot_step=step - 1,
        snapshot_age=0.31,
        checkpoint_step=1200,
        checkpoint_age=20.0,
        verified_step=1190,
        verified_age=29.0,
    )
    return encode(replace(figures, **more))  # type: ignore[arg-type]


def registered(*nodes: Node, minimum: int = 2, maximum: int = 8) -> Scene:
    """Return a job in which these nodes are registered, and the first leads."""
    scene = Scene()
    for each in nodes:
        record = MemberRecord(node=each, minimum=minimum, maximum=maximum, device=H200 if each.slots else None)
        scene.write(each, acts.PutMember(record=record), acts.PutReport(report=Report(incarnation=each.incarnation)))
    return scene.write(nodes[0], acts.Campaign(expected=0))


A, B, C, D, E, F = (node(name) for name in "abcdef")
FOUR = generation(
    4,
    (A, B, C, D),
    Cause.DEATH,
    spares=(E,),
    layout=Layout(pp=2, dp=2),
    detail="x is dead: its port refuses connections",
)


def forming() -> Scene:
    return registered(A, B, minimum=3)


def training() -> Scene:
    scene = registered(A, B, C, D, E)
    scene.write(A, sealed(FOUR, left=("x",)))
    for each, step in ((A, 1240), (B, 1238), (C, 1240), (D, 1239)):
        scene.put(f"pulses/{each.id}", pulse(step))
    return scene.put(f"pulses/{E.id}", pulse(-1, state="spare", snapshot_step=-1, checkpoint_step=-1, verified_step=-1))


def short() -> Scene:
    """Memory ran out in the generation before, and this one was formed to need less."""
    bound = MemoryBound(most=61_000_000_000, recompute="full")
    lean = replace(FOUR, cause=Cause.OUT_OF_MEMORY, detail="rank 1 on b ran out of its device's memory", memory=bound)
    return registered(A, B, C, D).write(A, sealed(lean))


def draining() -> Scene:
    scene = training()
    scene.put("roll/drains/b", encode(Drain(seconds=30, reason="new kernel", by="ops@bastion", at=WALL - 12)))
    notice = Notice(kind="aws", seconds=120.0, detail="spot interruption: terminate", at=WALL - 3)
    scene.write(D, acts.PutReport(report=Report(incarnation="1", notice=notice)))
    next_one = generation(5, (A, E, C), Cause.DRAIN, attempt=41, layout=Layout(pp=3, dp=1), detail="b and d drain")
    scene.write(A, acts.Propose(proposal=Proposal(generation=next_one), token=1, previous=1))
    return scene.write(E, acts.PutReport(report=Report(incarnation="1", prepared="5.41")))


def losses() -> Scene:
    scene = training()
    scene.write(A, acts.Bury(id=B.id, tomb=Tomb(incarnation="1", how=Out.DEAD, detail="silent: a, d", by="a")))
    for key in ("roll/members/c@1", "roll/reports/c@1"):
        del scene.keys[ROOT + key]
    scene.write(A, acts.PutReport(report=Report(incarnation="1", silent=(D.id,))))
    scene.write(E, acts.PutDoubt(id=E.id, doubt=Doubt(mark="m", by=A.id)))
    flap = acts.PutFlap(place="f", flap=Flap(id="f@0", count=3), seconds=3000, token=1)
    kept_out = acts.PutQuarantine(place="f", quarantine=Quarantine(seconds=240, reason="lost 3 times"), token=1)
    scene.write(F, acts.PutMember(record=MemberRecord(node=F))).write(A, flap, kept_out)
    other = Quarantine(seconds=3600, reason="ECC errors", by="ops@bastion")
    scene.write(A, acts.PutQuarantine(place="rack9-h4", quarantine=other, token=1))
    checks = (
        AdmissionCheck(name="devices", ok=True),
        AdmissionCheck(
            name="matrix product", ok=False, detail="digest 5e1f, expected 77a0: this device computes wrongly"
        ),
        AdmissionCheck(name="disk", ok=False, detail="/scratch is not writable"),
    )
    return scene.put("refused/g", encode(AdmissionFailure(node="g", checks=checks)))


def parted() -> Scene:
    """Two active nodes do not reach a spare, one of them unaware of it; and d does not reach c, both active."""
    scene = training()
    scene.write(A, acts.PutReport(report=Report(incarnation="1", silent=(E.id,), unreachable=(E.id,))))
    scene.write(E, acts.PutReport(report=Report(incarnation="1", unreachable=(A.id, B.id))))
    return scene.write(D, acts.PutReport(report=Report(incarnation="1", unreachable=(C.id, "gone@1"))))


def stuck() -> Scene:
    """A rank of c stands still, as one did in the generation before; all others wait for it."""
    scene = training()
    for each in (A, B, C, D):
        said = standstills.stall(FOUR, each, At.FAULT if each is C else At.WAIT, step=1240)
        if each is C:
            said = replace(said, ranks=tuple(replace(rank, top_frame="train.py:30 in forward") for rank in said.ranks))
        scene.write(each, acts.PutStall(stall=said))
    scene.write(A, acts.PutFlap(place="c", flap=Flap(id="c@1/3.1", count=0, stuck=1), seconds=3000, token=1))
    verdict = Verdict(
        kind=VerdictKind.STUCK,
        fault="stopped",
        key="3.1",
        step=1100,
        detail="rank 2 on c was stopped by a signal, and 3 ranks waited for it",
        culprits=(C.id,),
        ranks=(2,),
    )
    return scene.write(A, acts.PutVerdict(verdict=verdict, token=1))


SLOW = (
    SlowFigures(
        node="c",
        rho=1.31,
        kind="compute",
        since=1100,
        cost=0.042,
        detail="rank 2 computes 13.1 ms for each micro-batch, and others 10.0 ms for the same work",
        ranks=(2,),
    ),
)


def audited() -> Scene:
    """One step in 25 is audited; d has reported nothing for a while; c is slow."""
    scene = training()
    coverage = AuditCoverage(every=25, pieces=0.25, nodes=2, sums=0.05)
    for each, clean in ((A, 1225), (B, 1225), (C, 1225), (D, 1150)):
        watch = HealthFigures(
            idle=3.0,
            busy=30.0,
            audit=0.01,
            coverage=coverage,
            clean=clean,
            slow_from=1.15,
            slow=SLOW,
            at_rest=0.005,
            left_out=3,
            skipped=1,
            spike=1180,
            unchecked=("updates: nobody makes those of d again",) if each.name == "d" else (),
        )
        scene.put(f"pulses/{each.id}", pulse(watch=watch, vetted_step=1190, vetted_age=24.0))
    return scene


def unaudited() -> Scene:
    """Nobody asks for audits, so that no checkpoint is ever vetted."""
    scene = training()
    why = "audits are off: health=elastic3d.Health(audit=...) turns them on"
    return scene.put(f"pulses/{A.id}", pulse(unvetted=why))


def accounted() -> Scene:
    """Its leader accounts for its time; b joined in generation 4 and is slow; nodes report what they are at."""
    joined = replace(FOUR, cause=Cause.JOIN, detail="b came")
    scene = registered(A, B, C, D, E).write(A, sealed(joined, joined=("b",), left=("x",)))
    watch = HealthFigures(idle=3.0, busy=30.0, slow_from=1.15, slow=(replace(SLOW[0], node="b"),))
    for each, busy, gib in ((A, 0.71, 12.5), (B, 0.93, 13.0), (C, 0.7, 9.25), (D, 0.69, 101.0)):
        figures = pulse(until=20_000, loss=3.25, busy=busy, memory=int(gib * 2**30), watch=watch)
        scene.put(f"pulses/{each.id}", figures)
    scene.put(f"pulses/{E.id}", pulse(-1, state="spare", snapshot_step=-1, snapshot_age=-1.0, checkpoint_step=-1))
    minute = 60_000_000
    spent = {"useful": 230 * minute, "preparing": 12 * minute, "restoring": 3 * minute, "spare": 55 * minute}
    record = GoodputRecord(
        at=WALL - 4,
        since=WALL - 3600,
        by_category=spent,
        by_cause={"start": {"preparing": 7 * minute}, "join": {"preparing": 5 * minute, "restoring": 3 * minute}},
        steps=1240,
    )
    return scene.put("goodput", encode(record))


def waiting() -> Scene:
    scene = registered(A, minimum=2)
    scene.write(A, sealed(generation(4, (A, B), Cause.DEATH, layout=Layout(pp=1, dp=2))))
    return scene.write(A, acts.Bury(id=B.id, tomb=Tomb(incarnation="1", how=Out.LEFT, detail="SIGTERM", by="b")))


def ended() -> Scene:
    scene = Scene().write(A, sealed(FOUR, left=("x",)))
    return scene.write(A, acts.PutEnd(end=End(failed=False, detail="main returned on all nodes"), token=1))


def failed() -> Scene:
    scene = training()
    detail = "the user's code raised on 3 tries:\nTraceback ...\nValueError: loss is NaN \x1b[31m"
    scene.write(C, acts.PutReport(report=Report(incarnation="1", error="4.0", detail="ValueError: loss is NaN")))
    return scene.write(A, acts.PutEnd(end=End(failed=True, detail=detail), token=1))


def garbage() -> Scene:
    scene = training()
    scene.put("roll/members/b@1", b"\xff\xfe").put("board/leader", b"hello").put("pulses/c@1", b'{"schema": 99}')
    scene.put("roll/members/z@7", encode(MemberRecord(node=A))).put("colour", b"red")
    return scene.put(f"pulses/{D.id}", pulse(step_seconds=float("inf")))


def restart() -> Scene:
    """In mode=restart the slots of a node are unknown, and a generation has no layout."""
    nodes = tuple(Node(name=f"host{n}-{4000 + n}", incarnation="1", address="10.0.0.1", slots=()) for n in range(2))
    return registered(*nodes).write(nodes[0], sealed(generation(1, nodes), joined=tuple(n.name for n in nodes)))


def many() -> Scene:
    """Sixty nodes of 8 slots, two of which have something to report."""
    nodes = tuple(node(f"gpu-{n:02d}", slots=8, zone=f"z{n % 3}") for n in range(60))
    scene = registered(*nodes).write(nodes[0], sealed(generation(4, nodes, layout=Layout(pp=20, dp=24))))
    scene.put("roll/drains/gpu-17", encode(Drain(seconds=90)))
    return scene.put(f"pulses/{nodes[30].id}", pulse(health="etcd does not answer this node"))


SCENES: dict[str, Callable[[], Scene]] = {
    "forming": forming,
    "training": training,
    "short": short,
    "draining": draining,
    "losses": losses,
    "stuck": stuck,
    "audited": audited,
    "accounted": accounted,
    "waiting": waiting,
    "ended": ended,
    "failed": failed,
    "garbage": garbage,
    "restart": restart,
    "many": many,
}


def past() -> Scene:
    """Five generations of a job's life."""
    one = generation(1, (A, B, C, D), layout=Layout(pp=2, dp=2))
    two = generation(2, (A, C, D), Cause.DEATH, layout=Layout(pp=3, dp=1), detail="b is dead: silent to a and c")
    three = generation(
        3, (A, E, C, D), Cause.JOIN, attempt=7, spares=(F,), layout=Layout(pp=2, dp=2), detail="e came, and f"
    )
    four = generation(
        4, (C, F, D, E), Cause.DRAIN, attempt=9, layout=Layout(pp=2, dp=2), detail="a drains: spot interruption (aws)"
    )
    five = generation(5, (C, F, D, E), Cause.FAILURE, layout=Layout(pp=2, dp=2), detail="a trainer on f died (SIGSEGV)")
    scene = Scene()
    scene.write(A, sealed(one, joined=("a", "b", "c", "d"), ago=200_000), sealed(two, left=("b",), ago=4000))
    scene.write(A, sealed(three, joined=("e", "f"), ago=3900), sealed(four, left=("a",), ago=300))
    return scene.write(C, sealed(five, ago=60))
