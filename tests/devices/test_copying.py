"""Snapshots of a device's state: what is copied is what the training had queued, and on the device's own terms."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
import torch

from chaos.gpu.emulated_device import POISON, EmulatedBuffer, EmulatedDevice, EmulatedStream, WrongThread
from checkpointing.format.tiles import Box, TensorSpec, digest
from elastic3d.devices import ComputeDevice, Move, device_at
from elastic3d.devices.cpu import copy_from_host
from elastic3d.snapshots.arena import Arena
from elastic3d.snapshots.table import lay_out
from elastic3d.worker.processes import copying
from elastic3d.worker.processes.copying import Copier, prepare

Tiles = list[tuple[TensorSpec, Box, torch.Tensor]]


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create()
    yield made
    made.close()


def tiles(device: str = "cpu") -> Tiles:
    """Return a tensor that is contiguous, several that are not, and a number, whose values are all different."""
    first = torch.arange(600, dtype=torch.float32, device=device).reshape(20, 30)
    made = [first, *((first + 1000 * n).reshape(30, 20).T for n in (1, 2, 3)), torch.tensor(7.0)]
    return [
        (
            TensorSpec(key=f"t{n}", dtype="float32", shape=tuple(one.shape)),
            Box(start=(0,) * one.dim(), stop=tuple(one.shape)),
            one,
        )
        for n, one in enumerate(made)
    ]


def copied(device: ComputeDevice, arena: Arena, given: Tiles) -> list[bytes]:
    """Return each tensor's bytes as they are in the arena when the copy is done."""
    copier = Copier([arena], device)
    copy = prepare(given, None, device, acquire=lambda: 0, complete=lambda buffer, digests: None)
    copier.start(copy)
    copier.finish()
    view = arena.view(copy.table.nbytes)
    return [bytes(view[entry.offset : entry.offset + entry.nbytes]) for entry in copy.table.entries]


def expected(given: Tiles) -> list[bytes]:
    return [one.cpu().contiguous().numpy().tobytes() for _, _, one in given]


@pytest.mark.parametrize("index", [0, 3])
def test_a_snapshot_waits_for_the_last_of_what_it_copies(arena: Arena, index: int) -> None:
    """Made contiguous on the device, later than the snapshot was asked for. A mark that is made before the last of them
    lets the copy take what is not there yet."""
    given = tiles()
    assert copied(EmulatedDevice(index), arena, given) == expected(given)


def test_a_mark_made_too_early_shows_as_poison(arena: Arena) -> None:
    """The emulated device is a witness: this is what the copy would take."""

    class Early(EmulatedDevice):
        def mark(self) -> object:
            return 0

    device, over = Early(0), threading.Event()
    device.note(over.wait)
    assert bytes([POISON]) * 2400 in copied(device, arena, tiles())
    over.set()


def bounced(stream: EmulatedStream, device: EmulatedDevice, given: list[torch.Tensor]) -> bytes:
    """Return what a stream makes of these tensors, one behind the other."""
    moves, offset = [], 0
    for one in given:
        moves.append(Move(tensor=one, offset=offset))
        offset += one.nbytes
    target = memoryview(bytearray(offset))
    stream.copy(moves, target, device.mark())
    return bytes(target)


def entered() -> EmulatedDevice:
    device = EmulatedDevice(0)
    device.enter_thread()
    return device


@pytest.mark.parametrize("nbytes", [64, 1000, 2400, 1 << 20])
def test_the_two_buffers_take_turns(nbytes: int) -> None:
    """All arrives whole and in place, snapshot after snapshot, and nothing waits for a single tensor: only for a
    bufferful."""
    device = entered()
    stream = EmulatedStream(device, nbytes=nbytes, late=0.002)
    for start in (0, 5000):
        given = [torch.arange(start + n, start + n + 40, dtype=torch.float32) for n in range(60)]
        before = sum(buffer.waits for buffer in stream.buffers)
        whole = b"".join(one.numpy().tobytes() for one in given)
        assert bounced(stream, device, given) == whole
        assert sum(buffer.waits for buffer in stream.buffers) - before == -(-len(whole) // nbytes)


def test_a_buffer_that_is_emptied_too_early_shows_as_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulated stream is a witness: this is what a missing wait would put into a snapshot."""
    monkeypatch.setattr(EmulatedBuffer, "wait", lambda self: None)
    device = entered()
    stream, over = EmulatedStream(device, nbytes=2400), threading.Event()
    stream.queue(over.wait)
    assert bytes([POISON]) * 2400 in bounced(stream, device, [torch.zeros(600), torch.zeros(600)])
    over.set()


def test_what_a_failed_copy_left_does_not_reach_the_next_snapshot() -> None:
    """Its target is gone; the pieces that were queued for it are forgotten."""
    device = entered()
    stream = EmulatedStream(device, nbytes=64)

    def fails() -> Iterator[Move]:
        yield Move(tensor=torch.ones(10), offset=40)
        raise torch.OutOfMemoryError("no memory for the next")

    with pytest.raises(torch.OutOfMemoryError):
        stream.copy(fails(), memoryview(bytearray(80)), device.mark())
    given = [torch.arange(30, dtype=torch.float32)]
    assert bounced(stream, device, given) == given[0].numpy().tobytes()


def test_a_thread_that_has_not_entered_its_device_is_refused() -> None:
    """Its work would go to device 0."""
    device = EmulatedDevice(1)
    errors: list[BaseException] = []

    def copies() -> None:
        try:
            device.copy_stream()
        except WrongThread as error:
            errors.append(error)

    thread = threading.Thread(target=copies)
    thread.start()
    thread.join()
    assert [str(error) for error in errors] == ["this thread is on device 0, and its work is for device 1"]


def test_the_hosts_state_is_copied_at_once(arena: Arena) -> None:
    given = tiles()
    assert copied(device_at("cpu", 0), arena, given) == expected(given)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA device")
@pytest.mark.parametrize("nbytes", [64, 1000, 1 << 20])
def test_a_gpus_state_goes_through_the_pinned_buffers(nbytes: int) -> None:
    """Whole and in place, whether a tensor fits a buffer or takes several rounds of both."""
    from elastic3d.devices.cuda import CudaCopyStream, CudaDevice

    device = CudaDevice(0)
    device.open()
    given = [one for _, _, one in tiles("cuda")]
    moves, offset = [], 0
    for one in given:
        moves.append(Move(tensor=device.contiguous(one), offset=offset))
        offset += one.nbytes
    target = memoryview(bytearray(offset))
    CudaCopyStream(device.torch_device, nbytes=nbytes).copy(moves, target, device.mark())
    assert bytes(target) == b"".join(one.cpu().contiguous().numpy().tobytes() for one in given)


def digests_of(device: ComputeDevice, arena: Arena, given: Tiles, *, hurried: bool = False) -> dict[str, str]:
    """Return each tile's digest as the copy gives it, by its key and box, in tiles of 640 bytes."""
    said: list[Sequence[str]] = []

    def complete(buffer: int, digests: Sequence[str]) -> None:
        said.append(digests)

    copier = Copier([arena], device)
    copy = prepare(given, None, device, tile_bytes=640, acquire=lambda: 0, complete=complete)
    if hurried:
        copy.hurried.set()
    copier.start(copy)
    copier.finish(hurry=hurried)
    (digests,) = said
    if not digests:
        return {}
    names = [f"{tile.spec.key} {tile.box}" for tile in copy.table.tiles]
    return dict(zip(names, digests, strict=True))


def from_memory(arena: Arena, given: Tiles) -> dict[str, str]:
    """Return the digests of what is in the arena, as a keeper takes them."""
    table = lay_out([(spec, box) for spec, box, _ in given], 640)
    view = arena.view(table.nbytes)
    return {
        f"{tile.spec.key} {tile.box}": digest(tile.spec, tile.box, view[tile.offset : tile.offset + tile.nbytes])
        for tile in table.tiles
    }


def test_the_copy_says_what_it_has_written(arena: Arena) -> None:
    """Each tile's digest is that of its bytes; once one of them changes, what a keeper would find is another."""
    given = tiles()
    said = digests_of(device_at("cpu", 0), arena, given)
    assert len(said) > len(given)
    assert said == from_memory(arena, given)
    arena.view(1)[0] ^= 1
    assert [name for name, one in from_memory(arena, given).items() if one != said[name]] == [next(iter(said))]


def test_a_digest_is_of_what_was_written_though_the_tensor_changes_meanwhile(arena: Arena) -> None:
    """A script may write to its parameters while they are copied."""
    tensor = torch.arange(600, dtype=torch.uint8)

    class Changing:
        seen = b""

        def update(self, data: memoryview) -> None:
            self.seen += bytes(data)
            tensor.add_(1)

    hasher = Changing()
    arena.reserve(600)
    copy_from_host([Move(tensor=tensor, offset=8, hasher=hasher)], arena.view(608))
    assert hasher.seen == bytes(arena.view(608)[8:])


def test_what_somebody_waits_for_is_copied_without_digests(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """Except for the first bytes: the keeper takes the others."""
    given = tiles()
    monkeypatch.setattr(copying, "SURE", 1300)
    said = digests_of(device_at("cpu", 0), arena, given, hurried=True)
    found = from_memory(arena, given)
    assert [one for one in said.values() if one] == list(found.values())[:2]
    assert copied(device_at("cpu", 0), arena, given) == expected(given)


def test_a_device_s_bytes_are_not_hashed_on_the_way(arena: Arena) -> None:
    """They come faster than a thread hashes them: the keeper takes their digests."""
    assert digests_of(EmulatedDevice(0), arena, tiles()) == {}
