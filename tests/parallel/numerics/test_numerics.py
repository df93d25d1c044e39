from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from elastic3d.data.positions import Order
from elastic3d.devices import device_at
from elastic3d.errors import UsageError
from elastic3d.parallel.numerics.recompute import PRODUCTS, Recompute, recompute
from elastic3d.parallel.randomness import Randomness
from elastic3d.training import run_alone
from elastic3d.values import Layout
from tests.parallel import numeric_mains as mains
from tests.parallel.models import Block, Model
from tests.parallel.worlds import Orders, run_world

pytestmark = [pytest.mark.gloo, pytest.mark.long]


def results(main: Any, *shapes: tuple[int, int, int], **orders: Any) -> list[Any]:
    """Return what every rank of every (pp, dp, ZeRO stage) returned."""
    outcomes = []
    for pp, dp, zero in shapes:
        for report in run_world(main, Orders(layout=Layout(pp=pp, dp=dp, zero=zero), **orders)):
            assert report.ended == "done", report.error
            outcomes.append(report.result)
    return outcomes


@pytest.fixture(scope="module", autouse=True)
def fp32() -> Any:
    """The run of one rank in fp32."""
    return results(mains.train_fp32, (1, 1, 3))[0]


def test_bf16_ends_with_one_digest_and_keeps_fp32_state(fp32: Any) -> None:
    """One replica, several, pipelines and both ZeRO stages give the same bits, computed in bf16 over fp32."""
    outcomes = results(mains.train_bf16, (1, 1, 3), (2, 1, 3), (1, 3, 2), (2, 2, 3))
    assert len({(r.digest, r.losses) for r in outcomes}) == 1
    assert {r.dtypes for r in outcomes} == {("torch.float32",)}
    assert {r.seen for r in outcomes} == {("torch.bfloat16",)}
    assert outcomes[0].digest != fp32.digest
    assert outcomes[0].losses == pytest.approx(fp32.losses, rel=0.02)


def test_stage_boundaries_keep_the_dtype_of_activations() -> None:
    """Floating-point inputs are cast, and activations that a buffer has made fp32 are sent as fp32."""
    outcomes = results(mains.train_promoting, (1, 1, 3), (3, 1, 2), (1, 2, 3))
    assert len({(r.digest, r.losses) for r in outcomes}) == 1
    assert {r.seen for r in outcomes} == {("torch.float32",)}


def test_an_unknown_precision_is_refused() -> None:
    """The message lists the known ones."""
    with pytest.raises(UsageError, match='precision must be one of "fp32", "bf16", "fp16"; it is \'half\''):
        run_alone(lambda run: run.shard(Model, precision="half"))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("main", [mains.train_full, mains.train_selective])
def test_recomputation_changes_no_bit(fp32: Any, main: Any) -> None:
    """Blocks with dropout computed again, whole or in part, end with the digest of a run that kept everything."""
    outcomes = results(main, (1, 1, 3), (2, 2, 3))
    assert {(r.digest, r.losses) for r in outcomes} == {(fp32.digest, fp32.losses)}


def test_recomputation_changes_no_bit_in_bf16() -> None:
    """The second pass makes the same casts as the first."""
    outcomes = [*results(mains.train_selective_bf16, (2, 1, 2), (1, 2, 3)), *results(mains.train_bf16, (1, 1, 3))]
    assert len({(r.digest, r.losses) for r in outcomes}) == 1


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count products with weights and other operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products = self.others = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            self.products += 1
        elif func is torch.ops.aten.gelu.default:
            self.others += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("choice", "products", "others"), [("none", 6, 1), ("selective", 6, 2), ("full", 8, 2)])
def test_recomputation_is_selective_or_full(choice: str, products: int, others: int) -> None:
    """Selectively the products are kept and the rest is computed again; fully all is. Names stay."""
    block = Block(6, 0.1)
    names = [name for name, _ in block.named_parameters()]
    recompute([("blocks.0", block)], Recompute(choice), Randomness(1, device_at("cpu", 0)))
    with Products() as seen:
        block(torch.randn(2, 3, 6, requires_grad=True)).sum().backward()
    assert (seen.products, seen.others) == (products, others)
    assert [name for name, _ in block.named_parameters()] == names


@pytest.mark.parametrize("main", [mains.train_fp16, pytest.param(mains.train_fp16_clipped, marks=pytest.mark.slow)])
def test_steps_that_overflow_fp16_are_skipped_alike(main: Any, tmp_path: Path) -> None:
    """Every rank of every layout skips the same steps; a restore elsewhere goes on with the same scale."""
    outcomes = results(main, (1, 1, 3), (2, 2, 3))
    assert len({(r.digest, r.losses, r.skipped) for r in outcomes}) == 1
    skipped = outcomes[0].skipped
    assert skipped[0]
    assert not skipped[-1]
    assert outcomes[0].dtypes == ("torch.float32",)
    first = Orders(layout=Layout(pp=1, dp=3), keep=tmp_path, leave_at=dict.fromkeys(range(3), 6))
    assert {report.ended for report in run_world(main, first)} == {"left"}
    again = results(main, (2, 1, 3), take=tmp_path)
    assert {r.digest for r in again} == {outcomes[0].digest}
    assert {r.skipped for r in again} == {skipped[7:]}


def test_every_token_weighs_the_same() -> None:
    """Sums and counts over lines of different lengths train like one batch with a mean over all tokens."""
    outcomes = results(mains.train_tokens, (1, 1, 3), (2, 2, 3), (1, 3, 2))
    assert len({(r.digest, r.losses) for r in outcomes}) == 1
    assert outcomes[0].losses == pytest.approx(whole_batches(), rel=1e-5)


def whole_batches() -> list[float]:
    """Return the losses of plain steps over the global batch at once, dropout left out by the tests' model."""
    torch.manual_seed(3)
    model = mains.Smooth()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    order = Order(length=37, global_batch=14, micro_batch=2, seed=11)
    data, losses = mains.Lines(), []
    for step in range(3):
        pairs = [data[i] for index in range(7) for i in order.micro_batch_samples(step, index)]
        inputs, targets = (torch.stack(side) for side in zip(*pairs, strict=True))
        total, count = mains.token_loss(model(inputs), targets)
        (total / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total / count))
    return losses


def test_tokens_in_fp16_give_one_digest() -> None:
    """Scale, tokens, clipping and recomputation together."""
    outcomes = results(mains.train_tokens_fp16, (1, 1, 3), (2, 2, 2))
    assert len({(r.digest, r.losses, r.skipped) for r in outcomes}) == 1
    assert not all(outcomes[0].skipped)
