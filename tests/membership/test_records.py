"""What stands in etcd: JSON with a schema version, and what a reader does with what it cannot read."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic3d.errors import ConfigurationError
from elastic3d.membership.records import (
    SCHEMA,
    Claim,
    End,
    MemberRecord,
    Out,
    Proposal,
    Report,
    SavedStep,
    Tomb,
    decode,
    encode,
)
from elastic3d.values import Cause, Generation, Layout, ModelProfile, Node, Slot

NODE = Node(
    name="a", incarnation="a1", address="::1", slots=(Slot(tile_port=7), Slot(tile_port=8)), labels={"rack": "r1"}
)
PROFILE = ModelProfile(blocks=2, parameters=10, micro_batches=4, micro_batch=2, digest="d")
GENERATION = Generation(number=3, attempt=9, cause=Cause.JOIN, nodes=(NODE,), layout=Layout(pp=2, dp=1), tries=1)
RECORDS = [
    MemberRecord(node=NODE, profile=PROFILE, floor=4),
    MemberRecord(node=NODE),
    Report(incarnation="a1", prepared="3.9", hears=("b", "c"), saved=SavedStep(step=5, made_in=3, attempt=9, world=2)),
    Tomb(incarnation="a1", how=Out.DEAD, detail="gone", by="b"),
    Claim(name="a", incarnation="a1"),
    Proposal(generation=GENERATION, switch=True),
    GENERATION,
    End(failed=True, detail="why"),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_round_trip(record: object) -> None:
    """Every record comes back equal, and is plain JSON with its schema version."""
    value = encode(record)
    assert json.loads(value)["schema"] == SCHEMA
    assert decode(type(record), value, "key") == record


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_newer_schema_is_refused(record: object) -> None:
    """A newer schema is never guessed at: the error names the key and says to upgrade."""
    value = json.dumps({**json.loads(encode(record)), "schema": SCHEMA + 1}).encode()
    with pytest.raises(ConfigurationError, match=r"the/key has schema 2.*upgrade"):
        decode(type(record), value, "the/key")


def test_unknown_fields_are_ignored() -> None:
    """A field a later version added under the same schema does not matter."""
    value = json.dumps({**json.loads(encode(End(failed=False))), "colour": "red"}).encode()
    assert decode(End, value, "key") == End(failed=False)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff\xfe",
        b"hello",
        b"3",
        b"null",
        b"[]",
        b'"text"',
        b"{}",
        b'{"failed": false}',
        b'{"schema": 1}',
        b'{"schema": "x", "failed": false}',
        b'{"schema": null, "failed": false}',
        b'{"schema": Infinity, "failed": false}',
        b'{"schema": 1, "failed": "no"}',
        b'{"schema": 1, "failed": 0}',
    ],
)
def test_garbage_is_refused(value: bytes) -> None:
    """Whatever is no record is a ConfigurationError that names the key."""
    with pytest.raises(ConfigurationError, match="the/key"):
        decode(End, value, "the/key")


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ["schema", "node", "profile", "floor", "incarnation", "hears", "saved", "how", "generation", "nodes", "layout"]


@given(
    st.sampled_from([type(record) for record in RECORDS]),
    st.dictionaries(st.sampled_from(FIELDS), ANY_JSON) | ANY_JSON | st.binary(),
)
def test_only_configuration_errors(kind: type, data: object) -> None:
    """No content of a key makes the reader raise anything else."""
    value = data if isinstance(data, bytes) else json.dumps(data).encode()
    try:
        decode(kind, value, "key")
    except ConfigurationError:
        pass


@given(st.sampled_from(RECORDS), st.data())
def test_only_configuration_errors_near_a_record(record: object, data: st.DataObject) -> None:
    """The same for a record of which one field became something else."""
    fields = json.loads(encode(record))
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(ANY_JSON)
    try:
        decode(type(record), json.dumps(fields).encode(), "key")
    except ConfigurationError:
        pass
