"""Configurations: what can be kept is kept as it is, and anything else is refused by name before a job begins."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import elastic3d
from elastic3d.errors import UsageError
from elastic3d.provenance import config


class Kind(StrEnum):
    """A choice."""

    COSINE = "cosine"


@dataclass(frozen=True)
class Optimizer:
    """A part of a configuration."""

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    kind: Kind = Kind.COSINE


@dataclass
class Config:
    """A configuration."""

    width: int = 8
    optimizer: Optimizer = field(default_factory=Optimizer)
    tags: Any = field(default_factory=lambda: MappingProxyType({"a": None}))


def test_dataclasses_and_mappings_become_plain_values() -> None:
    """Of plain types only, so that they are the same after a way through JSON."""
    made = config.plain(Config())
    assert made == {
        "width": 8,
        "optimizer": {"lr": 3e-4, "betas": [0.9, 0.95], "kind": "cosine"},
        "tags": {"a": None},
    }
    assert type(made["optimizer"]["kind"]) is str
    assert config.plain({}) == {}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (Config, "give a dataclass object or a mapping"),
        ("lr=1", "give a dataclass object or a mapping"),
        (SimpleNamespace(lr=1), r"give vars\(...\) of it"),
        ({"a": {"b": math.nan}}, r"config\['a.b'\]=nan: JSON has no such number"),
        ({"a": [1, math.inf]}, r"config\['a\[1\]'\]=inf"),
        ({"a": {1: 2}}, r"config\['a'\] has the key 1: give texts as keys"),
        ({"": 2}, "give texts as keys"),
        ({"path": Path("x")}, r"config\['path'\] is a pathlib.*str\(...\) of a path"),
        ({"t": torch.ones(1)}, r"config\['t'\] is a torch.Tensor"),
        ({"f": print}, r"config\['f'\] is a builtins"),
        ({"s": {1, 2}}, r"config\['s'\] is a builtins.set"),
        ({"text": "\ud800"}, "is not Unicode"),
        ({"text": "x" * 70_000}, "and 65536 at most are kept"),
        ({"db_password": "x"}, "looks like a secret"),
        ({"wandb": {"api_key": "x"}}, r"config\['wandb.api_key'\] looks like a secret"),
        ({"hf_token": "x"}, "looks like a secret"),
        ({"url": "https://me:pw@host/x"}, "looks like a secret"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(wrong: Any, words: str) -> None:
    """In `elastic3d.run` itself, before anything is started."""
    with pytest.raises(UsageError, match=words):
        elastic3d.run(lambda run: pytest.fail("main was entered"), config=wrong)


def test_what_only_sounds_like_a_secret_is_taken() -> None:
    """Tokens are counted, and keys looked up, in many a configuration."""
    fine = {"max_tokens": 5, "tokenizer": "gpt2", "pad_token": "<pad>", "key": "text", "api_key": "", "secret": None}
    assert config.plain(fine) == fine


def test_a_configuration_that_holds_itself_is_refused() -> None:
    """Instead of being followed for ever."""
    made: dict[str, Any] = {}
    made["again"] = [made]
    with pytest.raises(UsageError, match="more than 16 levels"):
        config.plain(made)


KEYS = st.text(st.sampled_from('ab.["]'), min_size=1, max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats(-2, 2) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=2),
    max_leaves=6,
)


@example({"a.b": 1}, {"a": {"b": 1}})
@example({"a": {}}, {"a": "{}"})
@example({"a": 1}, {"a": True})
@given(st.dictionaries(KEYS, VALUES, max_size=3), st.dictionaries(KEYS, VALUES, max_size=3))
def test_versions_differ_exactly_if_a_key_is_named(one: dict[str, Any], other: dict[str, Any]) -> None:
    """No change goes unnamed, whatever signs keys have; and nothing is named where nothing has changed."""
    named = config.changes(one, other)
    assert bool(named) == (config.digest(one) != config.digest(other))
    assert [(one.key, one.after, one.before) for one in config.changes(other, one)] == [
        (one.key, one.before, one.after) for one in named
    ]


def test_changes_are_said_in_one_line() -> None:
    """The first of many; long values are cut."""
    before, after = {f"k{number}": 1 for number in range(10)}, {"k0": "x" * 500}
    said = config.in_words(config.changes(before, after))
    assert said.startswith('k0 was 1 and is "xxx')
    assert said.endswith("and is not there; and 2 more")
    assert len(said) < 600
