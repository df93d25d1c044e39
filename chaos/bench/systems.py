"""What can form a world, each as its own launcher uses it: elastic3d, torch's c10d and etcd-v2, torchft's lighthouse.

The peers are set as somebody who knows them would. c10d and etcd-v2: the shortest last call, which a world of exactly
so many agents does not wait for anyway; a keep-alive each 30 s instead of 5, because those of waiting agents get in the
joining ones' way, all writing one state; c10d's store is hosted by the first agent, said outright rather than guessed.
Lighthouse: its tick at 10 ms instead of 100, and a heartbeat timeout beyond the measurement, since its clients, without
torchft's manager around them, send none. It keeps the world in memory and gives no store to meet in.

Objects of this module are made before the agents are forked, and open connections only in the process that uses them.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import re
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, Protocol

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from elastic3d.etcd import EtcdClient
from elastic3d.rendezvous import restart as _  # noqa: F401  # what its registration imports when a handler is made

RUN_ID = "bench"
JOIN_SECONDS = 600


class Store(Protocol):
    """Where the agents of a world meet."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Place:
    """An agent's place in a formed world; no store where the system gives none."""

    rank: int
    world: int
    store: Store | None


class Membership(Protocol):
    """One agent's way in."""

    def join(self) -> Place:
        """Block until the world is complete."""
        ...

    def changed(self) -> bool:
        """Ask what torchrun's agent asks ten times a second."""
        ...


class System(Protocol):
    """A way to form a world of `agents`."""

    def serve(self) -> str | None:
        """Start, in a process of its own that calls this, what the agents need; return its address. None: nothing."""
        ...

    def member(self, number: int, endpoint: str) -> Membership:
        """Return agent `number`'s way in, as far prepared as its launcher has it when it asks for a world."""
        ...

    def waiting(self, endpoint: str) -> int:
        """Return how many agents have joined, as seen from outside."""
        ...


class _Torchrun:
    """A rendezvous handler of torch's registry."""

    def __init__(self, handler: RendezvousHandler) -> None:
        self._handler = handler

    def join(self) -> Place:
        info = self._handler.next_rendezvous()
        return Place(info.rank, info.world_size, info.store)

    def changed(self) -> bool:
        return self._handler.num_nodes_waiting() > 0


@dataclass
class Elastic3d:
    """`--rdzv-backend=etcd`, which is elastic3d's, in `mode=restart`."""

    agents: int

    def serve(self) -> None:
        return None

    def member(self, number: int, endpoint: str) -> Membership:
        return _Torchrun(_handler("etcd", endpoint, self.agents, node=f"node{number}"))

    def waiting(self, endpoint: str) -> int:
        """Return the number of leases: each member has one."""
        return len(self.etcd(endpoint).leases())

    def etcd(self, endpoint: str) -> EtcdClient:
        """Return this process's client."""
        if not hasattr(self, "_client"):
            # Patient: the machine is busy with the agents.
            self._client = EtcdClient(endpoint, timeout=10.0, budget=60.0)
        return self._client


@dataclass
class Torchs:
    """`--rdzv-backend=c10d` and `etcd-v2`: one pickled state, compared and swapped by all."""

    backend: str
    agents: int

    def serve(self) -> None:
        return None

    def member(self, number: int, endpoint: str) -> Membership:
        host = {"is_host": str(number == 0)} if self.backend == "c10d" else {}
        tuned = {"last_call_timeout": "1", "keep_alive_interval": "30", "join_timeout": str(JOIN_SECONDS)}
        return _Torchrun(_handler(self.backend, endpoint, self.agents, **tuned, **host))

    def waiting(self, endpoint: str) -> int:
        self._endpoint = endpoint
        state = self._state.get_state()
        return len(pickle.loads(state[0]).participants) if state else 0

    @cached_property
    def _state(self) -> Any:
        from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend as c10d
        from torch.distributed.elastic.rendezvous import etcd_rendezvous_backend as etcd

        host = {"is_host": "False"} if self.backend == "c10d" else {}
        parameters = _parameters(self.backend, self._endpoint, self.agents, **host)
        return (c10d if self.backend == "c10d" else etcd).create_backend(parameters)[0]


@dataclass
class Lighthouse:
    """torchft's quorum server and its client."""

    agents: int

    def serve(self) -> str:
        server = _torchft().LighthouseServer(
            bind="127.0.0.1:0",
            min_replicas=self.agents,
            join_timeout_ms=JOIN_SECONDS * 1000,
            heartbeat_timeout_ms=JOIN_SECONDS * 1000,
            quorum_tick_ms=10,
        )
        self._server = server
        # It names itself by the host's name, which need not resolve.
        return "http://127.0.0.1:" + str(server.address()).rpartition(":")[2]

    def member(self, number: int, endpoint: str) -> Membership:
        return _Quorum(_torchft().LighthouseClient(endpoint, timedelta(seconds=60)), f"{number:04}")

    def waiting(self, endpoint: str) -> int:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{endpoint}/status", timeout=10) as answer:
            match = re.search(r"only have (\d+) participants", answer.read().decode())
        return int(match[1]) if match else 0


class _Quorum:
    def __init__(self, client: Any, name: str) -> None:
        self._client, self._name = client, name

    def join(self) -> Place:
        quorum = self._client.quorum(self._name, timedelta(seconds=JOIN_SECONDS))
        names = sorted(member.replica_id for member in quorum.participants)
        return Place(names.index(self._name), len(names), None)

    def changed(self) -> bool:
        return False


SYSTEMS: dict[str, Callable[[int], System]] = {
    "elastic3d": Elastic3d,
    "c10d": lambda agents: Torchs("c10d", agents),
    "etcd-v2": lambda agents: Torchs("etcd-v2", agents),
    "lighthouse": Lighthouse,
}


def _parameters(backend: str, endpoint: str, agents: int, **conf: str) -> RendezvousParameters:
    return RendezvousParameters(
        backend=backend,
        endpoint=endpoint,
        run_id=RUN_ID,
        min_nodes=agents,
        max_nodes=agents,
        local_addr="127.0.0.1",
        **conf,
    )


def _handler(backend: str, endpoint: str, agents: int, **conf: str) -> RendezvousHandler:
    return get_rendezvous_handler(_parameters(backend, endpoint, agents, **conf))


def _torchft() -> Any:
    """Return torchft's native module alone: its package imports half the world."""
    package = importlib.util.find_spec("torchft")
    assert package is not None
    assert package.submodule_search_locations is not None
    folder = package.submodule_search_locations[0]
    file = next(os.path.join(folder, name) for name in os.listdir(folder) if re.fullmatch(r"_torchft.*\.so", name))
    spec = importlib.util.spec_from_file_location("torchft._torchft", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
