"""A sample comes back from bytes as it was, to the last bit."""

from __future__ import annotations

import struct
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic3d.data.sample_bytes import Unstorable, decoded, encoded

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex64)


def again(sample: Any) -> Any:
    return decoded(torch.frombuffer(bytearray(encoded(sample)), dtype=torch.uint8))


def same(one: Any, other: Any) -> bool:
    """Whether two samples have the same classes, sizes, strides and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        flat = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
        return alike and torch.equal(*flat)
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    return bool(one == other)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw tensors of all bits, whole or with their dimensions in another order."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    number = int(np.prod(shape)) * dtype.itemsize
    data = draw(st.binary(min_size=number, max_size=number))
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if number else torch.empty(0, dtype=torch.uint8)
    if dtype is torch.bool:
        flat = flat & 1
    return flat.view(dtype).reshape(shape).permute(draw(st.permutations(range(len(shape)))))


ARRAYS = st.sampled_from(
    [
        np.arange(6, dtype=">i4").reshape(2, 3).T,
        np.arange(12)[::-2],
        np.broadcast_to(np.float32(3.5), (2, 2)),
        np.zeros((0, 3)),
        np.array(["a", "longer"]),
        np.array([b"x"]),
        np.array("2024-01-02", dtype="datetime64[D]"),
        np.array([np.nan, -0.0]),
        np.float16(1.5),
        np.str_("word"),
        np.int64(-1),
        np.datetime64("2024-01-02"),
    ]
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats()
    | st.text()
    | st.binary()
    | tensors()
    | ARRAYS
)
KEYS = st.text() | st.integers(0, 9) | st.tuples(st.integers(0, 9), st.binary(max_size=3))
SAMPLES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(KEYS, inner, max_size=4)
    ),
)


@settings(max_examples=60)
@given(SAMPLES)
def test_any_sample_comes_back_as_it_was(sample: Any) -> None:
    """Classes, dtypes, sizes, strides, NaNs' bits and the order of keys; equal samples have equal bytes."""
    back = again(sample)
    assert same(sample, back)
    assert encoded(back) == encoded(sample)


def test_what_comes_back_can_be_written_to() -> None:
    """As what the data set makes could be: `collate` may pad in place."""
    array, tensor = again((np.arange(3), torch.arange(3)))
    array += 1
    tensor += 1
    assert array.tolist() == tensor.tolist() == [1, 2, 3]


@pytest.mark.parametrize("rows", [torch.rand(2, 8, 8, 3), torch.rand(4, 8, 8, 3)[::2]])
def test_a_batch_keeps_its_memory_format(rows: torch.Tensor) -> None:
    """A batch that is joined of images decoded row by row is channels last, and convolved by other kernels."""
    images = rows.permute(0, 3, 1, 2)
    whole, back = torch.cat([images, images]), torch.cat([again(images), again(images)])
    assert whole.stride() == back.stride()
    assert whole.is_contiguous(memory_format=torch.channels_last)


Pair = namedtuple("Pair", "x y")


class Words(dict[str, Any]):
    """A dictionary of a class of its own, as tokenizers return."""


@pytest.mark.parametrize(
    "part",
    [
        Pair(1, 2),
        Words(x=1),
        np.array([object()]),
        np.zeros(2, dtype=[("a", "i4")]),
        torch.nn.Parameter(torch.zeros(2)),
        torch.zeros(2, requires_grad=True),
        torch.zeros(2).to_sparse(),
        torch.zeros(2, device="meta"),
        {1, 2},
        1 << 70,
        lambda: 1,
    ],
    ids=lambda part: type(part).__name__,
)
def test_what_would_not_come_back_is_refused(part: Any) -> None:
    """With its place in the sample; it would come back as another class, or not at all."""
    with pytest.raises(Unstorable, match=r"part 1 of 'x' of the sample is"):
        encoded({"x": [0, part]})
