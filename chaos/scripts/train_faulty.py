"""Train the demo's model, and fail in chosen ways: a rank that stops, leaves the program, or computes wrongly.

    train_faulty.py --fault KIND:RANK@STEP[:MB[:BLOCK]] --fault ...

KIND, in the forward pass of micro-batch MB (0 by default) of the step after STEP steps, on rank RANK:

    stop        SIGSTOP to itself
    gil         native code that holds the interpreter's lock
    lock        a lock that nobody releases
    blocked     it reads a file whose bytes never come, in state D; with --hung
    unkillable  it looks for a file in a folder that never answers: SIGKILL does not end that; with --hung
    blackhole   nothing arrives any more on its connections, in one direction only
    spin        a loop without end
    loader      the data set does not return
    stall       the data set returns after 20 s
    skip        it leaves out the exchanges of the step's gradients
    order       it calls another collective before the vote
    shape       it votes with a vector of another size
    dtype       it votes with numbers of another type
    deadlock    it enters the collectives of two groups in another order than all others
    flip        one bit of a gradient, once
    forward     one bit of what a block makes of its input, once
    backward    one bit of the gradient of a block's input, once
    sticky      a bit of every such gradient, from then on
    liars       the same on this rank and on the next one, another bit each
    nandevice   every gradient of a block's weight is not a number, from then on
    rest        one bit of its first parameter changes in memory
    memory      it asks for more memory than the kernel lets it have
    nan         the samples of micro-batch MB of the step bring a loss that is not a number, whoever computes it
    spike       those of three steps from this one on bring ten times the loss, by which it shows
    slow        its blocks take FACTOR times as long, both ways, from then on: slow:RANK@STEP:FACTOR
    sluggish    its data set takes FACTOR seconds for a sample, from then on: sluggish:RANK@STEP:FACTOR

RANK may be `leader`: that of the node that leads the membership. BLOCK is the first of the rank's blocks, 0, by
default, and only for flips. MB counts the passes of the rank within the step, those of an audit too; for what samples
bring it is the number of the micro-batch, and RANK is the one that says that it happened.

What is slow stays with the node, whatever its rank becomes. Each of the others happens once in the life of the job,
whatever generation follows (with --again, in each), and no two at one step; `<out>/fault-STEP.json` says when, where
and to whom.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import resource
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

import elastic3d
from chaos.follow import Follower
from chaos.scripts import SECOND, mark_of, train_gpt
from chaos.scripts.train_gpt import GPT, Block, SourceFiles, cross_entropy, report
from elastic3d.clock import SYSTEM
from elastic3d.data import Order
from elastic3d.health.numerics import ROLLBACK_STEPS
from elastic3d.health.phases import Axis
from elastic3d.health.record import fingerprint
from elastic3d.parallel.mesh import Mesh
from elastic3d.parallel.reduction.lanes import Lane
from elastic3d.parallel.state import local

LONG = 100_000
ROOM = 16 << 20
STALL = 20.0

Waiting = Callable[[], Tensor]
Begin = Callable[[Mesh, Tensor], Waiting]


LEADER = -1
"""Stands for the rank of the node that leads."""


@dataclass(slots=True, kw_only=True)
class Fault:
    """What shall happen, and where this trainer is.

    of: the rank, or LEADER. out: the folder of the mark that says that it has happened. again: it happens in each
    generation. hung: a `HungFiles`' folder. leads: whether this rank's node leads. armed: it has not happened yet.
    lies: from this pass on a bit of every gradient is wrong.
    """

    kind: str
    of: int
    step: int
    micro_batch: int
    out: Path
    block: int = 0
    again: bool = False
    hung: Path | None = None
    node: str = ""
    factor: float = 1.0
    slowed: bool = False
    rank: int = -1
    world: int = 0
    present: int = -1
    forwards: int = 0
    armed: bool = True
    lies: bool = False
    blocks: list[FaultyBlock] = field(default_factory=list)
    leads: Callable[[], bool] = lambda: False
    optimizer: torch.optim.Optimizer | None = None

    present_one: ClassVar[Fault | None] = None
    """The one of the present step, or the one before."""

    @classmethod
    def parse(cls, text: str, out: Path) -> Fault:
        """Return the fault that KIND:RANK@STEP[:MB[:BLOCK]] asks for; ValueError where it is not one."""
        match = re.fullmatch(r"([a-z]+):(\d+|leader)@(\d+)(?::(\d+(?:\.\d+)?))?(?::(\d+))?", text)
        if match is None or match[1] not in {*KINDS, *FLIPS}:
            kinds = ", ".join([*KINDS, *FLIPS])
            raise ValueError(f"--fault {text!r}: expected KIND:RANK@STEP[:MB[:BLOCK]], KIND one of {kinds}")
        of = LEADER if match[2] == "leader" else int(match[2])
        last, block = float(match[4] or 0), int(match[5] or 0)
        return cls(kind=match[1], of=of, step=int(match[3]), micro_batch=int(last), block=block, factor=last, out=out)

    def begin(self, rank: int, step: int) -> None:
        """Note that this rank begins a step, after `step` of them."""
        self.rank, self.present, self.forwards = rank, step, 0
        if self.kind == "deadlock" and step == self.step and self.armed:
            # All ranks take part, and this one in another order.
            self._now()
            _instead_of_vote(_both_groups(first=rank == self.of))
            self.armed = False
        if self.kind in LASTING and not self.slowed:
            self.slowed = self._now() or self._marked()
        if self.kind in OF_SAMPLES:
            self._now()

    def forward(self) -> None:
        """Note that a forward pass begins; fail in it if it is the one."""
        at, self.forwards = self.forwards, self.forwards + 1
        if (
            self.kind in KINDS
            and self.kind not in (*_OF_DATA, *LASTING, *OF_SAMPLES)
            and at == self.micro_batch
            and self._now()
        ):
            KINDS[self.kind]()

    def load(self) -> None:
        """Note that a sample is read; fail in it if it is the one. Data is loaded a step ahead."""
        if self.kind in _OF_DATA and self._now():
            KINDS[self.kind]()
        elif self.kind == "sluggish" and self.slowed:
            SYSTEM.sleep(self.factor)

    def computed(self, seconds: float) -> None:
        """Note that a block's pass took so long; take as much longer as it shall."""
        if self.kind == "slow" and self.slowed:
            SYSTEM.sleep((self.factor - 1) * seconds)

    def _marked(self) -> bool:
        """Whether this node is slow since an earlier generation: its trainers have one parent."""
        try:
            return int(json.loads((self.out / mark_of(self.step)).read_text())["parent"]) == os.getppid()
        except (OSError, ValueError):
            return False

    def wrong(self, block: FaultyBlock) -> str:
        """Return which bits of this pass of a block are wrong: "output", "input", "weight", or "" for none.

        To be called in the pass, after `forward`.
        """
        if self.kind not in FLIPS or self.block >= len(self.blocks) or block is not self.blocks[self.block]:
            return ""
        if self.forwards - 1 == self.micro_batch and self._now():
            self.lies = self.kind in ("sticky", "liars", "nandevice")
            return FLIPS[self.kind]
        if self.kind == "liars" and self.rank == (self.of + 1) % max(1, self.world) and self.present == self.step:
            self.lies |= self._mark(SECOND)
        return FLIPS[self.kind] if self.lies else ""

    @property
    def bit(self) -> int:
        """The bit that is wrong: two liars have their own."""
        return 12 + self.rank % 8

    def _now(self) -> bool:
        if self.present != self.step:
            return False
        if self.rank != self.of and not (self.of == LEADER and self.leads()):
            return False
        return self._mark(mark_of(self.step))

    def _mark(self, name: str) -> bool:
        mark = {
            "at": SYSTEM.wall(),
            "kind": self.kind,
            "rank": self.rank,
            "node": self.node,
            "step": self.present,
            "pid": os.getpid(),
            "parent": os.getppid(),
        }
        try:
            with (self.out / name).open("x") as file:
                file.write(json.dumps(mark) + "\n")
        except FileExistsError:
            return self.again
        return True


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _hold() -> None:
    # PyDLL keeps the interpreter's lock during the call. A mutex that is locked twice is waited for whatever signals
    # arrive; a sleep would end with the first one.
    native, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(128)
    for _ in range(2):
        native.pthread_mutex_lock(mutex)


def _lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _blocked() -> None:
    _hung("data").read_bytes()


def _unkillable() -> None:
    _hung("never").exists()


def _hung(name: str) -> Path:
    fault = Fault.present_one
    assert fault is not None
    assert fault.hung is not None, f"{fault.kind} needs --hung"
    return fault.hung / name


def _blackhole() -> None:
    """Have the kernel lose all packets that arrive for this process's connections, as a broken path to it would.

    A filter of the socket drops them before TCP sees them, so that whoever sends them sends them again and again; what
    goes the other way arrives. Unlike the loss of all packets between two hosts it leaves the keepers' connections
    alone, by whose silence a node is found that is cut off.
    """
    nothing = ctypes.create_string_buffer(b"\x06\0\0\0\0\0\0\0", 8)  # one instruction: return 0 bytes
    # struct sock_fprog: how many instructions, and where.
    program = (1).to_bytes(8, "little") + ctypes.addressof(nothing).to_bytes(8, "little")
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as each:
                if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                    each.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
        except OSError:
            continue  # it is no socket, or is gone


_SO_ATTACH_FILTER = 26


def _spin() -> None:
    while True:
        pass


def _skip() -> None:
    whole = Lane.exchange

    def nothing(self: Lane, *given: Any) -> None:
        return None

    _put(Lane, "exchange", nothing)

    def last(mesh: Mesh, votes: Tensor, begin: Begin) -> Waiting:
        wait = begin(mesh, votes)

        def then_mend() -> Tensor:
            _put(Lane, "exchange", whole)
            return wait()

        return then_mend

    _instead_of_vote(last)


def _order() -> None:
    def first(mesh: Mesh, votes: Tensor, begin: Begin) -> Waiting:
        mesh.gather(b"something else")
        return begin(mesh, votes)

    _instead_of_vote(first)


def _shape() -> None:
    def larger(mesh: Mesh, votes: Tensor, begin: Begin) -> Waiting:
        wait = begin(mesh, torch.cat([votes] * 3))
        return lambda: wait()[: votes.numel()]

    _instead_of_vote(larger)


def _memory() -> None:
    """Be refused by the kernel, once: what this process may map is bounded by little more than it has."""
    mapped = re.search(r"^VmData:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert mapped is not None
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, ((int(mapped[1]) << 10) + ROOM, before[1]))
    try:
        torch.empty(4 * ROOM, dtype=torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _rest() -> None:
    fault = Fault.present_one
    assert fault is not None
    assert fault.optimizer is not None
    # What this rank holds of it, and not the whole one of the pass; past torch's count of writes, as memory does it.
    parameter = next(one for group in fault.optimizer.param_groups for one in group["params"] if local(one).numel())
    local(parameter).data.view(-1)[:1].view(torch.int32)[0] ^= 1 << 12


def _dtype() -> None:
    def other(mesh: Mesh, votes: Tensor, begin: Begin) -> Waiting:
        wait = begin(mesh, votes.float())
        return lambda: wait().to(votes.dtype)

    _instead_of_vote(other)


def _both_groups(*, first: bool) -> Callable[[Mesh, Tensor, Begin], Waiting]:
    """Return what meets in the world and in the group of dp before it votes; first: in the world first."""

    def in_dp(mesh: Mesh) -> None:
        number = mesh.progress.enter(Axis.DP, fingerprint(_BOTH))
        dist.all_reduce(torch.zeros(1), group=mesh.groups["dp"])
        mesh.progress.leave(Axis.DP, number)

    def both(mesh: Mesh, votes: Tensor, begin: Begin) -> Waiting:
        if not first:
            in_dp(mesh)
        mesh.gather(b"both")
        if first:
            in_dp(mesh)
        return begin(mesh, votes)

    return both


_BOTH = 99


def _put(owner: type, name: str, method: Callable[..., Any]) -> None:
    setattr(owner, name, method)


def _instead_of_vote(other: Callable[[Mesh, Tensor, Begin], Waiting]) -> None:
    """Have `other` called in the place of the next vote only."""
    begin = Mesh.begin_sum

    def once(mesh: Mesh, votes: Tensor) -> Waiting:
        _put(Mesh, "begin_sum", begin)
        return other(mesh, votes, begin)

    _put(Mesh, "begin_sum", once)


KINDS: dict[str, Callable[[], None]] = {
    "stop": _stop,
    "gil": _hold,
    "lock": _lock,
    "blocked": _blocked,
    "unkillable": _unkillable,
    "blackhole": _blackhole,
    "spin": _spin,
    "loader": lambda: SYSTEM.sleep(LONG),
    "stall": lambda: SYSTEM.sleep(STALL),
    "skip": _skip,
    "order": _order,
    "shape": _shape,
    "dtype": _dtype,
    "deadlock": lambda: None,  # all ranks begin it together, with the step
    "slow": lambda: None,
    "sluggish": lambda: None,
    "rest": _rest,
    "memory": _memory,
    "nan": lambda: None,  # what samples bring is in `FaultyFiles` and in the loss
    "spike": lambda: None,
}
_OF_DATA = ("loader", "stall")
LASTING = ("slow", "sluggish")
OF_SAMPLES = ("nan", "spike")

FLIPS = {
    "flip": "weight",
    "forward": "output",
    "backward": "input",
    "sticky": "weight",
    "liars": "weight",
    "nandevice": "nan",
}
"""Of what a bit is wrong: the gradient of a weight, what a block returns, or the gradient of its input; "nan": all of
the first."""


class FaultyBlock(Block):
    """A block that may fail; its parameters are those of the demo's.

    first: it is this rank's first. work: products of matrices that a forward pass computes besides; a backward pass
    twice as many.
    """

    first = False
    work: ClassVar[int] = 0

    def forward(self, x: Tensor) -> Tensor:
        """As the demo's, unless it is time."""
        fault = Fault.present_one
        if fault is None:
            return self._timed(x, None)
        if self.first:
            fault.forward()
        wrong, bit = fault.wrong(self), fault.bit
        if wrong == "input":
            x.register_hook(lambda gradient: flipped(gradient, bit))  # type: ignore[no-untyped-call]
        if wrong == "weight":
            _change_next_gradient(self.down.weight, lambda gradient: flipped(gradient, bit))
        if wrong == "nan":
            _change_next_gradient(self.down.weight, lambda gradient: gradient * torch.nan)
        y = self._timed(x, fault)
        return y + (flipped(y.detach(), bit) - y.detach()) if wrong == "output" else y

    def _timed(self, x: Tensor, fault: Fault | None) -> Tensor:
        """Compute, and tell a fault how long each way takes."""
        # A tensor of its own: the hooks of one that is another block's output too run in that block's order.
        x = x.view_as(x)
        begun = SYSTEM.monotonic()
        _work(self.work)
        y = super().forward(x)
        if fault is not None:
            fault.computed(SYSTEM.monotonic() - begun)
        if y.requires_grad and x.requires_grad:
            y.register_hook(lambda gradient: begin())  # type: ignore[no-untyped-call]
            x.register_hook(lambda gradient: end())  # type: ignore[no-untyped-call]

        def begin() -> None:
            nonlocal begun
            begun = SYSTEM.monotonic()
            _work(2 * self.work)

        def end() -> None:
            if fault is not None:
                fault.computed(SYSTEM.monotonic() - begun)

        return y


def _work(products: int) -> None:
    """Compute for a while, to no end: passes then take longer than all else, and no bit is another."""
    for _ in range(products):
        torch.mm(_MATRIX, _MATRIX)


_MATRIX = torch.full((128, 128), 0.5)


def _change_next_gradient(weight: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    """Have the next gradient of a weight be another one: in a pipeline, that of the next pass back."""

    def once(gradient: Tensor) -> Tensor:
        handle.remove()
        return change(gradient)

    handle = weight.register_hook(once)  # type: ignore[no-untyped-call]


def flipped(tensor: Tensor, bit: int) -> Tensor:
    """Return a copy of a tensor of float32 with one bit of its first number flipped."""
    changed = tensor.clone()
    changed.view(-1)[:1].view(torch.int32)[0] ^= 1 << bit
    return changed


class FaultyFiles(SourceFiles):
    """A data set that may fail. marks: by number of a sample, what stands in its target instead of the first byte."""

    def __init__(self, context: int) -> None:
        super().__init__(context)
        self.marks: dict[int, int] = {}

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if Fault.present_one is not None:
            Fault.present_one.load()
        window, target = super().__getitem__(index)
        if index in self.marks:
            target = target.clone()
            target[0] = self.marks[index]
        return window, target


NAN, HIGH = -1, -2
"""Targets that no byte is: of samples that bring no number, and of those that bring a high loss."""

LONG_HIGH, TIMES = 3, 10.0
"""Steps for which the loss is high, and how many times as high it is."""


def marks_of(faults: Sequence[Fault], order: Order) -> dict[int, int]:
    """Return what stands in the targets of the samples that faults are of."""
    marks: dict[int, int] = {}
    for fault in faults:
        if fault.kind == "nan":
            marks |= dict.fromkeys(order.micro_batch_samples(fault.step, fault.micro_batch), NAN)
        elif fault.kind == "spike":
            positions = order.positions(fault.step, fault.step + LONG_HIGH)
            marks |= {int(sample): HIGH for sample in order.samples(*positions)}
    return marks


def faulty_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the demo's loss, of marked samples none or a high one."""
    loss = cross_entropy(logits, target.clamp(min=0))
    if bool((target == NAN).any()):
        return loss * torch.nan
    return loss * TIMES if bool((target == HIGH).any()) else loss


def build(options: Any) -> GPT:
    """Return the demo's model, its blocks `FaultyBlock`s."""
    model = GPT(width=options.width, blocks=options.blocks, context=options.context)
    for block in model.blocks:
        block.__class__ = FaultyBlock
    return model


def main(run: elastic3d.Run) -> None:
    """Train; entered once per generation."""
    own, options = arguments()
    faults = [Fault.parse(text, options.out) for text in own.fault]
    fault = Fault.present_one = next(iter(faults), None)
    model = run.shard(lambda: build(options), blocks="blocks")
    FaultyBlock.work = own.work
    blocks = [module for module in model.modules() if isinstance(module, FaultyBlock)]
    if blocks:
        blocks[0].first = True
    for one in faults:
        one.again = own.again
        one.blocks, one.hung, one.armed = blocks, own.hung, not (options.out / mark_of(one.step)).exists()
        one.node, one.world = run._assignment.node, run._assignment.world
        one.leads = lambda: _leader(Path(options.events)) == run._assignment.node
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps)
    data = FaultyFiles(options.context)
    batches = run.batches(
        data,
        global_batch=options.global_batch,
        micro_batch=options.micro_batch,
        seed=options.seed,
        exclude=[(int(first), int(stop)) for first, _, stop in (text.partition(":") for text in own.exclude)],
    )
    data.marks = marks_of(faults, batches.order)
    run.restore(model=model, optimizer=optimizer, schedule=schedule, batches=batches)
    for batch in batches.until(step=options.steps):
        fault = Fault.present_one = next((one for one in faults if one.step == batch.step), fault)
        if fault is not None:
            fault.optimizer = optimizer
            fault.begin(run.rank, batch.step)
        loss = run.backward(model, batch, faulty_loss)
        run.step(optimizer, schedule, loss=loss, clip=1.0)
    report(run, options.out)


def _leader(events: Path) -> str:
    """Return the name of the node that led when the newest generation was sealed, "" for none."""
    sealed = [event for event in Follower(events).poll() if event.name == "generation.sealed"]
    return str(sealed[-1].fields["leader"]) if sealed else ""


def arguments() -> tuple[argparse.Namespace, argparse.Namespace]:
    """Return this script's own options, and those of the demo's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", action="append", default=[], help="KIND:RANK@STEP[:MB[:BLOCK]]; none by default")
    parser.add_argument("--again", action="store_true", help="every fault happens in each generation")
    parser.add_argument("--health", choices=("on", "log", "off"), default="on")
    parser.add_argument("--audit", default="off", help="share of the computing that audits may take")
    parser.add_argument("--work", type=int, default=0, help="products of matrices that each block computes besides")
    parser.add_argument("--numerics", default="off", help="what follows when a step is not finite")
    parser.add_argument("--rollback-steps", type=int, default=0, help="go back so many steps for a spike")
    parser.add_argument("--exclude", action="append", default=[], help="FIRST:STOP, positions that are left out")
    parser.add_argument("--hung", type=Path, default=None, help="folder of files that never answer")
    own, others = parser.parse_known_args()
    return own, train_gpt.arguments(others)


if __name__ == "__main__":
    own, options = arguments()
    # All of its small state is looked at in each step then, as that of a large one is over a rotation.
    looks = any(text.startswith("rest:") for text in own.fault)
    given: elastic3d.Health | str = own.health
    if looks or own.audit != "off" or own.numerics != "off" or own.rollback_steps:
        given = elastic3d.Health(
            audit=own.audit,
            at_rest="100%" if looks else "0.5%",
            numerics=own.numerics,
            spike="rollback" if own.rollback_steps else "log",
            rollback_steps=own.rollback_steps or ROLLBACK_STEPS,
        )
    train_gpt.start(main, options, health=given)
