"""P1: what a generation's start costs on the device, from the fork on, in a fresh child each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# What a template has imported before it forks.
import torch.distributed.fsdp
import torch.distributed.pipelining
from torch._C._distributed_c10d import HashStore
from torch.nn import functional

from chaos.gpu.bench import MIB, Bench
from chaos.gpu.forked import ChildFailed, Talk, in_child
from elastic3d.clock import SYSTEM
from elastic3d.devices import device_at
from elastic3d.parallel.warming import warm

REPEATS = 5
CHILD_LIMIT = 40.0


def measure(bench: Bench) -> None:
    """Say the seconds of each part, from the part before it, for each child."""
    repeats = 1 if bench.small else REPEATS
    for number in range(repeats):
        for bound in (False, True):
            _say(bench, "start", number, _start, bench.kind, bound, bench.small, SYSTEM.monotonic())
        _say(bench, "standby", number, _standby, bench.kind, bench.small, SYSTEM.monotonic())
    for number in range(0 if bench.small else 3):
        _say(bench, "compile", number, _compile, bench.kind, SYSTEM.monotonic())


def _say(bench: Bench, what: str, number: int, function: Callable[..., Any], *given: Any) -> None:
    if bench.left() < 3.0:
        bench.say("skipped", f"{what} {number}: no time left")
        return
    with bench.attempting(what, repeat=number):
        try:
            parts = in_child(function, *given, limit=min(CHILD_LIMIT, bench.left() - 1))
        except ChildFailed as error:
            bench.failed(what, str(error), repeat=number)
            return
        for part in parts:
            bench.say(**part, repeat=number)


class _Parts:
    """The parts of one child's start: seconds since the one before, and the device's memory in use."""

    def __init__(self, kind: str, begun: float, **detail: Any) -> None:
        self.said: list[dict[str, Any]] = []
        self._kind, self._last, self._detail = kind, begun, detail

    def add(self, part: str) -> None:
        """End a part here."""
        used = None
        if self._kind == "cuda":
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info(0)
            used = round((total - free) / MIB)
        now = SYSTEM.monotonic()
        seconds = float(f"{now - self._last:.6g}")
        self.said.append(
            {"figure": "start", "value": seconds, "unit": "s", "part": part, "device_mib": used, **self._detail}
        )
        self._last = SYSTEM.monotonic()

    def fail(self, part: str, error: Exception) -> None:
        """Note that a part failed."""
        said = f"{type(error).__name__}: {error}"[:300]
        self.said.append({"figure": "start", "value": None, "part": part, "failed": said, **self._detail})
        self._last = SYSTEM.monotonic()


def _start(talk: Talk, kind: str, bound: bool, small: bool, begun: float) -> list[dict[str, Any]]:
    """Go through a start. bound: give the process group its device, so that NCCL's communicator is made at once."""
    parts = _Parts(kind, begun, device_id=bound)
    parts.add("fork")
    device = device_at(kind, 0)
    device.open()
    parts.add("context")
    where = device.torch_device
    _compute(parts, where, kind, small)
    try:
        own: dict[str, Any] = {"device_id": where} if bound and kind == "cuda" else {}
        dist.init_process_group(device.backend, store=HashStore(), rank=0, world_size=1, **own)
        parts.add("process group of one")
        dist.all_reduce(torch.ones(1 << 20, device=where))
        parts.add("first collective")
        dist.all_reduce(torch.ones(1 << 20, device=where))
        parts.add("second collective")
    except (RuntimeError, ValueError) as error:
        parts.fail("process group of one", error)
    _optimize(parts, where)
    return parts.said


def _standby(talk: Talk, kind: str, small: bool, begun: float) -> list[dict[str, Any]]:
    """Warm the device as a standby does; what is called first by a trainer is then called for the second time."""
    parts = _Parts(kind, begun, standby=True)
    parts.add("fork")
    device = device_at(kind, 0)
    device.open()
    parts.add("context")
    warm(device)
    parts.add("warm")
    _compute(parts, device.torch_device, kind, small)
    _optimize(parts, device.torch_device)
    return parts.said


def _compute(parts: _Parts, where: torch.device, kind: str, small: bool) -> None:
    size = 256 if small else 4096
    number = torch.bfloat16 if kind == "cuda" else torch.float32
    matrix = torch.ones(size, size, device=where, dtype=number)
    (matrix @ matrix).sum().item()
    parts.add("first product")
    q = torch.ones(2, 4, 128 if small else 1024, 64, device=where, dtype=number, requires_grad=True)
    torch.autograd.backward(functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum())
    parts.add("first attention, back too")


def _optimize(parts: _Parts, where: torch.device) -> None:
    try:
        parameter = torch.nn.Parameter(torch.ones(1 << 16, device=where))
        parameter.grad = torch.ones_like(parameter)
        torch.optim.AdamW([parameter], foreach=True).step()
        parts.add("first optimizer step")
    except RuntimeError as error:
        parts.fail("first optimizer step", error)


def _compile(talk: Talk, kind: str, begun: float) -> list[dict[str, Any]]:
    """Compile one small function; the second child finds the first one's files."""
    parts = _Parts(kind, begun)
    device = device_at(kind, 0)
    device.open()
    parts.add("context, before compiling")
    where = torch.ones(1024, device=device.torch_device)
    try:
        compiled = torch.compile(lambda x: functional.gelu(x * 2 + 1).sum())
        compiled(where).item()
        parts.add("compile")
    except Exception as error:  # noqa: BLE001 - the compiler raises what its many parts raise
        parts.fail("compile", error)
    return parts.said
