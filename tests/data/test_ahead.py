"""Loading ahead changes nothing but the time."""

from __future__ import annotations

import random
import threading
import time
import traceback
from typing import Any

import numpy as np
import pytest
import torch

from chaos.machine.processes import wait_until
from elastic3d.data import Batches
from elastic3d.errors import UsageError


class Watched:
    """Numbers that record when and where each was made."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.made.append(index)
        self.threads.add(threading.current_thread().name)
        return torch.tensor(index), torch.tensor(index)


class Augmented(Watched):
    """Samples with noise from one of the global generators."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if self.kind == "seeds":
            torch.manual_seed(0)
        draws = {"torch": lambda: torch.rand(()), "numpy": lambda: np.random.rand(), "python": lambda: random.random()}
        noise = draws.get(self.kind, lambda: torch.rand(()))()
        return torch.tensor(float(index)) + noise, torch.tensor(index)


class Replacing(Watched):
    """Samples of which some have noise, and any that cannot be read is replaced by the next."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        for number in range(index, index + len(self)):
            try:
                return torch.tensor(number + (torch.rand(()).item() if number % 2 else 0.0)), torch.tensor(number)
            except Exception:  # noqa: BLE001  # as such data sets have it
                continue
        raise AssertionError


class Broken(Watched):
    """Sample 17 cannot be read; sample 18 has another shape; sample 19 is no pair."""

    def __init__(self, bad: int) -> None:
        super().__init__()
        self.bad = bad

    def __getitem__(self, index: int) -> Any:
        if index == self.bad == 17:
            raise OSError("the disk is gone")
        if index == self.bad == 18:
            return torch.zeros(3), torch.zeros(2)
        if index == self.bad == 19:
            return torch.zeros(2)
        return torch.zeros(2), torch.zeros(2)


def batches(dataset: Any, workers: int = 0) -> Batches:
    return Batches(dataset, global_batch=4, micro_batch=2, seed=5, workers=workers)


def all_of(made: Batches, until: int = 5) -> list[Any]:
    samples = []
    for batch in made.until(step=until):
        samples += [part.input.tolist() for part in batch.micro_batches]
        made.step += 1
    return samples


def test_exactly_one_step_is_loaded_ahead() -> None:
    """However long the present step takes; leaving the loop ends the thread."""
    data, before = Watched(), set(threading.enumerate())
    made = batches(data)
    steps = made.until(step=20)
    next(steps)
    assert wait_until(lambda: len(data.made) == 8, 60.0)
    time.sleep(0.1)
    assert len(data.made) == 8
    assert "elastic3d-samples" in data.threads
    steps.close()
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name == "elastic3d-samples"]


@pytest.mark.parametrize("kind", ["torch", "numpy", "python", "seeds"])
def test_a_data_set_draws_from_seeds_by_position(kind: str) -> None:
    """Its draws are the same in the trainer and in workers, and the model's generators stay as they were."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    with pytest.warns(UserWarning, match="draws from the global random numbers"):
        inline = all_of(batches(Augmented(kind)))
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert inline == all_of(batches(Augmented(kind), workers=2))
    resumed = batches(Augmented(kind), workers=1)
    resumed.go_on(3, None)
    assert all_of(resumed) == inline[6:]


@pytest.mark.filterwarnings("ignore:the data set draws")
def test_a_draw_is_no_sample_that_cannot_be_read() -> None:
    """Where the data set goes on with another sample upon any exception: the same samples as in a process."""
    assert all_of(batches(Replacing())) == all_of(batches(Replacing(), workers=1))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_data_set_is_raised_at_its_step_with_the_sample_number(workers: int) -> None:
    """Earlier steps are made; the error is the data set's own, with a note of where it happened."""
    made = batches(Broken(17), workers)
    with pytest.raises(OSError, match="the disk is gone") as raised:
        all_of(made, until=25)
    place = next(p for s in range(25) for j in range(2) for p in made.order.micro_batch_places(s, j) if p[1] == 17)
    assert made.step == place[0] // 4
    trace = "".join(traceback.format_exception(raised.value))
    assert f"sample 17 of the data set, at position {place[0]} of the run, in step {made.step}" in trace


@pytest.mark.parametrize(
    ("bad", "says"),
    [(18, r"sample 18 of the data set is \[3\], \[2\]|is \[3\], \[2\]"), (19, "sample 19 .* is Tensor")],
)
def test_a_sample_of_another_shape_is_named(bad: int, says: str) -> None:
    """The message has its number and both shapes."""
    with pytest.raises(UsageError, match=says) as raised:
        all_of(batches(Broken(bad)), until=25)
    assert f"sample {bad} of the data set" in str(raised.value)


def test_workers_must_be_a_number_of_processes() -> None:
    """A wrong number is refused before anything is forked."""
    with pytest.raises(UsageError, match="workers must be"):
        batches(Watched(), workers=-1)
