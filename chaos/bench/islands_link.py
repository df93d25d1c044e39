"""Steps a second over a slow link: synchronous training, and islands that wait for their exchanges or overlap them.

Two hosts of their own on this machine, network namespaces, each behind a cable with a rate and a delay. An S3 server is
on the other side of both: islands meet there. Synchronous training is plain torch: two ranks that reduce their
gradients with gloo in each step, and do nothing else between them. What each host sends is counted at its cable.

Needs root and iproute2.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

from chaos.bench.islands import CONTEXT, NAMES, SYNCHRONOUS, IslandTask, trained
from chaos.bench.spread import spread
from chaos.machine.impairments import Impairment
from chaos.machine.network import Network
from chaos.machine.processes import leashed
from chaos.machine.relay import relay
from chaos.scripts.train_gpt import GPT, SourceFiles, cross_entropy
from chaos.servers import s3
from elastic3d.clock import SYSTEM

LINK = Impairment(rate=4e6, late=0.02)
"""Bytes a second in either direction, and seconds by which a packet is late."""

APART = "no exchange"
PORT = 29500
"""Of a host in a namespace of its own, where nothing else listens. Both ranks know it before either is there."""

PATIENCE = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkResult:
    """Steps a second, mean of both hosts, and the bytes that a host has sent for each step."""

    rate: float
    bytes: float


@dataclass(slots=True)
class LinkFigures:
    """Results by name, one for each repeat."""

    link: Impairment
    results: dict[str, list[LinkResult]] = field(default_factory=dict)

    def table(self) -> Table:
        """Return it for people."""
        title = f"two hosts, {self.link.rate / 1e6:g} MB/s each way, {1000 * self.link.late:g} ms"
        made = Table("", "steps/s", "of no exchange", "sent for each step", "of synchronous", title=title)
        ceiling, base = self.results[APART], self.results[SYNCHRONOUS]
        for name, all_ in self.results.items():
            of_ceiling = [100 * one.rate / other.rate for one, other in zip(all_, ceiling, strict=True)]
            of_base = [100 * one.bytes / other.bytes for one, other in zip(all_, base, strict=True)]
            made.add_row(
                name,
                spread([one.rate for one in all_], "", 2),
                spread(of_ceiling, " %", 0),
                spread([one.bytes / 1e3 for one in all_], " kB", 0),
                spread(of_base, " %", 1),
            )
        return made

    def as_json(self) -> dict[str, Any]:
        """Return it for machines."""
        return {
            "link": {"bytes_per_second": self.link.rate, "seconds": self.link.late},
            "results": {name: [asdict(one) for one in all_] for name, all_ in self.results.items()},
        }


def tasks(seed: int, steps: int = 300, every: int = 100) -> list[IslandTask]:
    """Return what is compared. By default an exchange takes about as long as the steps between two."""
    overlap = every // 2 - 1
    ways: dict[str, dict[str, Any] | None] = {
        APART: None,
        SYNCHRONOUS: None,
        f"DiLoCo, H {every}": {"every": every},
        f"streaming, H {every}, 2 fragments": {"every": every, "fragments": 2},
        f"streaming, H {every}, 2 fragments, overlap {overlap}": {"every": every, "fragments": 2, "overlap": overlap},
    }
    made = [IslandTask(name=name, seed=seed, options=options, steps=steps, width=192) for name, options in ways.items()]
    return [replace(task, steps=steps // 15) if task.name == SYNCHRONOUS else task for task in made]


def measure(repeats: int, *, link: Impairment = LINK, steps: int = 300, say: Any = print) -> LinkFigures:
    """Measure all, so many times; OSError where no hosts can be made."""
    figures = LinkFigures(link=link)
    for seed in range(17, 17 + repeats):
        for task in tasks(seed, steps):
            result = over_link(task, link)
            say(f"{task.name}, {seed}: {result.rate:.2f} steps/s, {result.bytes / 1e3:.0f} kB for each")
            figures.results.setdefault(task.name, []).append(result)
    return figures


def over_link(task: IslandTask, link: Impairment) -> LinkResult:
    """Train on two hosts behind slow cables."""
    with Network() as network, s3.s3_server(host=network.address) as server:
        for name in NAMES:
            network.add(name)
            network.impair(name, link)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1",
            "AWS_ACCESS_KEY_ID": server.options["key"],
            "AWS_SECRET_ACCESS_KEY": server.options["secret"],
            "AWS_DEFAULT_REGION": "us-east-1",
            "MASTER_ADDR": network.address_of(NAMES[0]),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        program = (sys.executable, "-m", "chaos.bench.islands_link", json.dumps(asdict(task)))
        served = (server.url("between"), server.host, str(server.port))
        commands = [[*network.within(name), *program, name, *served] for name in NAMES]
        rates = _run(commands, environment)
        sent = sum(network.sent(name) for name in NAMES) / len(NAMES)
    return LinkResult(rate=sum(rates) / len(rates), bytes=sent / task.steps)


def _run(commands: Sequence[Sequence[str]], environment: dict[str, str]) -> list[float]:
    """Run all at the same time; return what each has printed last. SystemExit with what it said where one fails."""
    with tempfile.TemporaryDirectory() as folder, _started(commands, environment, Path(folder)) as processes:
        ends = SYSTEM.monotonic() + PATIENCE
        for process in processes:
            process.wait(max(0.0, ends - SYSTEM.monotonic()))
        said = [(Path(folder) / str(number)).read_text() for number in range(len(commands))]
    for process, text in zip(processes, said, strict=True):
        if process.returncode:
            raise SystemExit(f"islands over a slow link: {text}")
    return [float(text.split()[-1]) for text in said]


@contextmanager
def _started(
    commands: Sequence[Sequence[str]], environment: dict[str, str], folder: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    processes = []
    try:
        for number, command in enumerate(commands):
            with (folder / str(number)).open("wb") as file:
                processes.append(
                    subprocess.Popen(leashed(command), env=environment, stdout=file, stderr=subprocess.STDOUT)
                )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def synchronous(task: IslandTask, rank: int) -> float:
    """Train one of two ranks that reduce their gradients in each step; return the steps a second."""
    torch.manual_seed(task.seed)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=len(NAMES))
    text, model = SourceFiles(CONTEXT), GPT(width=task.width, blocks=task.blocks, context=CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    drawn = torch.Generator().manual_seed(rank)
    dist.barrier()
    begun = SYSTEM.monotonic()
    for _step in range(task.steps):
        windows = [text[int(one)] for one in torch.randint(len(text), (task.batch,), generator=drawn)]
        inputs, targets = (torch.stack(parts) for parts in zip(*windows, strict=True))
        torch.autograd.backward(cross_entropy(model(inputs), targets))
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        whole = torch.cat([one.flatten() for one in gradients])
        dist.all_reduce(whole)
        parts = torch.split(whole.div_(len(NAMES)), [one.numel() for one in gradients])
        for one, part in zip(gradients, parts, strict=True):
            one.copy_(part.view_as(one))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    rate = task.steps / (SYSTEM.monotonic() - begun)
    dist.destroy_process_group()
    return rate


def _main(given: str, name: str, store: str, host: str, port: str) -> None:
    task = IslandTask(**json.loads(given))
    if task.name == SYNCHRONOUS:
        print(synchronous(task, NAMES.index(name)))
    elif task.name == APART:
        # Alone with the batch of one island.
        print(trained(replace(task, batch=task.batch // len(NAMES)), store, name).rate)
    else:
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{relay(host, int(port))}"
        print(trained(task, store, name).rate)


if __name__ == "__main__":
    _main(*sys.argv[1:])
