"""Measure a machine, part by part, announcing each."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

import torch

from elastic3d.calibration import link, machine
from elastic3d.calibration.record import BlockTimes, Calibration, MeasuredLink
from elastic3d.calibration.script_question import ask
from elastic3d.errors import UsageError
from elastic3d.planner.devices import Number

SHARES = {"products": 0.25, "memory": 0.05, "link inside": 0.25, "block": 0.25}
"""Shares of the total time; the rest goes into starting processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What to measure. script: with its arguments, () for none. seconds: about how long all of it may take.

    device: "cpu" or "cuda". slots: of the node, which share a CPU host's memory. sizes: of square products, () for the
    usual ones; messages: sizes of the link's, in bytes. limit: seconds a script may take to show its model.
    """

    device: str
    number: Number
    seconds: float
    slots: int
    threads: int = 1
    script: tuple[str, ...] = ()
    limit: float = 120.0
    sizes: tuple[int, ...] = ()
    messages: tuple[int, ...] = link.SIZES


def measure(wish: Wish, *, made: str, between: MeasuredLink | None, say: Callable[[str], None]) -> Calibration:
    """Measure what `wish` names. made: the time, for the record. say: called with what is being measured."""
    device = torch.device(wish.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA device here; give --device cpu, or look at the driver")
    torch.set_num_threads(wish.threads)
    seconds = {name: share * wish.seconds for name, share in SHARES.items()}
    say(f"products in {wish.number}")
    flops = machine.products(device, wish.number, seconds=seconds["products"], sizes=wish.sizes)
    say("memory")
    bandwidth = machine.memory_bandwidth(device, seconds=seconds["memory"])
    inside = None
    if device.type == "cpu" or torch.cuda.device_count() > 1:
        say("link between two slots")
        inside = link.inside(wish.device, seconds=seconds["link inside"], sizes=wish.messages)
    return Calibration(
        made=made,
        host=socket.gethostname(),
        torch=torch.__version__,
        device=device.type,
        name=machine.name(device),
        threads=wish.threads,
        cores=len(os.sched_getaffinity(0)) if device.type == "cpu" else 0,
        memory=machine.memory(device, wish.slots),
        number=wish.number,
        flops=flops,
        memory_bandwidth=bandwidth,
        inside=inside,
        between=between,
        block=_block(wish, seconds["block"], say),
    )


def _block(wish: Wish, seconds: float, say: Callable[[str], None]) -> BlockTimes | None:
    if not wish.script:
        return None
    say(f"a block of {wish.script[0]}")
    script, *arguments = wish.script
    limit = wish.limit + 4 * seconds
    return ask(script, arguments, limit=limit, blocks=True, device=wish.device, seconds=seconds).block
