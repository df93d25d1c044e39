"""Warming a device leaves nothing that a training would compute other bits by."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from chaos.gpu.emulated_device import EmulatedDevice
from elastic3d.parallel.warming import warm


@pytest.fixture
def device() -> EmulatedDevice:
    device = EmulatedDevice(0, late=0.0)
    device.open()
    return device


@pytest.fixture
def odd() -> Iterator[None]:
    """What a script may set when it is imported, otherwise than it is."""
    dtype, filled = torch.get_default_dtype(), torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    with torch.no_grad():
        yield
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def test_random_numbers_go_on_as_before(device: EmulatedDevice) -> None:
    """torch's, which seed the steps, and Python's."""
    torch.manual_seed(5)
    random.seed(5)
    expected = torch.rand(4).tolist(), random.random()
    torch.manual_seed(5)
    random.seed(5)
    warm(device)
    assert (torch.rand(4).tolist(), random.random()) == expected
    assert torch.default_generator.initial_seed() == 5


def test_it_works_and_leaves_flags_whatever_a_script_has_set(device: EmulatedDevice, odd: None) -> None:
    """Kernels are those of a run all the same."""
    warm(device)
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    assert torch.get_default_dtype() is torch.float64
    assert not torch.is_grad_enabled()


def test_what_was_used_is_given_back_and_waited_for(device: EmulatedDevice) -> None:
    """The device's queue is empty, since the trainer that trains beside wants it."""
    warm(device)
    waits = device.mark()
    assert isinstance(waits, int)
    assert waits > 0
    device.await_mark(waits)
