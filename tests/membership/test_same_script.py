"""A node that runs something else than the job is refused when it joins, by what differs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic3d.membership.machine.roster import refusal
from elastic3d.membership.records import MemberRecord
from elastic3d.values import ModelProfile, Node, Slot

PROFILE = ModelProfile(
    blocks=4,
    parameters=1000,
    micro_batches=4,
    micro_batch=1,
    digest="d",
    script="s",
    code="c",
    schedule="o",
    samples="x",
)


def member(**fields: str) -> MemberRecord:
    node = Node(name="a", incarnation="1", address="127.0.0.1", slots=(Slot(tile_port=1),))
    return MemberRecord(node=node, profile=replace(PROFILE, **fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("digest", "model, batch sizes or seed differ"),
        ("script", "this node's script differs"),
        ("code", "model is made of something else"),
        ("schedule", "optimizer or learning-rate schedule differs"),
        ("samples", "makes other samples of the same numbers"),
    ],
)
def test_what_differs_is_named(field: str, words: str) -> None:
    assert words in refusal(member(**{field: "another"}), member())


@pytest.mark.parametrize("field", ["code", "samples"])
def test_what_is_not_known_is_not_compared(field: str) -> None:
    """Of an older version, of a notebook, of a stream."""
    assert refusal(member(**{field: ""}), member()) == refusal(member(), member(**{field: ""})) == ""
