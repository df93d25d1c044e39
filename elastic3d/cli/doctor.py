"""`elastic3d doctor`: is this node fit for a job, before one is started?"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.status import Status as Spinner
from rich.table import Table
from rich.text import Text

from checkpointing.errors import StoreUnfit
from checkpointing.stores.address import parse
from elastic3d import environment
from elastic3d.cli.durations import spell
from elastic3d.cli.job import JobOptions
from elastic3d.cli.render import clean
from elastic3d.clock import SYSTEM
from elastic3d.doctor.etcd import EtcdPlace
from elastic3d.doctor.findings import SCHEMA, Examination, FindingStatus, Subject, warning
from elastic3d.doctor.node import Checkup, Wanted, examination
from elastic3d.doctor.peers import PeerListener, Versions, new_id, parse_peers
from elastic3d.doctor.running import CheckRun, CheckRuns
from elastic3d.errors import UsageError
from elastic3d.etcd import parse_endpoints, password_warning
from elastic3d.quantities import some_seconds
from elastic3d.values import to_json

ETCD, STORE, PEERS = "etcd", "Store", "Other nodes"
SHORTEST, LONGEST = 1.0, 3600.0
WIDE = 72
MEMBERS = 64
"""More endpoints than any etcd has members: each is asked on a thread of its own."""
_STYLES = {FindingStatus.OK: "green", FindingStatus.WARNING: "yellow", FindingStatus.FAILURE: "bold red"}


def _of(panel: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, show_default=False, **more)


def doctor(
    slots: Annotated[
        int | None,
        typer.Option("--slots", min=1, max=1024, help="Slots of this node.", show_default="one on each device, or one"),
    ] = None,
    limit: Annotated[str, typer.Option("--limit", metavar="TIME", help="How long it may take in all.")] = "90s",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")] = False,
    endpoint: Annotated[
        str,
        _of(
            ETCD,
            "--endpoint",
            metavar="HOST:PORT,...",
            envvar=environment.ENDPOINT.name,
            help="etcd, as given to --rdzv-endpoint: each one is tried.",
        ),
    ] = "",
    prefix: Annotated[str, _of(ETCD, "--prefix", help="As given to --rdzv-conf=prefix=.")] = "elastic3d",
    user: Annotated[str, _of(ETCD, "--user", help="etcd user.")] = "",
    password_file: Annotated[str, _of(ETCD, "--password-file", metavar="FILE", help="Holds the user's password.")] = "",
    ca: Annotated[str, _of(ETCD, "--ca", metavar="FILE", help="Who signed etcd's certificates.")] = "",
    cert: Annotated[str, _of(ETCD, "--cert", metavar="FILE", help="A client certificate.")] = "",
    key: Annotated[str, _of(ETCD, "--key", metavar="FILE", help="Its private key.")] = "",
    store: Annotated[
        str, _of(STORE, "--store", metavar="URL", help="A directory, or a URL such as s3://bucket/prefix.")
    ] = "",
    register: Annotated[
        str,
        _of(STORE, "--register", metavar="etcd", help="etcd decides what the store cannot, as in Checkpointing()."),
    ] = "",
    peers: Annotated[
        str, _of(PEERS, "--peers", metavar="HOST:PORT,...", help="Nodes on which a doctor listens, or anything else.")
    ] = "",
    listen: Annotated[
        int | None,
        _of(PEERS, "--listen", metavar="PORT", min=1, max=65535, help="Wait here for other nodes' --peers."),
    ] = None,
) -> None:
    """Look whether this node is fit for a job, before one is started: each line ok, a warning or a failure.

    Looks at devices, driver, torch and NCCL, memory, limits, clock and interfaces; with --endpoint at each member of
    etcd, with --store at reads, conditional writes and bandwidth, with --peers at other nodes. Everything has a time
    limit, and nothing is left behind, by Ctrl-C neither.

    With --listen alone it waits for other nodes until Ctrl-C. With --listen and --peers, as one command on all nodes,
    the nodes wait for each other. Exit codes: 0, with warnings too; 1 if something failed; 2 for a wrong call.

    Examples:

        elastic3d doctor

        elastic3d doctor --endpoint e1:2379,e2:2379,e3:2379 --store s3://bucket/gpt-1b --slots 8

        elastic3d doctor --listen 29400

        elastic3d doctor --peers node-1:29400,node-2:29400

        elastic3d doctor --store /mnt/checkpoints --json
    """
    total = some_seconds(limit, "--limit")
    if not SHORTEST <= total <= LONGEST:
        raise UsageError(f"--limit={limit!r}: give {SHORTEST:g} s or more, and at most an hour")
    if register not in ("", "etcd"):
        raise UsageError(f"--register {register!r}: only etcd can decide for a store")
    if store:
        try:
            parse(store)
        except StoreUnfit as error:
            raise UsageError(f"--store: {error}") from error
    wanted = Wanted(
        endpoint=endpoint,
        etcd=_place(endpoint, prefix, user, password_file, ca, cert, key),
        store=store,
        register=bool(register),
        slots=slots or 0,
        peers=parse_peers(peers) if peers else (),
        wait=total / 3 if listen is not None and peers else 0.0,
        id=new_id(),
    )
    listener = PeerListener(listen, Versions.here()) if listen is not None else None
    with _signals() as ended_by:
        if listener is not None and not wanted.peers:
            _listen(listener)
            return
        examination, stuck = _examined(wanted, listener, total, ended_by)
    code = int(examination.status is FindingStatus.FAILURE)
    try:
        _tell(examination, as_json)
        sys.stdout.flush()
    except BrokenPipeError:
        raise  # click ends quietly: whoever read has read enough
    except OSError as error:
        print(f"elastic3d: what was found cannot be written: {error.strerror}", file=sys.stderr)
        code = 1
    if stuck:
        # Its thread may stand in the kernel: waiting for it is what would hang.
        os._exit(code)
    raise typer.Exit(code)


def document(examination: Examination) -> dict[str, Any]:
    """Return what `--json` prints: the fields of `Examination`, with the version of this form."""
    data: dict[str, Any] = {"schema": SCHEMA, **to_json(examination)}
    return data


def picture(examination: Examination, width: int) -> RenderableType:
    """Return the display of what was found for a terminal of `width` columns."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("status", no_wrap=True)
    if width >= WIDE:
        table.add_column("subject", no_wrap=True)
    table.add_column("what", overflow="fold", ratio=1)
    for each in examination.findings:
        said = Text.assemble((clean(each.name), "bold"), "  ", clean(each.seen))
        if each.remedy:
            said.append(f"\n{clean(each.remedy)}", style="italic")
        cells: list[RenderableType] = [Text(str(each.status), style=_STYLES[each.status])]
        cells += [Text(str(each.subject), style="dim")] if width >= WIDE else []
        table.add_row(*cells, said)
    return Group(table, Text(), *([_left_out(examination.skipped)] if examination.skipped else []), _sum(examination))


def _left_out(skipped: Sequence[str]) -> Text:
    return Text(f"Not looked at: {', '.join(skipped)}.", style="dim")


def _sum(examination: Examination) -> Text:
    counts = {status: sum(each.status is status for each in examination.findings) for status in FindingStatus}
    words = [f"{counts[FindingStatus.OK]} ok"]
    for status in (FindingStatus.WARNING, FindingStatus.FAILURE):
        if counts[status]:
            words.append(f"{counts[status]} {status}{'' if counts[status] == 1 else 's'}")
    return Text(
        f"{clean(examination.host)}: {', '.join(words)}, in {spell(examination.seconds)}",
        style=_STYLES[examination.status],
    )


def _place(endpoint: str, prefix: str, user: str, password_file: str, ca: str, cert: str, key: str) -> EtcdPlace | None:
    """Return where etcd is, None where nobody said; UsageError for what can be seen to be wrong from here."""
    given = {"--user": user, "--password-file": password_file, "--ca": ca, "--cert": cert, "--key": key}
    if not endpoint:
        lonely = [name for name, value in given.items() if value]
        if lonely:
            raise UsageError(f"{', '.join(lonely)}: say where etcd is, with --endpoint")
        return None
    options = JobOptions(
        endpoint=endpoint, prefix=prefix, user=user, password_file=password_file, ca=ca, cert=cert, key=key
    )
    tls = options.tls()
    endpoints = parse_endpoints(endpoint, tls=tls is not None)
    if len(endpoints) > MEMBERS:
        raise UsageError(f"--endpoint names {len(endpoints)} members; no etcd has more than {MEMBERS}")
    return EtcdPlace(
        endpoints=endpoints,
        prefix=options.path,
        user=user,
        password=options.password(),
        tls=tls,
    )


def _examined(
    wanted: Wanted, listener: PeerListener | None, total: float, ended_by: Sequence[int]
) -> tuple[Examination, bool]:
    """Make all checks; return what they found, and whether one of them is still at it.

    ended_by: the signals, but for Ctrl-C's, that interrupted it.
    """
    begun = SYSTEM.monotonic()
    checkup = Checkup(wanted)
    runs = CheckRuns(checkup.checks(), limit=total)
    try:
        with Console(stderr=True).status("looking") as spinner:
            findings = runs.wait(lambda runs: _progress(spinner, runs, SYSTEM.monotonic() - begun))
            findings += checkup.together()
            if wanted.etcd is not None and wanted.etcd.user:
                sent = password_warning(wanted.etcd.user, wanted.etcd.endpoints)
                findings += (warning(Subject.ETCD, "password", *_halves(sent)),) if sent else ()
            if listener is not None:
                _wait_for_callers(listener, spinner, len(wanted.peers), begun + total)
    except KeyboardInterrupt:
        try:
            left = runs.stop()
        except KeyboardInterrupt:
            left = runs.made  # who insists is not kept waiting
        for what in left:
            print(f"elastic3d: {what} may be left behind; remove it by hand", file=sys.stderr)
        code = 128 + next(iter(ended_by), signal.SIGINT)
        if runs.stuck:
            sys.stderr.flush()
            os._exit(code)
        raise typer.Exit(code) from None
    finally:
        if listener is not None:
            listener.close()
    return examination(wanted, findings, seconds=SYSTEM.monotonic() - begun), runs.stuck


def _halves(text: str) -> tuple[str, str]:
    seen, _, remedy = text.partition("; ")
    return seen, remedy


def _progress(spinner: Spinner, runs: Sequence[CheckRun], spent: float) -> None:
    at = [run.doing for run in runs if not run.done.is_set() and run.doing]
    more = f" and {len(at) - 2} more" if len(at) > 2 else ""
    spinner.update(Text(clean(f"{spell(spent)}: {'; '.join(at[:2])}{more}")))


def _wait_for_callers(listener: PeerListener, spinner: Spinner, peers: int, ends: float) -> None:
    """Stay until as many other nodes have called as this one has peers, itself perhaps among them."""
    while len(listener.callers) < peers and SYSTEM.monotonic() < ends:
        left = spell(ends - SYSTEM.monotonic())
        spinner.update(f"{len(listener.callers)} of {peers} nodes have called; waiting {left} more")
        SYSTEM.sleep(0.2)


def _listen(listener: PeerListener) -> None:
    """Answer other nodes until somebody has had enough."""
    print(f"listening on port {listener.port} for elastic3d doctor --peers; Ctrl-C ends it", file=sys.stderr)
    greeted: set[str] = set()
    try:
        while True:
            for id, address in listener.callers.items():
                if id not in greeted:
                    greeted.add(id)
                    print(f"{clean(address)} called", file=sys.stderr)
            SYSTEM.sleep(0.2)
    except KeyboardInterrupt:
        return
    finally:
        listener.close()


def _tell(examination: Examination, as_json: bool) -> None:
    if as_json:
        print(json.dumps(document(examination), indent=2))
    else:
        console = Console(highlight=False)
        console.print(picture(examination, console.width))


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Let SIGTERM, and a terminal that goes away, end it as Ctrl-C does: with everything removed. Yields by which."""
    by: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        by.append(number)
        signal.default_int_handler(number, frame)

    before: dict[signal.Signals, Any] = {}
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, interrupt)
        yield by
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)
