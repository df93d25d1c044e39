"""What a command line in a manifest, a unit or a task means, read by the parsers that will read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import typer.main
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config
from torch.distributed.run import get_args_parser, parse_min_max_nnodes

from elastic3d.cli import application
from elastic3d.rendezvous.settings import Settings, from_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What `elastic3d agent` starts. conf: of --rdzv-conf, as given. script: it and its arguments."""

    least: int
    most: int
    slots: int
    conf: dict[str, str]
    script: list[str]
    settings: Settings


def started(words: Sequence[str]) -> Started:
    """Return what a command line starts; whatever its parsers raise if they refuse it."""
    assert words[0].rpartition("/")[2] == "elastic3d"
    command = typer.main.get_command(application())
    context = command.commands[words[1]].make_context("elastic3d", list(words[2:]))  # type: ignore[attr-defined]
    assert words[1] == "agent"
    parsed = get_args_parser().parse_args(context.params["arguments"])
    assert parsed.rdzv_backend == "etcd"
    least, most = parse_min_max_nnodes(parsed.nnodes)
    conf = {name: str(value) for name, value in _parse_rendezvous_config(parsed.rdzv_conf).items()}
    settings = from_parameters(
        RendezvousParameters(
            backend=parsed.rdzv_backend,
            endpoint=parsed.rdzv_endpoint,
            run_id=parsed.rdzv_id,
            min_nodes=least,
            max_nodes=most,
            local_addr=parsed.local_addr or "127.0.0.1",  # names of other machines lead nowhere here
            **conf,
        )
    )
    return Started(
        least=least,
        most=most,
        slots=int(parsed.nproc_per_node),
        conf=conf,
        script=[parsed.training_script, *parsed.training_script_args],
        settings=settings,
    )
