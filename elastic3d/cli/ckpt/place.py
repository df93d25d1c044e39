"""Where checkpoints are: the options that all commands of `elastic3d ckpt` share."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from checkpointing import Store, open_store
from checkpointing.errors import CheckpointError
from checkpointing.stores.address import split_name
from checkpointing.stores.register import Register
from checkpointing.stores.retrying import PATIENCE
from elastic3d import environment
from elastic3d.cli.ckpt.completing import complete_checkpoints
from elastic3d.cli.ckpt.deciding import NO_REGISTER, RegisterAt, check_alone, registered
from elastic3d.errors import Elastic3dError, UsageError

if TYPE_CHECKING:
    from checkpointing.stores.keys import Key

KEY = environment.STORE_KEY.name
NO_KEY = "none"
"""What is given for the file of a key where the environment has one, and the store is not encrypted."""

Url = Annotated[
    str, typer.Argument(metavar="URL", help="A directory, or a URL such as s3://bucket/prefix.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
KeyFile = Annotated[
    str,
    typer.Option(
        "--key-file",
        metavar="FILE",
        envvar=environment.KEY_FILE.name,
        help=f"The key of a store that is encrypted at rest; or in {KEY}.",
        show_default=False,
    ),
]
Which = Annotated[
    str,
    typer.Argument(
        metavar="[CHECKPOINT]",
        help="latest, verified, vetted, a tag, a step, or a name or its beginning.",
        autocompletion=complete_checkpoints,
    ),
]
OneOf = Annotated[
    str, typer.Option("--of", metavar="CHECKPOINT", help="Which one.", autocompletion=complete_checkpoints)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlace:
    """A store as the user named it."""

    url: str
    key_file: str = ""
    register: Register | None = None
    alone: bool = False
    """It was said that no register decides."""

    def open(self, *, write: bool = False, make: bool = False, patience: float = PATIENCE) -> Store:
        """Return the store, tested first if it is to be written; StoreUnfit says what to change.

        UsageError where it is to be written beside a register that decides what it holds.

        make: a directory that is not there is made; else it is refused, for it may be a slip of the pen. patience:
        seconds for which an operation is retried if the store does not answer.
        """
        if write and not make:
            self._may_write(open_store(self.url, write=False, key=self.key(), patience=patience))
        store = open_store(self.url, write=write, key=self.key(), register=self.register, patience=patience)
        if write and make:
            self._may_write(store)
        return store

    def _may_write(self, store: Store) -> None:
        if self.register is None and not self.alone:
            check_alone(store)

    def key(self) -> Key | None:
        """Return the key of an encrypted store, None where none is named; CheckpointError."""
        if self.key_file == NO_KEY or (not self.key_file and KEY not in os.environ):
            return None
        from checkpointing.stores.keys import Key  # imports cryptography, which only encrypted stores need

        return Key.from_file(self.key_file) if self.key_file else Key.from_env(KEY)


def about_a_store(command: Callable[..., None], *, refs: bool = True) -> Callable[..., None]:
    """Return `command(place, *, as_json, ...)` as typer takes it: URL first, `--json`, `--key-file`, `--register` last.

    refs: the store has some, which a register may decide. An error of elastic3d's is printed in one line, with its own
    exit code; so is one of the operating system's.
    """
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items()
        if name not in ("place", "as_json")
    ]
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter("context", keyword, annotation=typer.Context),
        inspect.Parameter("url", keyword, annotation=Url),
        *own,
        inspect.Parameter("as_json", keyword, default=False, annotation=Json),
        inspect.Parameter("key_file", keyword, default="", annotation=KeyFile),
        *([inspect.Parameter("register", keyword, default="", annotation=RegisterAt)] if refs else ()),
    ]

    @functools.wraps(command)
    def wrapped(*, context: typer.Context, url: str, key_file: str, register: str = "", **values: Any) -> None:
        try:
            url, named = split_name(url)
            if named:
                values |= _named(url, named, values, context)
            with registered(register, url) as decides:
                alone = register == NO_REGISTER
                command(StorePlace(url=url, key_file=key_file, register=decides, alone=alone), **values)
        except (CheckpointError, Elastic3dError) as error:
            complain(error)
            raise typer.Exit(error.exit_code) from None
        except BrokenPipeError:
            raise  # click ends quietly: the reader has read enough
        except OSError as error:
            complain(error)
            raise typer.Exit(1) from None

    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapped


def _named(url: str, name: str, values: Mapping[str, Any], context: typer.Context) -> dict[str, str]:
    """Return the argument that a checkpoint given with the URL is; UsageError if the command takes none, or has one."""
    for argument in ("checkpoint", "b", "of"):
        if argument in values:
            source = context.get_parameter_source(argument)
            if source is not None and source.name != "DEFAULT":
                raise UsageError(f"{url}@{name} and {values[argument]!r}: name the checkpoint once")
            return {argument: name}
    raise UsageError(f"{url}@{name}: this command is about all of a store; leave @{name} out")


def complain(error: Exception | str) -> None:
    """Print an error as one line on standard error."""
    print(f"elastic3d: {' '.join(str(error).split())}", file=sys.stderr)
