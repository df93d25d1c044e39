"""Failures of collectives that the process waiting for them does not hear of.

A collective of a device runs behind the host's back. Where it fails, the host waits for the device for ever: torch
would end the process, or the collective, and then what the device was to compute is released half done and could be
taken for a state. Both are switched off (`devices.contract`); what torch's own thread has noted is asked for here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch.distributed as dist

from elastic3d import threads
from elastic3d.devices import ComputeDevice

EVERY = 0.2
"""Seconds between two looks: a look costs a lock for each group."""


class GroupErrors:
    """Looks at process groups on a thread of its own, until one has failed or `stop` was called.

    failed: called on that thread, once, with the failure as a collective would have raised it.
    """

    def __init__(
        self,
        groups: Mapping[str, dist.ProcessGroup],
        device: ComputeDevice,
        failed: Callable[[dist.DistBackendError], None],
    ) -> None:
        self._groups, self._device, self._failed = groups, device, failed
        self._stopped = threading.Event()
        threads.start(self._run, name="group-errors", edge=threads.Edge.AGAIN)

    def stop(self) -> None:
        """Look no more: the others may end now."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(EVERY):
            for name, group in self._groups.items():
                error = self._device.group_error(group)
                if error and not self._stopped.is_set():
                    self._stopped.set()
                    self._failed(dist.DistBackendError(f"a collective of group {name} failed on the device: {error}"))
                    return
