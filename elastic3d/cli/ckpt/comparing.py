"""`ckpt diff`: which tensors changed between two checkpoints, and by how much; or what of the configuration did."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from checkpointing import Store, open_checkpoint
from checkpointing.inspection.difference import Change, Difference, difference
from checkpointing.inspection.documents import CheckpointDocuments, find
from checkpointing.inspection.values import ValueDifference, doubtful, to_read, value_differences
from elastic3d.cli.ckpt.completing import complete_checkpoints
from elastic3d.cli.ckpt.documents import ConfigDiffDocument, DiffDocument
from elastic3d.cli.ckpt.inspecting import Each, Match, fits
from elastic3d.cli.ckpt.naming import before, choose
from elastic3d.cli.ckpt.place import NO_KEY, StorePlace
from elastic3d.cli.ckpt.provenance import made_by
from elastic3d.cli.ckpt.render import provenance as configs_shown
from elastic3d.cli.ckpt.render import two as shown
from elastic3d.cli.ckpt.telling import bar, tell
from elastic3d.errors import UsageError
from elastic3d.provenance.config import changes as config_changes

_One = Annotated[
    str,
    typer.Argument(
        metavar="[A]",
        help="The earlier one. Default: the one committed before B.",
        autocompletion=complete_checkpoints,
        show_default=False,
    ),
]
_Other = Annotated[str, typer.Argument(metavar="[B]", help="The later one.", autocompletion=complete_checkpoints)]


def diff(
    place: StorePlace,
    a: _One = "",
    b: _Other = "latest",
    other: Annotated[
        str, typer.Option("--other", metavar="URL", help="The store that A is in.", show_default=False)
    ] = "",
    other_key_file: Annotated[
        str,
        typer.Option(
            "--other-key-file",
            metavar="FILE",
            help=f"The key of that store; {NO_KEY} if it is not encrypted. Default: the same.",
            show_default=False,
        ),
    ] = "",
    values: Annotated[bool, typer.Option("--values", help="Read tiles that may differ, for exact distances.")] = False,
    config: Annotated[
        bool, typer.Option("--config", help="Only what changed in the configuration of the run.")
    ] = False,
    match: Match = "",
    each: Each = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing; exit 1 if anything differs.")] = False,
    *,
    as_json: bool,
) -> None:
    """Say which tensors changed between two checkpoints, and by how much.

    Digests show which tiles changed, statistics how far the root mean square moved: only manifests are read. With
    `--values` the tiles that may differ are read from both, for the exact largest and root mean square distance. A
    tensor is `recut` if the two cut it at different places and nothing comparable differs: only values show more.
    Tensors of repeated blocks that changed alike are shown as one line, `{0..11}`, unless `--all` is given.

    Examples:

        elastic3d ckpt diff /data/run-7

        elastic3d ckpt diff s3://bucket/gpt-1b 1000 1200

        elastic3d ckpt diff s3://bucket/gpt-1b verified latest --values --match 'model/*'

        elastic3d ckpt diff s3://bucket/gpt-1b 1000 1200 --config

        elastic3d ckpt diff /data/run-8 1000 1000 --other /data/run-7 --quiet || echo different
    """
    if config and (values or match):
        raise UsageError("--config compares configurations alone: leave out --values and --match")
    if other_key_file and not other:
        raise UsageError("--other-key-file is the key of the store that --other names: give that, too")
    store = place.open()
    old_store = StorePlace(url=other, key_file=other_key_file or place.key_file).open() if other else store
    later = choose(store, b)
    if a or other:
        earlier = choose(old_store, a or "latest")
    else:
        earlier = dataclasses.replace(later, name=before(store, later.name), expected=None)
    old = find(old_store, earlier.name, expected=earlier.expected)
    new = find(store, later.name, expected=later.expected)
    if config:
        _diff_config(store, old, new, quiet=quiet, as_json=as_json)
        return
    changes = difference(old, new)
    if match:
        changes = dataclasses.replace(
            changes, facts=(), tensors=tuple(t for t in changes.tensors if fits(t.key, match))
        )
        if not changes.tensors:
            raise UsageError(f"--match {match!r}: none of the tensors of either checkpoint matches")
    distances: dict[str, ValueDifference] = {}
    if values:
        keys = doubtful(changes)
        sides = (old, open_checkpoint(old_store, earlier.name)), (new, open_checkpoint(store, later.name))
        total, done = to_read(old, new, keys), 0
        with bar("comparing values", total=total) as advance:

            def step(nbytes: int) -> None:
                nonlocal done
                done += nbytes
                advance(done)

            distances = {one.key: one for one in value_differences(*sides, keys, step)}
    if quiet:
        raise typer.Exit(1 if differs(changes, distances) else 0)
    data = DiffDocument(
        difference=changes,
        drifts={one.key: one.drift for one in changes.tensors if one.drift is not None},
        values=tuple(distances.values()) if values else None,
    )
    tell(store, data, lambda width: shown.difference(changes, distances, width, each=each), as_json=as_json)


def _diff_config(
    store: Store, old: CheckpointDocuments, new: CheckpointDocuments, *, quiet: bool, as_json: bool
) -> None:
    before, after = (made_by(one.name, one.record.facts) for one in (old, new))
    data = ConfigDiffDocument(
        before=old.name,
        after=new.name,
        before_version=before.config_version if before is not None else "",
        after_version=after.config_version if after is not None else "",
        changes=config_changes((before and before.config) or {}, (after and after.config) or {}),
    )
    if quiet:
        raise typer.Exit(1 if data.before_version != data.after_version else 0)
    tell(store, data, lambda _: configs_shown.config_difference(data), as_json=as_json)


def differs(changes: Difference, distances: dict[str, ValueDifference]) -> bool:
    """Return whether anything differs, or cannot be shown to be the same."""
    if changes.same:
        return False
    tensors = [one for one in changes.tensors if one.change is not Change.SAME]
    return bool(changes.facts) or any(one.key not in distances or distances[one.key].elements for one in tensors)
