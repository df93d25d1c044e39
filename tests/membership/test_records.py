"""What stands in etcd: JSON with a schema version, and how readers treat what they cannot read."""

from __future__ import annotations

import base64
import json
import random
from dataclasses import replace

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from elastic3d.distrust import Distrust
from elastic3d.errors import ConfigurationError
from elastic3d.membership import encoding
from elastic3d.membership.records import (
    SCHEMA,
    Claim,
    End,
    MemberRecord,
    Notice,
    Out,
    Proposal,
    ReasonToGoBack,
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
    Report(incarnation="a1", prepared="3.9", silent=("b@1", "c@2"), notice=Notice(kind="aws", seconds=120.0)),
    Report(incarnation="a1", saved=SavedStep(step=5, made_in=3, attempt=9, world=2)),
    Tomb(incarnation="a1", how=Out.DEAD, detail="gone", by="b"),
    Claim(name="a", incarnation="a1"),
    Proposal(generation=GENERATION, switch=True),
    GENERATION,
    replace(GENERATION, distrusted=(Distrust(before=2, step=30), Distrust(before=3, step=60))),
    replace(GENERATION, convicted={"a@a1": 2}),
    Report(
        incarnation="a1",
        goes_back=(
            ReasonToGoBack(key="3.9", clean=30, accused={"a@a1": "a"}, detail="wrong"),
            ReasonToGoBack(key="4.10"),
        ),
    ),
    End(failed=True, detail="why"),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_records_read_back_unchanged(record: object) -> None:
    """Each is plain JSON with its schema version."""
    value = encode(record)
    assert json.loads(value)["schema"] == SCHEMA
    assert decode(type(record), value, "key") == record


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_newer_schema_is_refused(record: object) -> None:
    """It is never guessed at: the error names the key and says to upgrade."""
    value = json.dumps({**json.loads(encode(record)), "schema": SCHEMA + 1}).encode()
    with pytest.raises(ConfigurationError, match=rf"the/key has schema {SCHEMA + 1}.*upgrade"):
        decode(type(record), value, "the/key")


def test_unknown_fields_are_ignored() -> None:
    """A later version may have added them under the same schema."""
    value = json.dumps({**json.loads(encode(End(failed=False))), "colour": "red"}).encode()
    assert decode(End, value, "key") == End(failed=False)


def test_a_generation_without_rules_is_written_as_before() -> None:
    """Its digest is then that of nodes which know of no rules, and theirs are read as ones without any."""
    assert "distrusted" not in encoding.write_generation(GENERATION)
    assert encoding.read_generation(encoding.write_generation(GENERATION)).distrusted == ()


def test_a_report_of_an_older_schema_is_read_by_the_names_it_has() -> None:
    """A node that was not upgraded yet is understood.

    Up to schema 2 a failure and a lost peer had other names, up to 8 a report told of one generation to go back from.
    """
    value = b'{"schema": 2, "incarnation": "a1", "fault": "3.9", "interrupted": "3.8", "error": "3.7"}'
    assert decode(Report, value, "key") == Report(incarnation="a1", failed="3.9", peer_lost="3.8", error="3.7")
    value = b'{"schema": 8, "incarnation": "a1", "goes_back": "3.9", "clean": 30, "accused": {"b@1": "b"}}'
    said = ReasonToGoBack(key="3.9", clean=30, accused={"b@1": "b"})
    assert decode(Report, value, "key") == Report(incarnation="a1", goes_back=(said,))
    assert decode(Report, b'{"schema": 8, "incarnation": "a1", "goes_back": "", "clean": -1}', "key").goes_back == ()
    failed = replace(GENERATION, cause=Cause.FAILURE)
    value = encode(failed).replace(b'"failure"', b'"fault"')
    assert b'"fault"' in value
    assert decode(Generation, value, "key").cause is Cause.FAILURE


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
    """Anything that is no record is a ConfigurationError that names the key."""
    with pytest.raises(ConfigurationError, match="the/key"):
        decode(End, value, "the/key")


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [
    "schema",
    "node",
    "profile",
    "floor",
    "incarnation",
    "silent",
    "saved",
    "how",
    "generation",
    "nodes",
    "layout",
]


@given(
    st.sampled_from([type(record) for record in RECORDS]),
    st.dictionaries(st.sampled_from(FIELDS), ANY_JSON) | ANY_JSON | st.binary(),
)
def test_any_bytes_are_a_record_or_a_configuration_error(kind: type, data: object) -> None:
    """No content of a key makes the reader raise anything else."""
    value = data if isinstance(data, bytes) else json.dumps(data).encode()
    try:
        decode(kind, value, "key")
    except ConfigurationError:
        pass


@given(st.sampled_from(RECORDS), st.data())
def test_any_change_to_a_field_is_a_record_or_a_configuration_error(record: object, data: st.DataObject) -> None:
    """The same for a record with one changed field."""
    fields = json.loads(encode(record))
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(ANY_JSON)
    try:
        decode(type(record), json.dumps(fields).encode(), "key")
    except ConfigurationError:
        pass


# Generations and proposals.

NAMES = st.text("abc.-0", min_size=1, max_size=8)
PORTS = st.integers(0, 65535)
NODES = st.builds(
    Node,
    name=NAMES,
    incarnation=NAMES,
    address=st.sampled_from(["10.0.0.1", "::1", "host.example"]),
    slots=st.lists(st.builds(Slot, tile_port=PORTS), max_size=4).map(tuple),
    heartbeat_port=PORTS,
    store_port=PORTS,
    labels=st.dictionaries(st.sampled_from(["zone", "rack", "host"]), NAMES),
    home=st.one_of(st.just(""), NAMES),
)
GENERATIONS = st.builds(
    Generation,
    number=st.integers(0, 2**40),
    attempt=st.integers(0, 2**60),
    cause=st.sampled_from(Cause),
    nodes=st.lists(NODES, max_size=6).map(tuple),
    spares=st.lists(NODES, max_size=3).map(tuple),
    layout=st.one_of(st.none(), st.builds(Layout, pp=st.integers(0, 9), dp=st.integers(0, 9))),
    leader=NAMES,
    detail=st.text(max_size=20),
    job=NAMES,
    tries=st.integers(0, 9),
    tried_at=st.integers(-1, 2**40),
    spent=st.floats(0, 1e6),
    storm=st.integers(0, 9),
    distrusted=st.lists(st.builds(Distrust, before=st.integers(0, 9), step=st.integers(0, 2**40)), max_size=2).map(
        tuple
    ),
)


@given(GENERATIONS, st.booleans())
def test_generations_and_proposals_read_back_unchanged(generation: Generation, switch: bool) -> None:
    """Whatever they hold."""
    assert decode(Generation, encode(generation), "key") == generation
    proposal = Proposal(generation=generation, switch=switch)
    assert decode(Proposal, encode(proposal), "key") == proposal


def large(nodes: int, slots: int) -> Generation:
    """Return a generation like a cluster's: names from addresses, random incarnations and ports."""
    chance = random.Random(3)

    def port() -> int:
        return chance.randrange(32768, 60999)

    def node(at: int) -> Node:
        host = f"ip-10-{at >> 8}-{at & 255}-{chance.randrange(256)}.eu-west-1.compute.internal"
        places = {"zone": f"eu-west-1{'abc'[at % 3]}", "rack": f"rack-{at // 40}", "switch": f"switch-{at // 160}"}
        return Node(
            name=f"{host}-{chance.randrange(200, 60000)}",
            incarnation=f"{chance.getrandbits(64):016x}",
            address=f"10.{at >> 8}.{at & 255}.{chance.randrange(256)}",
            slots=tuple(Slot(tile_port=port()) for _ in range(slots)),
            heartbeat_port=port(),
            store_port=port(),
            labels=places | {"host": host},
            home=host,
        )

    made = tuple(node(at) for at in range(nodes))
    return Generation(number=7, attempt=12345, cause=Cause.JOIN, nodes=made, layout=Layout(pp=8, dp=nodes))


def test_ten_thousand_nodes_fit_into_a_megabyte() -> None:
    """The largest record there is stays below 1 MiB, two thirds of etcd's limit, and reads back whole."""
    generation = large(10_000, 8)
    value = encode(generation)
    assert len(value) < 1_048_576
    assert decode(Generation, value, "key") == generation


def test_small_records_are_readable() -> None:
    """Up to 64 KiB the JSON is stored as it is; beyond that it is compressed, with the schema outside."""
    assert b"eu-west-1a" in encode(large(32, 8))
    assert json.loads(encode(large(1000, 8))).keys() == {"schema", "zstd"}


def compressed(plain: bytes) -> bytes:
    text = base64.b64encode(zstandard.ZstdCompressor().compress(plain)).decode()
    return json.dumps({"schema": SCHEMA, "zstd": text}).encode()


@pytest.mark.parametrize(
    "value",
    [
        json.dumps({"schema": SCHEMA, "zstd": "no base64!"}).encode(),
        json.dumps({"schema": SCHEMA, "zstd": "bm8genN0ZA=="}).encode(),
        json.dumps({"schema": SCHEMA, "zstd": 7}).encode(),
        compressed(b"hello"),
        compressed(b"[]"),
        compressed(b"{}"),
        compressed(b"0" * (encoding.BOUND + 1)),
        compressed(b'{"number":1,"cause":"start","nodes":[["a"]]}'),
        compressed(b'{"number":1,"cause":"start","nodes":[["a","1","h",1,2,[true],0,""]],"labels":[{}]}'),
        compressed(b'{"number":1,"cause":"start","nodes":[["a","1","h",1,2,[3],1,""]],"labels":[{}]}'),
    ],
)
def test_compressed_garbage_is_refused(value: bytes) -> None:
    """Garbage within the compression, and bombs, are ConfigurationErrors that name the key."""
    with pytest.raises(ConfigurationError, match="the/key"):
        decode(Generation, value, "the/key")


def test_a_later_version_may_extend_a_nodes_row() -> None:
    """Unknown values at the end of a row are ignored."""
    data = json.loads(encode(GENERATION))
    data["nodes"][0].append("new")
    assert decode(Generation, json.dumps(data).encode(), "key") == GENERATION
