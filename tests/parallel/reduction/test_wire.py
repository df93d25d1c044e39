"""What travels of a gradient: in the dtype it was computed in, in parts of bounded size, and with the same bits."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic3d.parallel.reduction.flat import cut
from elastic3d.parallel.reduction.fold import stretches
from elastic3d.values import Layout
from tests.parallel import numeric_mains as mains
from tests.parallel.worlds import Orders, run_world

BOUND = 700
"""Bytes: less than any unit of the small model has, and no multiple of a number's."""


def sent(layout: str, **choices: Any) -> mains.Sent:
    reports = run_world(partial(mains.train_sent, **choices), Orders(layout=Layout.parse(layout)))
    for report in reports:
        assert report.ended == "done", report.error
    assert len({bits(report.result) for report in reports}) == 1
    result: mains.Sent = reports[0].result
    return result


def bits(result: mains.Sent) -> tuple[str, tuple[float, ...]]:
    return result.trained.digest, result.trained.losses


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[str, tuple[float, ...]]]:
    """The bits of one rank, by precision."""
    return {precision: bits(sent("pp=1,dp=1", precision=precision)) for precision in ("bf16", "fp16")}


@pytest.mark.gloo
@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_pieces_are_sent_in_the_dtype_they_were_computed_in(precision: str, alone: dict[str, Any]) -> None:
    """Half the bytes of fp32, in as many exchanges, and the bits of one rank."""
    whole, half = sent("pp=1,dp=2,zero=2"), sent("pp=1,dp=2,zero=2", precision=precision)
    assert [2 * nbytes for nbytes in half.exchanges] == list(whole.exchanges)
    assert bits(half) == alone[precision]


@pytest.mark.gloo
@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        ("pp=1,dp=1", "bf16"),
        ("pp=1,dp=3,zero=1", "bf16"),
        ("pp=1,dp=4,zero=3,replicas=2", "fp16"),
        ("pp=2,dp=2,zero=2,schedule=zero-bubble,virtual=2", "bf16"),
        pytest.param("pp=2,dp=3,zero=3,schedule=1f1b", "fp16", marks=pytest.mark.slow),
        pytest.param("pp=2,dp=4,zero=2,replicas=2,schedule=zbv,virtual=2", "bf16", marks=pytest.mark.slow),
    ],
)
def test_large_units_are_sent_in_parts(layout: str, precision: str, alone: dict[str, Any]) -> None:
    """Uneven shards, replicas and passes that are split: no exchange is larger than its buffer, and no bit changes."""
    parts = sent(layout, precision=precision, bound=BOUND)
    assert max(parts.exchanges, default=0) <= BOUND
    assert parts.buffers <= BOUND
    assert bits(parts) == alone[precision]


@given(
    st.integers(1, 5),
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4),
    st.integers(1, 12),
)
def test_parts_of_chunks_make_up_the_whole(shards: int, shapes: list[list[int]], width: int) -> None:
    """Cut anywhere, with shards that are short or empty, the columns are those of FSDP's own layout."""
    gradients = [torch.randn(shape).to(torch.bfloat16) for shape in shapes]
    sizes = [-(-one.shape[0] // shards) * one[0].numel() for one in gradients]
    whole, parts = torch.full((shards, sum(sizes)), 7.0), torch.full((shards, sum(sizes)), 8.0)
    torch.ops.fsdp.chunk_cat(gradients, dim=0, num_chunks=shards, out=whole)
    for stretch in stretches(sum(sizes), width=width, ways=1, way=0):
        cut(gradients, sizes, stretch.start, into=parts[:, stretch.start : stretch.stop])
    assert torch.equal(whole, parts)


@given(st.integers(1, 40), st.integers(0, 12), st.integers(1, 5))
def test_stretches_cover_a_chunk_once(chunk: int, width: int, ways: int) -> None:
    """In order, none longer than asked for, and every number with one rank of the ways."""
    each = [stretches(chunk, width=width, ways=ways, way=way) for way in range(ways)]
    assert [start for one in each[0] for start in range(one.start, one.stop)] == list(range(chunk))
    assert max(one.stop - one.start for one in each[0]) <= max(1, width)
    for parts in zip(*each, strict=True):
        assert sum(part.mine for part in parts) == sum(parts[0].parts) == parts[0].stop - parts[0].start
    assert [one[0].at for one in each] == [0] * ways
