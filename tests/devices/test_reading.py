"""What a step reads of a device: all by one copy, and before the vote is waited for rather than after."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from chaos.gpu import emulated_device
from chaos.gpu.emulated_device import EmulatedDevice
from elastic3d.devices import device_at, selection
from elastic3d.parallel.numerics.objective import objective
from elastic3d.training import Run, run_alone
from tests.parallel.models import Model, Sentences, loss_fn


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A kind of device whose copies come late, for one test."""
    monkeypatch.setattr(selection, "_KINDS", dict(selection._KINDS))
    return emulated_device.install(late=0.05)


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts numbers of a device that are read by themselves: losses and gradients are float32, votes are not."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.float32:
            self.number += 1
        return func(*args, **(kwargs or {}))


def pairs(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return loss_fn(output, target) * target.numel(), target.numel()


@pytest.mark.parametrize("choices", [{"clip": 0.5}, {"skip_nonfinite": True}, {}], ids=str)
@pytest.mark.parametrize("loss", [loss_fn, pairs])
def test_a_step_waits_for_its_device_once(choices: dict[str, Any], loss: Any, emulated: str) -> None:
    """For losses of three micro-batches, norms and whether gradients are finite together, in all its steps."""
    waits, reads, losses = [], Reads(), []

    def main(run: Run) -> None:
        model = run.shard(lambda: Model(dropout=0.0), blocks="blocks", seed=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        batches = run.batches(Sentences(), global_batch=6, micro_batch=2, seed=11)
        run.restore(model=model, optimizer=optimizer, batches=batches)
        device = run._port.device
        for batch in batches.until(step=2):
            if isinstance(device, EmulatedDevice):
                device.waits = 0
            made = run.backward(model, batch, loss)
            with reads:
                run.step(optimizer, loss=made, **choices)
            losses.append(made.value)
            waits.append(getattr(device, "waits", 0))

    run_alone(main, threads=1, device=emulated)
    assert waits == [1, 1]
    assert reads.number == 0
    late = list(losses)
    losses.clear()
    run_alone(main, threads=1)
    assert losses == late, "what was read was there"


class Copies(TorchFunctionMode):
    """Notes tensors that are made of the host's numbers for a device: torch makes them on the host, and copies."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = (kwargs or {}).get("device")
        if func in (torch.tensor, torch.as_tensor) and device is not None and torch.device(device).type != "cpu":
            self.made.append(f"{func.__name__}{args}")
        return func(*args, **(kwargs or {}))


def test_a_number_of_tokens_is_not_copied_to_the_device() -> None:
    """A script's own number of tokens becomes the device's by a kernel; a copy would wait, in every micro-batch."""
    for device in ("meta", "cpu"):
        total = torch.full((), 3.0, device=device)
        with Copies() as copies:
            made = objective(lambda output, target, total=total: (total, 7), 1.0)(None, None)
        assert copies.made == []
        assert (made.device, made.dtype) == (total.device, torch.float64)
    assert made.tolist() == [3.0, 7.0]
    assert objective(lambda output, target: (total, torch.tensor(7)), 1.0)(None, None).tolist() == [3.0, 7.0]


def test_what_is_there_already_is_not_waited_for(emulated: str) -> None:
    """Numbers of every shape and dtype come back as they were asked for; a reading of nothing waits for nothing."""
    asked = [torch.tensor(2.5), torch.tensor([True, False]), torch.arange(3), torch.empty(0, 2)]
    for kind in ("cpu", emulated):
        device = device_at(kind, 0)
        read = device.begin_reading(asked).wait()
        assert [one.tolist() for one in read] == [[2.5], [1.0, 0.0], [0.0, 1.0, 2.0], []]
        assert all(one.dtype == torch.float64 for one in read)
        assert device.begin_reading([]).wait() == []
