"""A process that has imported torch once and forks keepers for the tests, each driven over a Unix socket.

It is the template of a template: keepers are as torchrun would start them, but forked instead of importing everything.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import sys
import tempfile
import threading
import time
from typing import Any, cast

import torch
import torch.utils.data

from chaos.gpu import emulated_device
from chaos.gpu.emulated_device import EmulatedDevice
from checkpointing.format.tiles import Box, TensorSpec
from elastic3d.devices.turn import await_memory
from elastic3d.health.options import Watching
from elastic3d.health.phases import Axis, Phase
from elastic3d.parallel.group_errors import GroupErrors
from elastic3d.port import LocalState, Port, StateRestored, StepRecord
from elastic3d.trust.frames import Frames, FrameShape
from elastic3d.values import ModelProfile
from elastic3d.worker.processes import process, template
from elastic3d.worker.processes.slot import LocalSlot, serve_role
from elastic3d.worker.processes.slot_server import SlotServer

ROWS, COLUMNS = 1024, 256

NOTHING = StateRestored(source="none", step=0, generation=0)


class Boom(Exception):
    """What a user's code may raise."""


class Numbers(torch.utils.data.Dataset[int]):
    """Every item takes a while."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> int:
        time.sleep(0.05)
        return index


def record(port: Port, step: int) -> StepRecord:
    """Record a step of a world of one: this rank's snapshots are all there are."""
    return StepRecord(
        generation=port.assignment.generation,
        step=step,
        loss=1.0 / (step + 1),
        gradient_norm=None,
        seconds=0.01,
        safe_step=port.held(),
        etcd_away_everywhere=False,
        samples=(step, step + 1),
        sample_sum=step,
    )


def idle(port: Port) -> None:
    """Prepare, start, and do nothing until asked to leave."""
    port.await_go()
    port.restored(NOTHING)
    while not port.flags().leave:
        time.sleep(0.002)
    port.leave(0)


def waiting(port: Port) -> None:
    """Make some steps, and then wait for others as in a collective, which never comes."""
    port.await_go()
    port.restored(NOTHING)
    for step in range(1, 6):
        port.progress.phase(Phase.FORWARD)
        port.progress.step(step)
        port.committed(record(port, step))
    port.progress.enter(Axis.DP, 7)
    while not port.flags().leave:
        time.sleep(0.002)
    port.leave(5)


def state_of_torch() -> dict[str, Any]:
    """Return what a process draws, computes and finds with, as far as a standby could have changed it."""
    settings = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return {
        "generator": torch.default_generator.get_state().numpy().tobytes().hex(),
        "seed": torch.default_generator.initial_seed(),
        "environment": sorted(settings.items()),
        "flags": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            str(torch.get_default_dtype()),
            torch.get_num_threads(),
            torch.distributed.is_initialized(),
        ),
        "name": open("/proc/self/comm").read(),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def on_device(port: Port) -> None:
    """Say what this process is like, and hold a device's memory while it steps."""
    # In a file by its generation, named by a variable: several trainers write beside each other.
    told = os.path.join(os.environ["NURSERY_TOLD"], str(port.assignment.generation))
    with open(told, "w") as file:
        json.dump({"pid": os.getpid(), "torch": state_of_torch()}, file)
    os.environ.update(json.loads(os.environ.get("NURSERY_SETS", "{}")))
    port.await_go()
    port.device.open()
    await_memory(port.device, port.assignment.device_free)
    port.device.place(torch.nn.Linear(1, 1))
    port.restored(NOTHING)
    step = 0
    while not port.flags().leave:
        step += 1
        port.committed(record(port, step))
        time.sleep(0.01)
    port.leave(step)


def value(step: int, key: str, row: int) -> float:
    """Return the contents of the stepping trainer's tensors after a step."""
    return float(step * 1000 + row + (0.5 if key.startswith("optimizer") else 0.0))


def tiles(tensors: dict[str, torch.Tensor]) -> list[tuple[TensorSpec, Box, torch.Tensor]]:
    """Return the tensors under global names, each whole."""
    return [
        (
            TensorSpec(key=key, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape)),
            Box(start=(0,) * tensor.dim(), stop=tuple(tensor.shape)),
            tensor,
        )
        for key, tensor in tensors.items()
    ]


def steps(port: Port) -> None:
    """Step until asked to leave, with a snapshot each step, whose bytes identify it."""
    rows = torch.arange(ROWS, dtype=torch.float32)[:, None].expand(ROWS, COLUMNS)
    tensors = {
        "model/w": torch.empty(ROWS, COLUMNS),
        "optimizer/w/exp_avg": torch.empty(ROWS, COLUMNS),
        "optimizer/w/step": torch.empty(()),
        "model/b": torch.empty(7, dtype=torch.bfloat16),
    }
    port.await_go()
    port.restored(NOTHING)
    step = 0
    while True:
        time.sleep(0.01)
        leave = port.flags().leave
        port.finish_copy()
        step += 1
        tensors["model/w"].copy_(rows + step * 1000)
        tensors["optimizer/w/exp_avg"].copy_(rows + step * 1000 + 0.5)
        tensors["optimizer/w/step"].fill_(step)
        tensors["model/b"].fill_(step % 128)
        port.committed(record(port, step))
        state = LocalState(step=step, tiles=tiles(tensors), facts={"step": step})
        port.snapshot(state, checkpoint=step == 5, wait=leave)
        if leave:
            port.leave(step)


def continuous(port: Port) -> None:
    """Step until asked to leave; a checkpoint after each step for which the keeper is ready."""
    state = {"model/w": torch.ones(1024)}
    port.await_go()
    port.restored(NOTHING)
    step = 0
    while not port.flags().leave:
        time.sleep(0.01)
        ready = port.flags().ready
        port.finish_copy()
        step += 1
        port.committed(record(port, step))
        port.snapshot(LocalState(step=step, tiles=tiles(state), facts={}), checkpoint=ready, wait=False)
    port.finish_copy()
    port.leave(step)


def big(port: Port) -> None:
    """Take 100 MB snapshots, each once the last is held; report the times of copies and replication."""
    state = {f"model/{index}": torch.ones(1 << 20) for index in range(25)}
    port.await_go()
    port.restored(NOTHING)
    for step in range(1, 12):
        begun = time.perf_counter()
        port.committed(record(port, step))
        port.snapshot(LocalState(step=step, tiles=tiles(state), facts={}), checkpoint=False, wait=False)
        port.finish_copy()
        copied = time.perf_counter()
        while port.held() < step:
            time.sleep(0.0005)
        print(f"copied {1e3 * (copied - begun):.1f} held {1e3 * (time.perf_counter() - copied):.1f}", flush=True)
    port.done(None)


def sharded(port: Port) -> None:
    """Train a model of 4 MB with the other ranks, slowly, until all are asked to leave."""
    from elastic3d.training import Run, train  # takes seconds, and no other entry needs it

    def main(run: Run) -> None:
        model = run.shard(lambda: torch.nn.Linear(1024, 1024))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        samples = [(torch.ones(1024) * n, torch.zeros(1024)) for n in range(8)]
        batches = run.batches(samples, global_batch=2, micro_batch=1)  # type: ignore[arg-type]
        run.restore(model=model, optimizer=optimizer, batches=batches)
        for batch in batches.until(step=1_000_000):
            loss = run.backward(model, batch, torch.nn.functional.mse_loss)
            time.sleep(0.02)
            run.step(optimizer, loss=loss)

    train(main, port)


def measure(port: Port) -> None:
    """Report a profile."""
    port.measured(ModelProfile(blocks=2, parameters=10, micro_batches=4, micro_batch=1, digest="d"))


def done(port: Port) -> str:
    """Return at once, leaving output in the buffer."""
    sys.stdout.write("unflushed words from rank " + os.environ["RANK"])
    print(f"\nworld {os.environ['WORLD_SIZE']} master {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}")
    print("agent store", os.environ.get("TORCHELASTIC_USE_AGENT_STORE"))
    print(f"threads {torch.get_num_threads()} interface {os.environ.get('GLOO_SOCKET_IFNAME')}")
    return "digest-of-state"


def user_error(port: Port) -> None:
    """Raise as a user's code would."""
    raise Boom("the user's own words")


def out_of_memory(port: Port) -> None:
    """Ask the host for more than it has, as part of something else."""
    try:
        torch.empty(1 << 50)
    except RuntimeError as error:
        raise Boom("the batch could not be made") from error


def peer_lost(port: Port) -> None:
    """End like a trainer that lost a peer."""
    port.peer_lost(RuntimeError("Connection closed by peer"))


def group_fails(port: Port) -> None:
    """Wait for a device for ever, one of whose collectives has failed, in the middle of a snapshot's copy."""
    device = EmulatedDevice(0)
    device.broken = "NCCL reports COMM_ERROR"
    groups: dict[str, Any] = {"dp": None}
    GroupErrors(groups, device, lambda error: port.peer_lost(error, patience=0.1))
    port.snapshot(LocalState(step=1, tiles=tiles({"model/w": torch.ones(9)}), facts={}), checkpoint=False, wait=False)
    time.sleep(600)


def system_exit(port: Port) -> None:
    """Call sys.exit as a script might."""
    sys.exit("sys.exit of the user's script")


def exits_behind_our_back(port: Port) -> None:
    """End without a message, with a code that means something else."""
    os._exit(process.ExitCode.LEFT)


def loader(port: Port) -> None:
    """Iterate a DataLoader with two workers."""
    batches = iter(torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=2))
    next(batches)
    port.await_go()
    time.sleep(600)


def escapes(port: Port) -> None:
    """Leave a grandchild behind in the trainer's group, its parent gone."""
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    port.await_go()
    time.sleep(600)


def looks(port: Port) -> None:
    """Look for the file that is named in the place of the node."""
    port.await_go()
    port.restored(NOTHING)
    os.path.exists(port.assignment.node)
    time.sleep(600)


def speaks_otherwise(port: Port) -> None:
    """Say what another version of elastic3d might, and go on."""
    port.await_go()
    port.restored(NOTHING)
    cast(Any, port)._end._end.sendall(Frames(FrameShape(most=1 << 30, order="little")).pack_json(["StepSaid", {}]))
    time.sleep(600)


def floods(port: Port) -> None:
    """Send many messages in little time, then end."""
    port.await_go()
    port.restored(NOTHING)
    for step in range(2000):
        port.committed(record(port, step))
    port.done(None)


ENTRIES: dict[str, Any] = {
    f.__name__: f
    for f in (
        idle,
        steps,
        continuous,
        big,
        measure,
        done,
        user_error,
        out_of_memory,
        peer_lost,
        system_exit,
        exits_behind_our_back,
        loader,
        escapes,
        floods,
        speaks_otherwise,
        looks,
        waiting,
        sharded,
        group_fails,
        on_device,
    )
}


def entry(port: Port) -> str | None:
    """Run the entry the keeper was made for."""
    server: str | None = ENTRIES[os.environ["NURSERY_ENTRY"]](port)
    return server


def keeper(spec: str, descriptors: tuple[int, ...]) -> None:
    """Run a keeper: a slot, exposed under the name in `spec`."""
    settings = json.loads(spec)
    os.environ["NURSERY_ENTRY"] = settings["entry"]
    os.environ.update(settings["variables"])
    os.chdir(settings["directory"])
    tempfile.tempdir = None  # looked for anew, as in an interpreter of its own
    output = os.open(settings["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    signal.signal(signal.SIGTERM, lambda *_: None)
    if settings["broken_again"]:
        os.environ["NURSERY_BROKEN"] = "1"
    if settings["threads_before"]:
        threading.Thread(target=time.sleep, args=(600,), name="user-thread", daemon=True).start()
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    health = Watching(stuck=1.0) if settings["watched"] else None
    slot = LocalSlot(index=settings["index"], host="127.0.0.1", entry=entry, events=events, health=health)
    print("keeper threads", sorted(thread.name for thread in threading.enumerate()), flush=True)
    SlotServer(slot, events, settings["name"]).serve(patience=20.0)
    slot.close()


if __name__ == "__main__":
    emulated_device.install()
    if "NURSERY_BROKEN" in os.environ:
        sys.exit("the script fails when it is run again")
    if "NURSERY_ENTRY" in os.environ:
        serve_role(entry)
    template.serve(socket.socket(fileno=int(sys.argv[1])), keeper, os.getppid())
