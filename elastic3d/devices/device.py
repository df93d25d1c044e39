"""What training asks of a device, whatever kind it is of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch
    import torch.distributed as dist
    from torch import nn

    from elastic3d.devices.reading import Reading
    from elastic3d.values import DeviceFacts


PINNED = 64 << 20
"""Bytes of each of the two pinned buffers through which a trainer's snapshots leave a device."""


class Hasher(Protocol):
    """What a digest is computed with."""

    def update(self, data: memoryview, /) -> object:
        """Take the bytes that come next."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Contiguous bytes of one tensor that are to be copied to an offset of a target."""

    tensor: torch.Tensor
    """What is copied: on the device or on the host."""
    offset: int
    """Where its first byte goes, in bytes from the target's start."""
    start: int = 0
    """The first of the tensor's bytes to be copied."""
    nbytes: int = -1
    """How many of them; -1 for all that follow."""
    hasher: Hasher | None = None
    """Takes the bytes that are written, before anybody else can write to them; only of a stream that `hashes`."""

    @property
    def length(self) -> int:
        """Bytes to be copied."""
        return self.tensor.nbytes - self.start if self.nbytes < 0 else self.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLoad:
    """One tensor in the host's memory whose values are to be a device's. Both are contiguous and of one dtype."""

    source: torch.Tensor
    """On the host, pageable."""
    target: torch.Tensor
    """On the device, of as many elements."""


class CopyStream(Protocol):
    """Copies to the host that run beside training. Made and used on one thread, which has entered the device."""

    hashes: bool
    """Whether moves may be parts of tensors, and have a hasher: the moves are then taken one by one, as they come."""

    def copy(self, moves: Iterable[Move], target: memoryview, after: object) -> None:
        """Copy each tensor's bytes into `target` and return when all are there.

        after: the `mark` at which the tensors had the values that are to be copied.
        """
        ...


Mark = Any
"""A point in a device's work, in whatever form its libraries give it."""


class Stopwatch(Protocol):
    """Notes at what time a device gets to points of its work, and says so once it has; no call waits for the device."""

    def mark(self) -> Mark:
        """Queue a note of the time behind the work that is queued so far. For any thread."""
        ...

    def reached(self, mark: Mark) -> bool:
        """Return whether the device has got there, and to all marks before."""
        ...

    def nanoseconds(self, first: Mark, second: Mark) -> int:
        """Return the time between two marks that were reached."""
        ...

    def forget(self, marks: Iterable[Mark]) -> None:
        """Note that nobody asks for these any more."""
        ...


Fold = Callable[["torch.Tensor"], "torch.Tensor"]
"""Returns the sums of the rows of a matrix, which it overwrites."""


class ComputeDevice(Protocol):
    """One device as one trainer uses it. Making it costs nothing and touches nothing; `open` does."""

    @property
    def kind(self) -> str:
        """What `elastic3d.run(device=...)` calls it."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """Where its tensors are."""
        ...

    @property
    def backend(self) -> str:
        """The backend of collectives between devices of this kind."""
        ...

    @property
    def exclusive(self) -> bool:
        """Whether it has memory of its own, which two trainers of a slot would run out of: one holds it at a time."""
        ...

    @property
    def standby_bytes(self) -> int:
        """Bytes of its memory that a standby takes beside the trainer: its context, its libraries and their kernels."""
        ...

    def installed(self) -> int:
        """Return how many devices of this kind this process sees."""
        ...

    def described(self) -> str:
        """Return its model and its memory, as devices of one node have to be alike in."""
        ...

    def open(self) -> None:
        """Take the device into use, on the main thread and once; ConfigurationError where it is not there."""
        ...

    def enter_thread(self) -> None:
        """Make this the calling thread's device. A thread's device is 0 otherwise, whichever the main thread uses."""
        ...

    def place(self, module: nn.Module) -> None:
        """Move a module's own parameters and buffers, not those of modules in it, to the device.

        torch.OutOfMemoryError where they do not fit.
        """
        ...

    def free(self) -> int:
        """Return the bytes of its memory that nobody holds. The device is open."""
        ...

    def room(self) -> int:
        """Return the bytes of its memory that this process may come to hold: free ones, and those that it keeps unused.

        Of a host, not more than its control group allows in all.
        """
        ...

    def release(self) -> None:
        """Wait for its work, and give back what this process keeps of its memory; nothing is said of its use before."""
        ...

    def memory_use(self) -> str:
        """Return in words who holds its memory, "" where that is not known. Called when it has run out."""
        ...

    def seed(self, seed: int) -> None:
        """Seed the generators that modules draw from on this device: its own, and torch's default one."""
        ...

    def random_state(self) -> bytes:
        """Return the state of those generators; no work of the device is waited for."""
        ...

    def keyed(self, seed: int) -> AbstractContextManager[None]:
        """Return what seeds those generators, and gives them back as they were."""
        ...

    def contiguous(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or a contiguous copy of one that is not, made in the order of the device's work."""
        ...

    def add_rows(self, total: torch.Tensor, rows: torch.Tensor, begins: bool) -> None:
        """Add the rows of a matrix onto a vector one after the other, each sum rounded to the vector's dtype.

        begins: the vector has no value yet; it begins with the first row. The matrix has a row, and a dtype of which
        each number is one of the vector's dtype.
        """
        ...

    def square_rows(self, matrices: Sequence[torch.Tensor], fold: Fold) -> torch.Tensor | None:
        """Return the sums of squares of the rows of matrices of one width and dtype, all in order, in float64.

        The squares of a row are added as fold adds the numbers of a row. None where this device has no better way to
        do that than fold itself.
        """
        ...

    def begin_reading(self, tensors: Sequence[torch.Tensor]) -> Reading:
        """Begin to read numbers after the device's work so far: all by one copy, which is waited for once.

        They are of dtypes that float64 holds, on the device or on the host. Until then they are not to be written to.
        """
        ...

    def mark(self) -> object:
        """Return the point that the calling thread's work on the device has been queued up to; None for now."""
        ...

    def stopwatch(self) -> Stopwatch | None:
        """Return what measures the work that the calling thread queues, on whichever thread it is queued besides.

        None where a call's work is done when it returns.
        """
        ...

    def copy_stream(self) -> CopyStream:
        """Return a stream of copies for the calling thread, which keeps it for as long as it copies."""
        ...

    def load(self, loads: Iterable[DeviceLoad]) -> None:
        """Copy from the host's memory, in the order of the calling thread's work; return when all is there."""
        ...

    def connect(self, group: dist.ProcessGroup) -> None:
        """Make the communicator of a group, with all of its ranks, now rather than in its first collective."""
        ...

    def group_error(self, group: dist.ProcessGroup) -> str:
        """Return how a collective of a group failed behind the host's back, "" if none did. For any thread."""
        ...

    def facts(self, slots: int) -> DeviceFacts:
        """Return what this device is. slots: trainers of the node, which share a host's memory.

        May open the device: for a process that is about to end.
        """
        ...
