from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic3d.errors import ModelError, UsageError
from elastic3d.training import run_alone
from elastic3d.values import Layout
from tests.parallel import numeric_mains as mains
from tests.parallel.models import Model
from tests.parallel.worlds import Orders, run_world

pytestmark = pytest.mark.gloo


def results(main: Any, *shapes: tuple[int, int, int], **orders: Any) -> list[Any]:
    """Return what every rank of every (pp, dp, ZeRO stage) returned."""
    found = []
    for pp, dp, zero in shapes:
        for report in run_world(main, Orders(layout=Layout(pp=pp, dp=dp, zero=zero), **orders)):
            assert report.ended == "done", report.error
            found.append(report.result)
    return found


@pytest.fixture(scope="module", autouse=True)
def fp32() -> Any:
    """The run of one rank in fp32."""
    return results(mains.train_fp32, (1, 1, 3))[0]


def test_bf16_ends_with_one_digest_and_keeps_fp32_state(fp32: Any) -> None:
    """One replica, several, pipelines and both ZeRO stages make the same bits, computed in bf16 over fp32."""
    found = results(mains.train_bf16, (1, 1, 3), (2, 1, 3), (1, 3, 2), (2, 2, 3))
    assert len({(r.digest, r.losses) for r in found}) == 1
    assert {r.dtypes for r in found} == {("torch.float32",)}
    assert {r.seen for r in found} == {("torch.bfloat16",)}
    assert found[0].digest != fp32.digest
    assert found[0].losses == pytest.approx(fp32.losses, rel=0.02)


def test_boundaries_carry_what_blocks_hand_on() -> None:
    """Floating-point inputs are cast, and activations that a buffer has made fp32 travel as fp32."""
    found = results(mains.train_promoting, (1, 1, 3), (3, 1, 2), (1, 2, 3))
    assert len({(r.digest, r.losses) for r in found}) == 1
    assert {r.seen for r in found} == {("torch.float32",)}


def test_precision_is_one_of_three() -> None:
    """A name that is none is told, with those there are."""
    with pytest.raises(UsageError, match='precision must be one of "fp32", "bf16", "fp16"; it is \'half\''):
        run_alone(lambda run: run.shard(Model, precision="half"))  # type: ignore[arg-type, return-value]


def test_masters_must_be_fp32() -> None:
    """A model built in bf16 has no fp32 state to compute over; it trains as it is built, without precision."""
    with pytest.raises(ModelError, match=r"parameter 'embed.weight' is torch.bfloat16; precision='bf16'"):
        run_alone(lambda run: run.shard(lambda: Model(dtype=torch.bfloat16), precision="bf16"))  # type: ignore[arg-type, return-value]
