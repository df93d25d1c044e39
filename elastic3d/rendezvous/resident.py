"""mode=resident: the agent's group is its own node, and its keepers are the member.

torchrun's own barriers then never wait for another node, and a change of membership does not concern the agent: it only
sees its keepers, which live as long as the node takes part.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import replace

from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from elastic3d import environment
from elastic3d.clock import SYSTEM
from elastic3d.etcd import EtcdClient
from elastic3d.membership.driver.ended import end_seen
from elastic3d.rendezvous import agent
from elastic3d.rendezvous.connect import connect
from elastic3d.rendezvous.errors import as_torchs
from elastic3d.rendezvous.settings import Settings


class ResidentHandler(RendezvousHandler):
    """A group of one: rank 0 of 1, no store shared with anybody."""

    def __init__(self, settings: Settings, backend: str) -> None:
        self._settings, self._backend, self._closed = settings, backend, False
        self._begun = agent.begun()

    def get_backend(self) -> str:
        """Return the name torchrun asked for."""
        return self._backend

    @property
    def use_agent_store(self) -> bool:
        """Return False: the trainers meet in a store of their own generation."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Check that etcd is there, tell the keepers what to join, and be a group of one; RendezvousConnectionError."""
        with as_torchs():
            client: EtcdClient = connect(self._settings)
            if self._settings.end_seen is None:
                # Not read again when torchrun starts the keepers anew: they belong to the job for which this agent was
                # started.
                seen = end_seen(client, self._settings.root, self._begun, SYSTEM)
                self._settings = replace(self._settings, end_seen=seen)
            client.close()
        os.environ[environment.RENDEZVOUS.name] = self._settings.to_environment()
        os.environ[environment.NODE_TOKEN.name] = secrets.token_hex(16)
        os.environ[environment.AGENT_PROCESS.name] = agent.identity(os.getpid())
        # A template is safe to fork only if no thread pool was ever started; trainers set their own thread count.
        os.environ[environment.THREADS.name] = "1"
        # Otherwise torch.cuda.is_available() would initialise CUDA, which does not survive a fork.
        os.environ[environment.NVML_CHECK.name] = "1"
        store: Store = HashStore()
        info = RendezvousStoreInfo.build(0, store, local_addr=self._settings.address)
        return RendezvousInfo(store, 0, 1, info)

    def is_closed(self) -> bool:
        """Return whether torchrun closed this group."""
        return self._closed

    def set_closed(self) -> None:
        """Take note that torchrun closes this group."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Return 0: the keepers handle changes themselves."""
        return 0

    def get_run_id(self) -> str:
        """Return --rdzv-id."""
        return self._settings.run_id

    def shutdown(self) -> bool:
        """Return True: there is nothing to take down."""
        return True
