"""Worlds of plain ranks over gloo, each running one function, as a user's training script would."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = 120
PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.pipelining", "tests.checkpointing.interchange.mains"]


def run_ranks(main: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """Call `main(*args)` on every rank of a world; return what each returned, or raise what one raised."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends = [context.Pipe(duplex=False) for _ in range(world)]
    where = (store.port, uuid.uuid4().hex)
    ranks = [
        context.Process(target=_rank, args=(main, args, rank, world, where, ends[rank][1]), daemon=True)
        for rank in range(world)
    ]
    for rank, (_, sender) in zip(ranks, ends, strict=True):
        rank.start()
        sender.close()
    try:
        results = [_receive(receiver) for receiver, _ in ends]
    finally:
        for rank in ranks:
            rank.join(timeout=5)
            rank.kill()
            rank.join()
        del store
    for error, _ in results:
        assert not error, error
    return [result for _, result in results]


def _receive(receiver: Any) -> tuple[str, Any]:
    try:
        answer: tuple[str, Any] = pickle.loads(receiver.recv_bytes()) if receiver.poll(TIMEOUT) else ("timed out", None)
    except EOFError:
        return "died", None
    return answer


def _rank(main: Any, args: Any, rank: int, world: int, where: tuple[int, str], sender: Any) -> None:
    try:
        torch.set_num_threads(1)
        store = dist.PrefixStore(where[1], dist.TCPStore("127.0.0.1", where[0], is_master=False))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT))
        sender.send_bytes(pickle.dumps(("", main(*args))))
        dist.barrier()
    except Exception as error:  # noqa: BLE001  # the edge of the process: whatever happened is told to the test
        sender.send_bytes(pickle.dumps(("".join(traceback.format_exception(error)), None)))
    sender.close()
    os._exit(0)
