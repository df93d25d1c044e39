"""`elastic3d demo`: a real job on this machine, broken on purpose, and judged."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from chaos.faults.fault import Fault
from chaos.judging.oracle import document, judge
from chaos.machine.closing import ClosingStack
from chaos.playing.setting import Etcd, Setting
from chaos.report.early import say
from chaos.report.plot import loss_plot
from chaos.report.view import summary
from chaos.report.watching import clean_end, play_watched
from chaos.schedules.scenario import parse_drain, parse_join, parse_kill, parse_stop
from chaos.schedules.schedule import check
from chaos.servers.etcd import EtcdServer
from chaos.storms.folders import begin_file, in_words
from elastic3d.errors import UsageError
from elastic3d.etcd import EtcdClient
from elastic3d.values import Layout


class RunningEtcd:
    """An etcd server that somebody else runs; it is used and left alone."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdigit():
            raise UsageError(f"--etcd {endpoint!r}: expected HOST:PORT, such as 127.0.0.1:2379")
        self.endpoint = endpoint

    def client(self) -> EtcdClient:
        """Return a client of it."""
        return EtcdClient(self.endpoint)


def demo(
    nodes: Annotated[int, typer.Option(min=1, help="Nodes to start with, each a torchrun agent.")] = 4,
    slots: Annotated[int, typer.Option(min=1, help="Trainers per node.")] = 1,
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps to train.")] = 60,
    seed: Annotated[int, typer.Option(help="Seed of the weights, the samples and the dropout.")] = 17,
    kill: Annotated[
        list[str] | None,
        typer.Option(metavar="NODE@STEP", help="Kill a node: a number, `leader` or `stage0`. May be repeated."),
    ] = None,
    drain: Annotated[
        list[str] | None,
        typer.Option(metavar="NODE@STEP", help="Tell a node to leave within 25 s. May be repeated."),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="NODE@STEP", help="Stop a node's processes, so that it falls silent. May be repeated."),
    ] = None,
    join: Annotated[
        list[str] | None, typer.Option(metavar="@STEP", help="Let a new node join. May be repeated.")
    ] = None,
    layout: Annotated[
        str | None, typer.Option(metavar="pp=2", help="Fix axes of the mesh; the others are planned.")
    ] = None,
    store: Annotated[
        str | None, typer.Option(metavar="URL", help="Where checkpoints go, a URL or a folder; default: a temp folder.")
    ] = None,
    etcd: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="An etcd to use; default: one of the demo's own.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the loss plot.")] = Path("demo-out"),
    compare: Annotated[bool, typer.Option(help="Compare with an undisturbed run of the same seed.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Train a byte-level GPT on this machine, break it, and compare the bits with an undisturbed run.

    Four torchrun agents, each one node, train on the Python standard library's own sources. The exit code is 0 only
    if every promise held.

    Examples:

        elastic3d demo --kill 1@20 --join @40

        elastic3d demo --kill leader@10 --kill stage0@30 --steps 40 --no-compare
    """
    # Without --json people read standard output; with it they read standard error, and programs the other.
    console = Console(stderr=as_json)
    try:
        setting = Setting(
            nodes=nodes,
            slots=slots,
            steps=steps,
            seed=seed,
            layout=Layout.parse(layout) if layout else None,
            store=store_url(store) if store else None,
        )
        faults: list[Fault] = [
            *map(parse_kill, kill or ()),
            *map(parse_drain, drain or ()),
            *map(parse_stop, stop or ()),
            *map(parse_join, join or ()),
        ]
        check(faults, nodes=nodes, steps=steps)
        kept = _demonstrate(setting, faults, etcd=etcd, out=out, compare=compare, as_json=as_json, console=console)
    except Exception as error:  # noqa: BLE001 - the process's edge
        raise typer.Exit(say(error)) from None
    raise typer.Exit(0 if kept else 1)


def store_url(text: str) -> str:
    """Return the URL of a store; a relative path is relative to this folder, wherever the nodes run."""
    return text if "://" in text else Path(text).absolute().as_uri()


def _demonstrate(
    setting: Setting,
    faults: Sequence[Fault],
    *,
    etcd: str | None,
    out: Path,
    compare: bool,
    as_json: bool,
    console: Console,
) -> bool:
    with clean_end(), ClosingStack() as stack:
        workdir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="elastic3d-demo-")))
        server: Etcd = RunningEtcd(etcd) if etcd else stack.enter_context(EtcdServer())
        with EtcdClient(server.endpoint) as client:
            client.check()
        plot = out / "loss.svg"
        begin_file(plot)
        look = f"elastic3d top --endpoint {server.endpoint}"
        console.print(f"To look at it from another terminal: [bold]{look}[/]", highlight=False, soft_wrap=True)
        title = ", ".join(str(fault) for fault in faults) or "nothing is done to it"
        outcome = play_watched(setting, faults, server, workdir / "job", f"The job: {title}", console, name="demo")
        quiet = None
        if compare and not outcome.failure:
            calm = Setting(
                nodes=setting.nodes, slots=setting.slots, steps=setting.steps, seed=setting.seed, layout=setting.layout
            )
            quiet = play_watched(
                calm, (), server, workdir / "quiet", "The same seed, undisturbed", console, name="demo-quiet"
            )
        # What others do to an etcd of theirs is not known here.
        verdict = judge(outcome, quiet, all_known=etcd is None)
        with in_words(plot):
            plot.write_text(loss_plot(outcome.picture, quiet.picture if quiet else None))
        console.print(summary(outcome, verdict))
        for run in filter(None, (outcome, quiet)):
            # All nodes run the same script, so mostly print the same.
            for name, log in list(run.logs.items())[:1]:
                console.print(f"\n[bold]The end of {name}'s log[/]")
                console.print(log, markup=False, highlight=False)
        console.print(f"[bold]Plot[/]     {plot}")
        if setting.store is not None:
            console.print(f"[bold]Store[/]    {outcome.store.removeprefix('file://')}", highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps(document(outcome, verdict)))
    return verdict.kept
