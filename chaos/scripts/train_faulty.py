"""Train the demo's model, and fail in chosen ways: a rank that stops, leaves the program, or computes wrongly.

    train_faulty.py --fault KIND:RANK@STEP[:MB[:BLOCK]] --fault ...

KIND, in the forward pass of micro-batch MB (0 by default) of the step after STEP steps, on rank RANK:

    stop        SIGSTOP to itself
    gil         native code that holds the interpreter's lock
    lock        a lock that nobody releases
    blocked     it reads a file whose bytes never come, in state D; with --hung
    unkillable  it looks for a file in a folder that never answers: SIGKILL does not end that; with --hung
    blackhole   nothing arrives any more on its connections, in one direction only
    spin        a loop without end
    loader      the data set does not return
    stall       the data set returns after 20 s
    nodata      the data set returns after 45 s, on every rank; RANK is the one that says that it happened
    raise       an error of the script
    raise-everywhere  the same on every rank, on each try
    raise-on-node     the same on the rank's node alone, on each try
    raise-final  an error that trying again cannot mend: `run.pause` is called wrongly
    skip        it leaves out the exchanges of the step's gradients
    order       it calls another collective before the vote
    shape       it votes with a vector of another size
    dtype       it votes with numbers of another type
    deadlock    it enters the collectives of two groups in another order than all others
    flip        one bit of a gradient, once
    forward     one bit of what a block makes of its input, once
    backward    one bit of the gradient of a block's input, once
    sticky      a bit of every such gradient, from then on
    liars       the same on this rank and on the next one, another bit each
    nandevice   every gradient of a block's weight is not a number, from then on
    vote        a bit of what it hears in the step's vote, once
    update      a bit of every number of its update, once
    updates     the same of every update that it computes, from then on
    wire        a bit of a piece of a gradient that another rank sends it, once
    fold        a bit of every sum of gradients that it adds up, once
    gather      a bit of a weight that it has gathered from another rank, once
    rest        one bit of its first parameter changes in memory
    memory      it asks for more memory than the kernel lets it have
    devicememory  a block asks for more memory than its device has, once, in the way of torch's allocator: in the
                forward pass, or, where MB is odd, in the backward pass; with --device=emulated
    nan         the samples of micro-batch MB of the step bring a loss that is not a number, whoever computes it
    spike       those of three steps from this one on bring ten times the loss, by which it shows
    slow        its blocks take FACTOR times as long, both ways, from then on: slow:RANK@STEP:FACTOR
    sluggish    its data set takes FACTOR seconds for a sample, from then on: sluggish:RANK@STEP:FACTOR

RANK may be `leader`: that of the node that leads the membership; or `newcomer`: that of a node that comes when STEP
steps or more have been made, in its first one. BLOCK is the first of the rank's blocks, 0, by
default, and only for flips. MB counts the passes of the rank within the step, those of an audit too; for what samples
bring it is the number of the micro-batch, and RANK is the one that says that it happened.

What is slow stays with the node, whatever its rank becomes. Each of the others, but for those of each try, happens
once in the life of the job, whatever generation follows (with --again, in each), and no two at one step;
`<out>/fault-STEP.json` says when, where and to whom first.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch

import elastic3d
from chaos.gpu.emulated_device import FOLDER, KIND, install
from chaos.history.follow import Follower
from chaos.scripts import mark_of, train_gpt
from chaos.scripts.injectors.blocks import FaultyBlock
from chaos.scripts.injectors.fault import Fault
from chaos.scripts.injectors.kinds import parse
from chaos.scripts.injectors.samples import FaultyFiles, faulty_loss, late_of, marks_of
from chaos.scripts.train_gpt import GPT, report
from elastic3d.devices import AUTO
from elastic3d.health.numerics import ROLLBACK_STEPS


def build(options: Any) -> GPT:
    """Return the demo's model, its blocks `FaultyBlock`s."""
    model = GPT(width=options.width, blocks=options.blocks, context=options.context)
    for block in model.blocks:
        block.__class__ = FaultyBlock
    return model


def main(run: elastic3d.Run) -> None:
    """Train; entered once per generation."""
    own, options = arguments()
    faults = [parse(text, options.out) for text in own.fault]
    fault = Fault.present_one = next(iter(faults), None)
    model = run.shard(lambda: build(options), blocks="blocks")
    FaultyBlock.work, FaultyBlock.idle = own.work, own.idle
    blocks = [module for module in model.modules() if isinstance(module, FaultyBlock)]
    if blocks:
        blocks[0].first = True
    for one in faults:
        one.again, one.run = own.again or one.injector.again, run
        one.blocks, one.hung, one.armed = blocks, own.hung, not (options.out / mark_of(one.step)).exists()
        one.node, one.rank, one.world = run._assignment.node, run._assignment.rank, run._assignment.world
        one.newcomer = run._assignment.newcomer
        one.leads = lambda: _leader(Path(options.events)) == run._assignment.node
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps)
    data = FaultyFiles(options.context)
    batches = run.batches(
        data,
        global_batch=options.global_batch,
        micro_batch=options.micro_batch,
        seed=options.seed,
        workers=options.workers,
        exclude=[(int(first), int(stop)) for first, _, stop in (text.partition(":") for text in own.exclude)],
    )
    data.marks, data.late = marks_of(faults, batches.order), late_of(faults, batches.order)
    run.restore(model=model, optimizer=optimizer, schedule=schedule, batches=batches)
    for batch in batches.until(step=options.steps):
        fault = Fault.present_one = next((one for one in faults if one.step == batch.step), fault)
        if fault is not None:
            fault.optimizer = optimizer
            fault.begin(run.rank, batch.step)
        loss = run.backward(model, batch, faulty_loss)
        run.step(optimizer, schedule, loss=loss, clip=1.0)
    report(run, options.out)


def _leader(events: Path) -> str:
    """Return the name of the node that led when the newest generation was sealed, "" for none."""
    sealed = [event for event in Follower(events).poll() if event.name == "generation.sealed"]
    return str(sealed[-1].fields["leader"]) if sealed else ""


def arguments() -> tuple[argparse.Namespace, argparse.Namespace]:
    """Return this script's own options, and those of the demo's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", action="append", default=[], help="KIND:RANK@STEP[:MB[:BLOCK]]; none by default")
    parser.add_argument("--again", action="store_true", help="every fault happens in each generation")
    parser.add_argument("--health", choices=("on", "log", "off"), default="on")
    parser.add_argument("--audit", default="off", help="share of the computing that audits may take")
    parser.add_argument("--work", type=int, default=0, help="products of matrices that each block computes besides")
    parser.add_argument("--idle", type=float, default=0.0, help="seconds that each block's forward pass sleeps besides")
    parser.add_argument("--numerics", default="off", help="what follows when a step is not finite")
    parser.add_argument("--rollback-steps", type=int, default=0, help="go back so many steps for a spike")
    parser.add_argument("--exclude", action="append", default=[], help="FIRST:STOP, positions that are left out")
    parser.add_argument("--device", choices=(AUTO, KIND), default=AUTO, help="what ranks compute on")
    parser.add_argument("--hung", type=Path, default=None, help="folder of files that never answer")
    own, others = parser.parse_known_args()
    return own, train_gpt.arguments(others)


if __name__ == "__main__":
    own, options = arguments()
    if own.device == KIND:
        # Processes account there for what they hold of the machine's devices.
        os.environ[FOLDER] = str(options.out / "devices")
        install()
    # All of its small state is looked at in each step then, as that of a large one is over a rotation.
    looks = any(text.startswith("rest:") for text in own.fault)
    given: elastic3d.Health | str = own.health
    if looks or own.audit != "off" or own.numerics != "off" or own.rollback_steps:
        given = elastic3d.Health(
            audit=own.audit,
            at_rest="100%" if looks else "0.5%",
            numerics=own.numerics,
            spike="rollback" if own.rollback_steps else "log",
            rollback_steps=own.rollback_steps or ROLLBACK_STEPS,
        )
    train_gpt.start(main, options, device=own.device, health=given)
