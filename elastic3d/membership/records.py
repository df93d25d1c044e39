"""What stands in etcd under one run id, and under which keys.

    members/<node>   who I am: written once per incarnation, under the member's lease
    reports/<node>   what I see: my trainers' state in the present generation, whom I still hear; under the lease
    tombs/<node>     this incarnation is out: it left, it was found dead, or it was refused
    leader           who decides; its mod revision is the token that fences every write of a leader
    generation       the sealed membership; written only by the leader, fenced on its token and the record's revision
    proposal         the membership being prepared beside the running one
    end              the job is over: finished or failed

Values are JSON objects with a schema version; a reader refuses a newer version and ignores fields it does not know.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from elastic3d.errors import ConfigurationError
from elastic3d.values import Generation, ModelProfile, Node, from_json, to_json

SCHEMA = 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRecord:
    """A node that wants to take part. `floor` is the newest generation number its store has seen."""

    node: Node
    profile: ModelProfile | None = None
    floor: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStep:
    """A step's tiles, made in one attempt at a generation of `world` ranks, as far as one node wrote them."""

    step: int
    made_in: int
    attempt: int
    world: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a member says of itself. Each of the key fields names a generation's `key`, "" for none.

    prepared: its trainers are built and wait. left: its trainers left at the boundary after `step`.
    finished: `main` returned on all its slots. fault: a trainer died. error: the user's code raised.
    interrupted: a trainer lost a peer and stopped. hears: names of members it hears though their key is gone.
    saved: the newest step whose tiles all its slots wrote to the store.
    """

    incarnation: str
    prepared: str = ""
    left: str = ""
    finished: str = ""
    fault: str = ""
    error: str = ""
    interrupted: str = ""
    detail: str = ""
    step: int = 0
    hears: tuple[str, ...] = ()
    saved: SavedStep | None = None


class Out(StrEnum):
    """Why an incarnation is out."""

    LEFT = "left"
    DEAD = "dead"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tomb:
    """This incarnation of the node is out for good; `detail` is the evidence, `by` who wrote it."""

    incarnation: str
    how: Out
    detail: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Who leads."""

    name: str
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A generation being prepared. `switch`: all are prepared, the running trainers shall leave."""

    generation: Generation
    switch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The job is over."""

    failed: bool
    detail: str = ""


def encode(record: Any) -> bytes:
    """Return the JSON bytes of a record, with its schema version."""
    return json.dumps({"schema": SCHEMA, **to_json(record)}, separators=(",", ":")).encode()


def decode(kind: type[T], value: bytes, key: str) -> T:
    """Return the record `encode` wrote; ConfigurationError for garbage or a newer schema, naming the key."""
    try:
        data = json.loads(value)
        schema = data.pop("schema")
        if not isinstance(schema, int):
            raise TypeError(f"its schema is {schema!r}")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"etcd key {key} holds no elastic3d record ({error}); another program writes under this prefix: "
            "choose another --rdzv-id or prefix"
        ) from error
    if schema > SCHEMA:
        raise ConfigurationError(
            f"etcd key {key} has schema {schema}, this elastic3d reads up to {SCHEMA}: upgrade this node"
        )
    try:
        return from_json(kind, data)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"etcd key {key} does not fit {kind.__name__}: {error}") from error
