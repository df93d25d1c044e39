"""Predict the host memory that a node needs, from its layout: what a container's memory limit must allow.

Snapshots and replicas lie in anonymous shared memory, which counts against the limit of the container whose process
touched it first. How many there are at most is in `snapshots.holdings`; each holds a rank's parameters and optimizer
state, as in the planner's `memory`, and the ranks of the fullest stage are taken, at home and for the buddy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from elastic3d.admission.host import staging
from elastic3d.planner.loads import held, loads
from elastic3d.snapshots.holdings import HOME_BUFFERS, most_copies
from elastic3d.values import Layout, ModelProfile

AGENT = 512 << 20
"""Bytes of torchrun's process and of `elastic3d agent`. Measured on a CPU build of torch 2.13, as proportional set
sizes: 165 and 187 MiB."""
SLOT = 1 << 30
"""Bytes of a slot's keeper, templates and trainer without the model's own and the snapshots. Measured likewise, on a
model of 4 million parameters: 88, 140 and 270 MiB."""
CONTEXT = 3 << 30
"""Bytes that a trainer's driver, libraries and communicators take of the host's memory where it computes on a device of
its own. An assumption: it was not measured."""
MARGIN = 0.1
"""Share of the sum by which a limit is larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """The host memory of one node, in bytes, each at most."""

    nodes: int
    """How many hold the state."""
    snapshots: int
    """Its own slots' snapshots: every buffer of each."""
    replicas: int
    """The same of those whose buddy it is; 0 with one node."""
    restoring: int
    """State on its way to devices, and pinned buffers; 0 on CPUs."""
    training: int
    """Parameters, gradients, activations and the rest, on CPUs; 0 where they lie on devices."""
    processes: int
    """Agent, keepers, templates and trainers beside all this. Without the script's data and its loaders' workers."""
    total: int
    """The sum."""
    limit: int
    """The sum and a tenth of it, in whole GiB: a limit for the container."""

    @property
    def quantity(self) -> str:
        """The limit as Kubernetes and systemd write it, but for the latter's G: such as 412Gi."""
        return f"{self.limit >> 30}Gi"


def host_memory(
    layout: Layout, profile: ModelProfile, *, nodes: int, slots: int, device_bytes: int | None
) -> HostMemory:
    """Return what a node of `slots` needs when `nodes` train in this layout.

    device_bytes: what the fullest trainer is predicted to need where it computes on a CPU; None for devices with memory
    of their own.
    """
    shard = max(held(load, profile, layout) for load in loads(layout, profile)) / layout.shards
    state = math.ceil(shard * (profile.held_bytes + profile.optimizer_bytes)) * slots
    copies = most_copies(buddy=nodes > 1)
    on_devices = device_bytes is None
    parts = {
        "snapshots": HOME_BUFFERS * state,
        "replicas": (copies - HOME_BUFFERS) * state,
        "restoring": state + staging(slots) if on_devices else 0,
        "training": slots * (device_bytes or 0),
        "processes": AGENT + slots * (SLOT + CONTEXT * on_devices),
    }
    total = sum(parts.values())
    return HostMemory(nodes=nodes, total=total, limit=math.ceil(total * (1 + MARGIN) / (1 << 30)) << 30, **parts)
