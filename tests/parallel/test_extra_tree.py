"""States of all forms come apart into tensors and plain values, and together again."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic3d.errors import StateUnfit
from elastic3d.parallel.extra_tree import key_of, name_of, put_together, spelled, taken_apart

TENSORS = st.builds(torch.full, st.just((2,)), st.floats(width=32)) | st.builds(torch.tensor, st.integers(-9, 9))
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
KEYS = st.text(alphabet="ab/%#.2 ", max_size=4) | st.integers(-3, 3)
STATES: st.SearchStrategy[Any] = st.recursive(
    TENSORS | VALUES | st.just({}) | st.builds(torch.empty, st.just((0, 3))),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=8,
)


def shown(state: Any) -> Any:
    """Return a state as something that is equal where its bits are; the order of keys is none of them."""
    if isinstance(state, torch.Tensor):
        return ("tensor", str(state.dtype), tuple(state.shape), state.numpy().tobytes())
    if isinstance(state, dict):
        return ("dict", frozenset((key, shown(item)) for key, item in state.items()))
    if isinstance(state, list | tuple):
        return (type(state).__name__, tuple(map(shown, state)))
    return (type(state).__name__, repr(state))


@given(state=st.dictionaries(KEYS, STATES, max_size=4))
def test_a_state_comes_together_as_it_was(state: Any) -> None:
    """Whatever its keys are, with the plain values written as JSON in between."""
    apart = taken_apart("x", state)
    plain = json.loads(json.dumps(apart.plain, allow_nan=False))
    assert all(name_of(key) == "x" for key in apart.tensors)
    assert shown(put_together("x", plain, apart.tensors)) == shown(state)


def test_dictionaries_of_tensors_alone_leave_no_value() -> None:
    """So that ranks with different ones have the same facts."""
    ones = torch.ones(2)
    one = taken_apart("ema", {"decay": 0.9, "shadow": {"blocks.0.w": ones}})
    other = taken_apart("ema", {"decay": 0.9, "shadow": {"blocks.1.w": ones}})
    assert one.plain == other.plain
    assert list(one.tensors) == ["extra/ema/shadow/blocks.0.w"]
    assert spelled("extra/ema/shadow/blocks.0.w") == "extra['ema']['shadow']['blocks.0.w']"
    assert taken_apart("ema", {"w": ones}).plain is None


def test_names_are_no_part_of_other_names() -> None:
    """One object's tensors are never taken for those of another one."""
    assert name_of(key_of("ema", ["w"])) == "ema"
    assert name_of(key_of("ema.2", ["w"])) == "ema.2"
    assert name_of("model/extra/w") == name_of("optimizer/extra/w/exp_avg") == ""


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({"fn": [print]}, r"extra\['x'\]\['fn'\]\[0\] is builtin_function"),
        ({"set": {1, 2}}, r"extra\['x'\]\['set'\] is set"),
        ({"a": torch.eye(2).to_sparse()}, r"extra\['x'\]\['a'\] is a tensor of the layout torch.sparse_coo"),
        ({(1, 2): torch.ones(1)}, r"extra\['x'\] has the key \(1, 2\) beside tensors"),
        ({"a\nb": torch.ones(1)}, r"has the key 'a\\nb' beside tensors"),
        ({"t": torch.return_types.max((torch.ones(1), torch.ones(1)))}, r"\['t'\] is max and has tensors in it"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_its_place(state: Any, why: str) -> None:
    """A person finds it in the object's own terms."""
    with pytest.raises(StateUnfit, match=why):
        taken_apart("x", state)


@pytest.mark.parametrize("state", [{"seen": list(range(10_000))}, {"names": ["a"] * 10_000, "other": torch.ones(1)}])
def test_a_long_list_is_taken_whole(state: Any) -> None:
    """A snapshot takes it apart between two steps: a call for each number would take longer than the step."""
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        taken_apart("sampler", state)
    finally:
        sys.setprofile(None)
    assert calls < 100
