"""A script whose trainers have room for what their blocks keep only where these are computed again.

What a trainer may have is bounded by the kernel, once it has its state: beyond that, torch's allocator is refused. Or
a control group bounds what all processes of its node may have, and the kernel kills.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from pathlib import Path

import torch
from torch import nn

import elastic3d
from chaos.machine.groups import NodeGroup

STEPS, OUT = int(sys.argv[1]), Path(sys.argv[2])
ROOM = int(os.environ.get("ROOM", "0")) << 20
"""Bytes beside what a trainer has when it got its state, 0 for as many as there are."""

GROUP = OUT / "group"
"""Names the control group of a node, whose memory is bounded in place of its trainers'; not there for none."""

TOKENS, WIDTH = 8192, 64


class Block(nn.Module):
    """Keeps ten times as much as its input."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return its output."""
        hidden = nn.functional.dropout(nn.functional.gelu(self.widen(x)), 0.1)
        output: torch.Tensor = x + self.narrow(hidden)
        return output


class Model(nn.Module):
    """Eight blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the head's output."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        output: torch.Tensor = self.head(x)
        return output


def held() -> int:
    """Return the bytes that this process has mapped for itself."""
    found = re.search(r"^VmData:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def main(run: elastic3d.Run) -> None:
    model = run.shard(Model, blocks="blocks", seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = [(torch.randn(TOKENS, 8, generator=torch.Generator().manual_seed(i)), torch.zeros(4)) for i in range(16)]
    batches = run.batches(data, global_batch=8, micro_batch=2, seed=5)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    if GROUP.exists():
        group = NodeGroup(memory=Path(GROUP.read_text()))
        if run.generation == 1 and os.getpid() in group.pids():
            assert group.limit(group.held() + ROOM)
    elif ROOM:
        resource.setrlimit(resource.RLIMIT_DATA, (held() + ROOM, resource.RLIM_INFINITY))
    for batch in batches.until(step=STEPS):
        run.step(optimizer, loss=run.backward(model, batch, lambda y, t: (y.mean(1) - t).square().mean()), clip=0.5)
    digest = run.digest()
    if run.rank == 0:
        (OUT / "digest").write_text(digest)


if __name__ == "__main__":
    elastic3d.run(main, events=os.environ.get("EVENTS"), health=elastic3d.Health(slow="off"))
