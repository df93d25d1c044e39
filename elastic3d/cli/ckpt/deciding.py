"""`--register`: the etcd in which a store's refs are decided, for commands as for the jobs that write there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated
from urllib.parse import parse_qsl

import typer

from checkpointing import Store
from checkpointing.reading.registered import register_decides
from checkpointing.stores.address import parse
from checkpointing.stores.register import Register
from elastic3d.cli.job import JobOptions
from elastic3d.errors import UsageError
from elastic3d.etcd_refs import EtcdRegister

NO_REGISTER = "none"
_SCHEME = "etcd://"
_OPTIONS = ("user", "password_file", "ca", "cert", "key")

RegisterAt = Annotated[
    str,
    typer.Option(
        "--register",
        metavar="ETCD",
        help="etcd://HOST:PORT,... if that decides for it.",
        show_default=False,
    ),
]


@contextmanager
def registered(text: str, url: str) -> Iterator[Register | None]:
    """Yield what decides for the store at `url`, None where nobody was named; UsageError for text that names none.

    text: `etcd://HOST:PORT,...`, then `/PREFIX` if it is not `elastic3d`, then `?user=...&password_file=...&ca=...` and
    so on, as in --rdzv-conf.
    """
    if text in ("", NO_REGISTER):
        yield None
        return
    options = _options(text)
    with options.client() as client:
        client.check(f"{options.path}/stores/")
        path = parse(url).path
        # As a run names it: a path is made absolute, a URL stays as it is.
        yield EtcdRegister(client, options.path, str(path) if path is not None and "://" not in url else url)


def _options(text: str) -> JobOptions:
    place, _, query = text.removeprefix(_SCHEME).partition("?")
    endpoint, _, prefix = place.partition("/")
    try:
        given = dict(parse_qsl(query, strict_parsing=True)) if query else {}
    except ValueError:
        given = {query: ""}
    unknown = sorted(given.keys() - set(_OPTIONS))
    if not text.startswith(_SCHEME) or not endpoint or unknown:
        raise UsageError(
            f"--register {text!r}: give etcd://HOST:PORT,..., with /PREFIX as in --rdzv-conf=prefix=, and "
            f"?{'=...&'.join(_OPTIONS)}=... as far as etcd wants them; or {NO_REGISTER}"
        )
    try:
        return JobOptions(endpoint=endpoint, **given, **({"prefix": prefix} if prefix else {}))
    except UsageError as error:
        raise UsageError(f"--register {text!r}: {error}") from error


def check_alone(store: Store) -> None:
    """Raise UsageError if a register has decided the newest checkpoint: what is written beside that would be lost."""
    if register_decides(store):
        raise UsageError(
            f"store {store.url}: a register decides here, and does not see what is written beside it: give the job's "
            f"etcd, --register etcd://HOST:PORT,..., or --register {NO_REGISTER} for a copy that no job writes to"
        )
