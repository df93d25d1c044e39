"""A restored state on its way to a device: through two buffers in turns, whole and in place."""

from __future__ import annotations

import threading

import pytest
import torch

from chaos.gpu.emulated_device import EmulatedBuffer, EmulatedDevice, EmulatedStream
from checkpointing.format.tiles import TensorSpec
from elastic3d.devices import ComputeDevice, DeviceLoad, device_at
from elastic3d.devices.ring import load
from elastic3d.parallel.restore_buffers import RestoreBuffers
from elastic3d.parallel.state import TensorInMemory


def entered(device: ComputeDevice) -> ComputeDevice:
    device.enter_thread()
    return device


def loads(count: int) -> list[DeviceLoad]:
    """Return so many tensors of 160 bytes, whose values are all different."""
    values = [torch.arange(start, start + 40, dtype=torch.float32) for start in range(0, 40 * count, 40)]
    return [DeviceLoad(source=one, target=torch.zeros(40)) for one in values]


@pytest.mark.parametrize("nbytes", [64, 1000, 2400, 4800, 1 << 20])
def test_the_two_buffers_take_turns(nbytes: int) -> None:
    """Nothing waits for a single tensor: a buffer is waited for before it is filled again, and both at the end."""
    stream = EmulatedStream(entered(EmulatedDevice(0)), nbytes=nbytes, late=0.002)  # type: ignore[arg-type]
    given = loads(60)
    load(given, *stream.buffers)
    assert all(torch.equal(one.source, one.target) for one in given)
    assert sum(buffer.waits for buffer in stream.buffers) == -(-60 * 160 // nbytes)


def test_a_buffer_that_is_filled_too_early_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulated stream is a witness: this is what a missing wait would put on a device."""
    monkeypatch.setattr(EmulatedBuffer, "wait", lambda self: None)
    stream, filled = EmulatedStream(entered(EmulatedDevice(0)), nbytes=1600), threading.Event()  # type: ignore[arg-type]
    stream.queue(filled.wait)
    given = loads(60)
    load(given, *stream.buffers)
    filled.set()
    stream.mark().wait()
    assert not torch.equal(given[0].source, given[0].target)


@pytest.mark.parametrize("kind", ["cpu", "emulated"])
def test_a_state_reaches_tensors_of_every_form(kind: str) -> None:
    """Contiguous or not, of another dtype than was saved, larger than both buffers, a number, or of no element."""
    device = entered(device_at(kind, 0) if kind == "cpu" else EmulatedDevice(0))
    values = {
        "plain": torch.arange(1 << 20, dtype=torch.float32).reshape(1 << 10, -1),
        "turned": torch.arange(600, dtype=torch.float32).reshape(20, 30),
        "wider": torch.arange(300, dtype=torch.bfloat16),
        "number": torch.tensor(7.0),
        "none": torch.empty(0, 3),
    }
    tensors = {name: torch.zeros_like(one) for name, one in values.items()}
    tensors["turned"] = torch.zeros(30, 20).T
    tensors["wider"] = torch.zeros(300)
    buffers = RestoreBuffers(
        [
            TensorInMemory(
                spec=TensorSpec(key=name, dtype=str(values[name].dtype).removeprefix("torch."), shape=tuple(one.shape)),
                tensor=torch.nn.Parameter(one),
            )
            for name, one in tensors.items()
        ],
        device,
    )
    for spec, box in buffers.wanted():
        memory = values[spec.key].reshape(-1).view(torch.uint8).numpy()
        buffers.destination(spec, box)[:] = memoryview(memory)
    # What a device computes with is not written before all of it is there.
    assert kind == "cpu" or not tensors["plain"].any()
    buffers.settle()
    assert all(torch.equal(tensors[name].to(one.dtype), one) for name, one in values.items())


def test_memory_that_is_not_the_hosts_is_not_read_into() -> None:
    """Whether trainers take turns on the device or share it, as several ranks do in measurements."""
    spec = TensorSpec(key="there", dtype="float32", shape=(3,))
    there = TensorInMemory(spec=spec, tensor=torch.nn.Parameter(torch.zeros(3, device="meta")))
    buffers = RestoreBuffers([there], device_at("cpu", 0))
    ((spec, box),) = buffers.wanted()
    assert buffers.destination(spec, box).nbytes == 12


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA device")
def test_a_gpus_state_comes_through_the_pinned_buffers() -> None:
    device = device_at("cuda", 0)
    device.open()
    given = [DeviceLoad(source=one.source, target=one.target.cuda()) for one in loads(60)]
    device.load(given)
    assert all(torch.equal(one.source, one.target.cpu()) for one in given)
