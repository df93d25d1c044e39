"""What every stage is given: its device, its size, its time, and where its figures go."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from chaos.gpu import emulated_device, shared
from elastic3d.clock import SYSTEM
from elastic3d.devices import ComputeDevice, contract, device_at

GB = 1e9
MIB = 1 << 20


class Bench:
    """One stage as it runs. Making it touches no device: a stage that forks opens its device in the children.

    kind: "cuda", "cpu" or "emulated". etcd: path of a binary, "" for the one that is found. lines: a descriptor.
    """

    def __init__(
        self, *, stage: str, kind: str, small: bool, deadline: float, name: str, etcd: str = "", lines: int = 1
    ) -> None:
        self.stage, self.kind, self.small, self.name, self.etcd = stage, kind, small, name, etcd
        self._lines = lines
        self._end = deadline
        if kind == "emulated":
            emulated_device.install()
        shared.install()
        # As trainers have it: one thread for the tensors of the host.
        torch.set_num_threads(1)
        contract.apply(contract.settings(kind, interface=shared.LOOPBACK, tp=1))

    @property
    def cuda(self) -> bool:
        """Whether the device is a real one."""
        return self.kind == "cuda"

    def device(self, *, ranks: int = 1) -> ComputeDevice:
        """Return the device, not yet open, as one of so many processes uses it that form one world on it."""
        return device_at(self.shared_kind if ranks > 1 else self.kind, 0)

    @property
    def shared_kind(self) -> str:
        """The kind by which several ranks share the device: NCCL refuses two on one."""
        return shared.KIND if self.cuda else self.kind

    def opened(self) -> ComputeDevice:
        """Open the device in this process, as a trainer does."""
        device = self.device()
        device.open()
        return device

    def left(self) -> float:
        """Return the seconds left of the stage's limit."""
        return self._end - SYSTEM.monotonic()

    def say(self, figure: str, value: float | str | bool | None, unit: str = "", **detail: Any) -> None:
        """Give out one figure at once."""
        if isinstance(value, float):
            value = float(f"{value:.6g}")
        self._write({"figure": figure, "value": value, "unit": unit, **detail})

    def failed(self, figure: str, error: str, **detail: Any) -> None:
        """Give out that a figure could not be had."""
        self._write({"figure": figure, "error": error[:500], **detail})

    @contextlib.contextmanager
    def attempting(self, figure: str, **detail: Any) -> Iterator[None]:
        """Give out an error of what is done inside as the figure's, and go on behind it."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the edge of one measurement: the next ones do not depend on it
            traceback.print_exc()
            self.failed(figure, f"{type(error).__name__}: {error}", **detail)
            if self.cuda and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                with contextlib.suppress(RuntimeError):
                    torch.cuda.empty_cache()

    def sync(self) -> None:
        """Wait for all of this process's work on the device."""
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], *, repeats: int = 5, warm: int = 1) -> float:
        """Return the median seconds of some work, the device's part included."""
        for _ in range(warm):
            work()
        times = []
        for _ in range(repeats):
            self.sync()
            began = SYSTEM.monotonic()
            work()
            self.sync()
            times.append(SYSTEM.monotonic() - began)
        return statistics.median(times)

    def _write(self, line: dict[str, Any]) -> None:
        size = "small" if self.small else "full"
        whole = {"stage": self.stage, **line, "device": self.kind, "name": self.name, "size": size}
        os.write(self._lines, json.dumps({**whole, "at": SYSTEM.wall()}).encode() + b"\n")
