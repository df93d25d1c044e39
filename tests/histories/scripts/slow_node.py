"""A script whose node `node1` is found to be slow, and after some steps of another layout to be well again.

What nodes find of each other's steps takes minutes and depends on the machine; here every keeper is told it at the same
steps. Until the way back is made, steps take a while, so that there are some left to make then.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import elastic3d
from elastic3d.membership import events as m
from elastic3d.membership.driver.member import Member
from elastic3d.membership.slowness import Slowness
from elastic3d.values import Cause, Generation

STEPS, OUT = int(sys.argv[1]), Path(sys.argv[2])
STAGES = int(os.environ.get("STAGES", "0"))
ZERO = int(os.environ.get("ZERO", "3"))
LOOKED_AT = 3
SLOW_FOR = 8
LAST = 3
"""The generation that has the layout for equal nodes again."""


class Chain(nn.Module):
    """Eight blocks with dropout, so that a micro-batch has random numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1)) for _ in range(8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the head's output."""
        for block in self.blocks:
            x = block(x)
        output: torch.Tensor = self.head(x)
        return output


def is_over(generation: Generation) -> bool:
    """Return whether node1 was slow once, and the layout for equal nodes is back."""
    layout = generation.layout
    return generation.cause is Cause.BALANCE and layout is not None and not (layout.cuts or layout.shares)


def find_slow(member: Member, event: m.StepReported, seen: dict[str, int]) -> None:
    """Tell a member what it would have found by this step. seen: how many steps of each generation it was told of."""
    running = member._core.running
    if running is None:
        return
    seen[running.key] = count = seen.get(running.key, 0) + 1
    well = is_over(running) or (running.cause is Cause.BALANCE and count == SLOW_FOR)
    if count not in (LOOKED_AT, SLOW_FOR) or (count == SLOW_FOR and not well):
        return
    ids = [node.id for node in running.nodes if node.name == "node1" and not well]
    slow = {id: Slowness(rho=4.0, kind="compute", since=event.step) for id in ids}
    plain_tell(member, m.NodesSlow(key=running.key, step=event.step, slow=slow))


plain_tell, steps_seen = Member.tell, dict[str, int]()


def tell(member: Member, event: m.Event) -> None:
    """Tell a member what happened, and what was found if it was a step."""
    plain_tell(member, event)
    if isinstance(event, m.StepReported):
        find_slow(member, event, steps_seen)


def main(run: elastic3d.Run) -> None:
    model = run.shard(Chain, blocks="blocks", seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = [(torch.randn(8, generator=torch.Generator().manual_seed(i)), torch.zeros(4)) for i in range(64)]
    batches = run.batches(data, global_batch=16, micro_batch=2, seed=5)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=STEPS):
        run.step(optimizer, loss=run.backward(model, batch, nn.functional.mse_loss), clip=0.5)
        if STAGES and run.generation < LAST:
            time.sleep(0.25)
    digest = run.digest()
    if run.rank == 0:
        (OUT / "digest").write_text(digest)


if __name__ == "__main__":
    Member.tell = tell  # type: ignore[method-assign]
    elastic3d.run(
        main,
        layout=elastic3d.Layout(pp=STAGES, zero=ZERO),
        events=os.environ.get("EVENTS"),
        snapshot_every=1,
        # What is really found on this machine is another story.
        health=elastic3d.Health(slow="off"),
    )
