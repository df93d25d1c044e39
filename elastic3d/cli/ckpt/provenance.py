"""`ckpt provenance`: what made a checkpoint, from its record alone; and whether a folder holds the same code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from checkpointing.inspection.documents import find
from checkpointing.reading import naming
from elastic3d.cli.ckpt.documents import GenerationSteps, ProvenanceDocument
from elastic3d.cli.ckpt.naming import choose
from elastic3d.cli.ckpt.place import StorePlace, Which
from elastic3d.cli.ckpt.render import provenance as shown
from elastic3d.cli.ckpt.telling import tell
from elastic3d.errors import StateError, UsageError
from elastic3d.provenance.comparing import compare
from elastic3d.provenance.record import Provenance, of_facts
from elastic3d.rollback import Rollback
from elastic3d.values import from_json


def provenance(
    place: StorePlace,
    checkpoint: Which = "latest",
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare with the code in a folder; exit 1 if it differs.")
    ] = False,
    code: Annotated[
        Path | None,
        typer.Option("--code", metavar="DIR", help="The folder that --verify compares with.", show_default="."),
    ] = None,
    *,
    as_json: bool,
) -> None:
    """Show what made a checkpoint: code, packages, configuration, data, seeds, and the generations up to it.

    All of it is covered by the checkpoint's root, which is checked; only the store's rules of distrust are not part of
    the checkpoint. `--verify` compares files, git's revision and uncommitted changes with a folder, and names what
    differs.

    Examples:

        elastic3d ckpt provenance /data/run-7

        elastic3d ckpt provenance s3://bucket/gpt-1b@vetted --json | jq .provenance.config

        elastic3d ckpt provenance s3://bucket/gpt-1b 1200 --verify --code ~/gpt
    """
    if code is not None and not verify:
        raise UsageError("--code names the folder that --verify compares with: give --verify too")
    store = place.open()
    chosen = choose(store, checkpoint)
    documents = find(store, chosen.name, expected=chosen.expected)
    record, made = documents.record, made_by(documents.name, documents.record.facts)
    if verify and made is None:
        raise StateError(f"checkpoint {documents.name} does not say what made it, so that no code can be compared")
    compared = compare(made.code, code or Path()) if verify and made is not None else None
    ref = naming.read_ref(store)
    try:
        data = ProvenanceDocument(
            checkpoint=documents.name,
            root=record.root,
            step=record.save.step,
            provenance=made,
            data=str(record.facts.get("data", "")),
            data_seed=_seed(record.facts),
            generations=tuple(from_json(GenerationSteps, line) for line in record.facts.get("ledger", ())),
            rollbacks=tuple(from_json(Rollback, one) for one in record.facts.get("rollbacks", ())),
            distrusted=ref.distrusted if ref is not None else (),
            compared=compared,
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise _unreadable(documents.name, error) from error
    tell(store, data, lambda width: shown.page(store.url, data, width), as_json=as_json)
    if compared is not None and compared.differences:
        raise typer.Exit(1)


def made_by(checkpoint: str, facts: Mapping[str, Any]) -> Provenance | None:
    """Return the provenance in a checkpoint's facts, None for none; StateError if it cannot be read."""
    try:
        return of_facts(facts)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise _unreadable(checkpoint, error) from error


def _unreadable(checkpoint: str, error: Exception) -> StateError:
    return StateError(
        f"what checkpoint {checkpoint} says of what made it cannot be read: {error}. Trying again does not help: "
        "upgrade if a newer version saved it; `elastic3d ckpt show --facts` shows it as it is"
    )


def _seed(facts: Mapping[str, Any]) -> int | None:
    order = facts.get("order")
    seed = order.get("seed") if isinstance(order, Mapping) else None
    return seed if isinstance(seed, int) else None
