"""`elastic3d dashboard`: one page about a live job, for browsers."""

from __future__ import annotations

import functools
import os
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from checkpointing.errors import CheckpointError
from checkpointing.stores.address import parse, redacted
from elastic3d import threads
from elastic3d.cli.ckpt.place import KeyFile, StorePlace
from elastic3d.cli.job import JobOptions, asker
from elastic3d.errors import ConfigurationError, UsageError
from elastic3d.membership.inspection.jobs import read_job

EXTRA = "elastic3d dashboard needs starlette and uvicorn: pip install 'elastic3d[dashboard]'"
BACKLOG = 64
LAST_LOOK = 0.5
"""Seconds that each reader has to end."""


def dashboard(
    options: JobOptions,
    events: Annotated[
        str,
        typer.Option(metavar="FOLDER", help="Read what nodes write there (`events=`), too.", show_default=False),
    ] = "",
    store: Annotated[
        str,
        typer.Option(metavar="URL", help="List the job's checkpoints there, and compare them.", show_default=False),
    ] = "",
    key_file: KeyFile = "",
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to serve; port 0 for any that is free.")
    ] = "127.0.0.1:0",
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A name by which browsers reach it, as behind a proxy.", show_default=False),
    ] = None,
    allow_orders: Annotated[
        bool, typer.Option("--allow-orders", help="Let the page drain, quarantine and release nodes.")
    ] = False,
    open_without_token: Annotated[
        bool, typer.Option("--open-without-token", help="Show the page to whoever reaches it.")
    ] = False,
) -> None:
    """Serve one page about a live job until Ctrl-C: its mesh, nodes, curves, generations, checkpoints and findings.

    The page keeps itself up to date. Everything comes from etcd, and from the event files with --events, which have
    each step; without them the curves have the resolution of what nodes report, every 5 s or more. Any number of
    browsers cost etcd one read a second. With --store the checkpoints are listed with their lineage, and any two are
    compared; a store that is slow or away holds nothing else up. The address that is printed holds a token: whoever has
    it sees the job.

    Examples:

        elastic3d dashboard --endpoint e1:2379,e2:2379 --id gpt-1b

        elastic3d dashboard --events /data/gpt-1b/events --listen 127.0.0.1:8080

        elastic3d dashboard --id gpt-1b --store s3://bucket/gpt-1b

        elastic3d dashboard --listen 0.0.0.0:8080 --allow-host jobs.example.org --allow-orders
    """
    try:
        from elastic3d.dashboard import serving
    except ImportError as error:
        raise ConfigurationError(f"{EXTRA} ({error})") from error
    from elastic3d.dashboard.access import PageAccess, checked_name, is_loopback, new_token, parse_listen
    from elastic3d.dashboard.event_files import EventFolder
    from elastic3d.dashboard.feed import ViewFeed
    from elastic3d.dashboard.orders import OrderDesk
    from elastic3d.dashboard.reading import JobReader
    from elastic3d.dashboard.store_listing import StoreLister
    from elastic3d.dashboard.store_reading import PATIENCE, StoreReader
    from elastic3d.dashboard.view import view

    if allow_orders and open_without_token:
        raise UsageError("--allow-orders needs the token, or anybody gives orders: leave out --open-without-token")
    host, port = parse_listen(listen)
    names = {checked_name(name) for name in allow_host or ()}
    names |= {socket.gethostname().lower(), host.lower()}
    folder = Path(events) if events else None
    followed = EventFolder(folder) if folder is not None else None
    place = _place(store, key_file) if store else None
    hangs = False
    with options.connect() as (client, job), _listening(listen, host, port) as listener:
        if followed is not None:
            followed.run = job.run_id
        feed = ViewFeed()
        stored = None
        if place is not None:
            lister = StoreLister(functools.partial(place.open, patience=PATIENCE))
            stored = StoreReader(lister, redacted(place.url), watched=lambda: feed.watching > 0)
        reader = JobReader(
            lambda: read_job(client, job),
            lambda document: feed.publish(view(document, orders=allow_orders), document.read_at),
            watched=lambda: feed.watching > 0,
            events=followed,
            store=stored,
        )
        reader.look()
        access = PageAccess(token="" if open_without_token else new_token(), names=names)
        settings = serving.PageSettings(
            access=access,
            port=listener.getsockname()[1],
            give=OrderDesk(client, job, f"{asker()}, dashboard").give if allow_orders else None,
            hurry=reader.hurry,
            compare=stored.difference if stored is not None else None,
        )
        server = serving.PageServer(feed, settings)
        print(_address(host, settings.port, access.token, job.run_id), flush=True)
        if not is_loopback(host):
            print(_warning(host, without=open_without_token), file=sys.stderr, flush=True)
        readers = [threads.start(reader.run, name="elastic3d-dashboard", edge=threads.Edge.AGAIN)]
        if stored is not None:
            readers.append(threads.start(stored.run, name="elastic3d-dashboard-store", edge=threads.Edge.AGAIN))
        try:
            server.run(sockets=[listener])
        except KeyboardInterrupt:
            pass
        finally:
            reader.stop()
            if stored is not None:
                stored.stop()
            for thread in readers:
                thread.join(LAST_LOOK)
            hangs = stored is not None and readers[-1].is_alive()
    if hangs:  # in a read that cannot be taken back, and whose threads the interpreter would wait for
        sys.stdout.flush()
        os._exit(0)


def _place(url: str, key_file: str) -> StorePlace:
    """Return a store that is to be read; UsageError if its URL or its key makes no sense. The store is not asked."""
    place = StorePlace(url=url, key_file=key_file)
    try:
        parse(url)
        place.key()
    except (CheckpointError, OSError) as error:
        raise UsageError(f"--store: {' '.join(str(error).split())}") from error
    return place


def _listening(listen: str, host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error.strerror
        raise UsageError(f"--listen {listen!r}: {why}; give another host, or another port (0: any)") from error


def _address(host: str, port: int, token: str, run_id: str) -> str:
    shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    at = f"[{shown}]:{port}" if ":" in shown else f"{shown}:{port}"
    return f"{run_id}: http://{at}/" + (f"?token={token}" if token else "")


def _warning(host: str, *, without: bool) -> str:
    who = "whoever reaches this port" if without else "whoever has the token, or reads the network on its way"
    return (
        f"elastic3d: this page is served on {host}, not only to this machine, and without encryption: {who} sees the "
        "job. Safer: leave --listen out, and `ssh -L 8080:127.0.0.1:PORT` from where the browser is"
    )
