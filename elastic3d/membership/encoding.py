"""How a generation is written in etcd: small, and quick for everybody to read at once.

A node is a row [name, incarnation, address, heartbeat port, store port, [tile ports], label set, home]; label sets, of
which a cluster has few, are kept in a table. Beyond `PLAIN` bytes the JSON is compressed, as {"schema": ..., "zstd":
...} in base64: the record of 10,000 nodes then stays below the 1.5 MiB that etcd takes.

Reading is done by hand: at 256 nodes it costs about a millisecond, where reading by type annotations costs ten.
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Sequence
from typing import Any

import zstandard

from elastic3d.distrust import Distrust
from elastic3d.pace import Pace
from elastic3d.rollback import Rollback
from elastic3d.shortfall import MemoryBound
from elastic3d.values import Cause, Generation, Layout, Node, Slot, from_json, to_json

PLAIN = 64 * 1024
"""Bytes of JSON up to which a record is left uncompressed, so that a person can read it."""

BOUND = 64 * 1024 * 1024
"""Bytes of JSON beyond which a compressed record is refused: nobody writes one, and memory is finite."""

LEVEL = 9
"""Level of zstd: higher ones gain nothing here and take seconds."""


def pack(data: dict[str, Any], schema: int) -> bytes:
    """Return the bytes of a record's JSON data, compressed where that is worth it."""
    plain = json.dumps({"schema": schema, **data}, separators=(",", ":")).encode()
    if len(plain) <= PLAIN:
        return plain
    body = json.dumps(data, separators=(",", ":")).encode()
    text = base64.b64encode(zstandard.ZstdCompressor(level=LEVEL).compress(body)).decode()
    return json.dumps({"schema": schema, "zstd": text}, separators=(",", ":")).encode()


def unpack(data: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON data that `pack` wrote; ValueError or TypeError for anything else."""
    text = data.get("zstd")
    if text is None:
        return data
    if not isinstance(text, str):
        raise ValueError("its zstd is not text")
    try:
        frame = base64.b64decode(text, validate=True)
        size = zstandard.frame_content_size(frame)
        if not 0 <= size <= BOUND:
            raise ValueError(f"its zstd frame says it holds {size} bytes")
        plain = zstandard.ZstdDecompressor().decompress(frame, max_output_size=BOUND)
    except zstandard.ZstdError as error:
        raise ValueError(f"its zstd does not decompress: {error}") from error
    content = json.loads(plain)
    if not isinstance(content, dict):
        raise ValueError("its zstd holds no object")
    return content


def write_generation(generation: Generation) -> dict[str, Any]:
    """Return a generation as compact JSON data."""
    rows, labels = write_nodes((*generation.nodes, *generation.spares))
    active = len(generation.nodes)
    return {**write_fields(generation), "nodes": rows[:active], "spares": rows[active:], "labels": labels}


def write_nodes(nodes: Sequence[Node]) -> tuple[list[list[Any]], list[dict[str, str]]]:
    """Return the nodes' rows, and the label sets that they name by number."""
    table: dict[tuple[tuple[str, str], ...], int] = {}

    def row(node: Node) -> list[Any]:
        labels = table.setdefault(tuple(node.labels.items()), len(table))
        ports = [slot.tile_port for slot in node.slots]
        start = [node.name, node.incarnation, node.address, node.heartbeat_port, node.store_port]
        return [*start, ports, labels, node.home]

    rows = [row(node) for node in nodes]
    return rows, [dict(labels) for labels in table]


def write_fields(generation: Generation) -> dict[str, Any]:
    """Return all but the nodes and spares of a generation."""
    return {
        "number": generation.number,
        "attempt": generation.attempt,
        "cause": generation.cause.value,
        "layout": to_json(generation.layout),
        "leader": generation.leader,
        "detail": generation.detail,
        "job": generation.job,
        "tries": generation.tries,
        "tried_at": generation.tried_at,
        "raised": list(generation.raised),
        "hung": generation.hung,
        # A float, whatever it was made from: digests are of what readers read.
        "spent": float(generation.spent),
        "storm": generation.storm,
        "reached": generation.reached,
        # Left out of nearly all: the digest of a generation is then that of older versions.
        **({"distrusted": to_json(generation.distrusted)} if generation.distrusted else {}),
        **({"rollbacks": to_json(generation.rollbacks)} if generation.rollbacks else {}),
        **({"paces": to_json(generation.paces)} if generation.paces else {}),
        **({"memory": to_json(generation.memory)} if generation.memory is not None else {}),
        **({"writer": generation.writer} if generation.writer else {}),
        **({"convicted": generation.convicted} if generation.convicted else {}),
    }


def read_generation(data: Any) -> Generation:
    """Return the generation that `write_generation` wrote; ValueError or TypeError where it does not fit."""
    if not isinstance(data, dict):
        raise ValueError(f"expected an object for a generation, got {str(data)[:80]!r}")
    labels = data.get("labels", [])
    nodes, spares = read_nodes(data.get("nodes"), labels), read_nodes(data.get("spares", []), labels)
    return read_fields(data, nodes=nodes, spares=spares)


def read_fields(data: dict[str, Any], *, nodes: tuple[Node, ...], spares: tuple[Node, ...]) -> Generation:
    """Return the generation of these nodes whose other fields `write_fields` wrote."""
    known = {key: value for key, value in data.items() if key in _PLAIN}
    for key, value in known.items():
        kind = _PLAIN[key]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            known[key] = float(value)
        elif not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"expected {kind.__name__} for {key}, got {str(value)[:80]!r}")
    if "number" not in known:
        raise ValueError("it has no number")
    if not 0 <= known.get("writer", 0) < max(1, len(nodes)):
        raise ValueError(f"it has {len(nodes)} node(s), and no writer {known['writer']}")
    return Generation(
        cause=Cause(str(data.get("cause"))),
        nodes=nodes,
        spares=spares,
        layout=from_json(Layout, data["layout"]) if data.get("layout") is not None else None,
        raised=from_json(tuple[str, ...], data.get("raised", [])),
        distrusted=from_json(tuple[Distrust, ...], data.get("distrusted", [])),
        rollbacks=from_json(tuple[Rollback, ...], data.get("rollbacks", [])),
        paces=from_json(tuple[Pace, ...], data.get("paces", [])),
        memory=from_json(MemoryBound, data["memory"]) if data.get("memory") is not None else None,
        convicted=from_json(dict[str, int], data.get("convicted", {})),
        **known,
    )


_PLAIN: dict[str, type] = {
    "number": int,
    "attempt": int,
    "leader": str,
    "detail": str,
    "job": str,
    "tries": int,
    "tried_at": int,
    "hung": int,
    "spent": float,
    "storm": int,
    "reached": int,
    "writer": int,
}


def read_nodes(rows: Any, sets: Any) -> tuple[Node, ...]:
    """Return the nodes of rows and label sets that `write_nodes` wrote; ValueError where they do not fit."""
    labels = [_labels(entry) for entry in _list(sets)]
    nodes = []
    for row in _list(rows):
        # A later writer of this schema may add to the row's end.
        name, incarnation, address, heartbeat, store, ports, at, home = row if len(row) == 8 else _list(row)[:8]
        if not (type(name) is type(incarnation) is type(address) is type(home) is str):
            raise ValueError(f"expected text in a node's row, got {str(row)[:200]}")
        if not (type(heartbeat) is type(store) is type(at) is int and type(ports) is list):
            raise ValueError(f"expected numbers in a node's row, got {str(row)[:200]}")
        if not set(map(type, ports)) <= _INT:
            raise ValueError(f"expected numbers in a node's row, got {str(row)[:200]}")
        if not 0 <= at < len(labels):
            raise ValueError(f"a node's label set is {at} of {len(labels)}")
        nodes.append(
            Node(
                name=name,
                incarnation=incarnation,
                address=address,
                slots=tuple(map(_slot, ports)),
                heartbeat_port=heartbeat,
                store_port=store,
                labels=labels[at],
                home=home,
            )
        )
    return tuple(nodes)


_INT = {int}


@functools.lru_cache(maxsize=65536)
def _slot(port: int) -> Slot:
    return Slot(tile_port=port)


def _labels(entry: Any) -> dict[str, str]:
    if not isinstance(entry, dict) or not all(type(value) is str for value in entry.values()):
        raise ValueError(f"expected labels, got {str(entry)[:80]!r}")
    return entry


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list, got {str(value)[:80]!r}")
    return value
