"""Mains that evaluate their models between steps."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from elastic3d.errors import UsageError
from elastic3d.training import Run
from tests.data.streams import sentence
from tests.parallel import tensors
from tests.parallel.architectures.mixtures import KINDS
from tests.parallel.logged_mains import STEPS, begun
from tests.parallel.models import Sentences, loss_fn

GLOBAL_BATCH = 16
HELD_OUT = [sentence(number) for number in range(100, 111)]
"""Eleven samples: no number of replicas but one has as many micro-batches of two as another."""


def losses(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each sample's tokens, and their number."""
    each = functional.cross_entropy(output.float().transpose(1, 2), target, reduction="none")
    return each.sum(1), torch.full_like(each[:, 0], each.shape[1])


def evaluate(run: Run) -> tuple[str, list[float], bool]:
    """Evaluate before each step and after the last; return the digest too, and whether the model trains."""
    model, optimizer, batches = begun(run, global_batch=GLOBAL_BATCH)
    values = []
    for batch in batches.until(step=STEPS):
        values.append(run.evaluate(model, HELD_OUT, losses))
        run.step(optimizer, loss=run.backward(model, batch, loss_fn), clip=0.5)
        values.append(run.evaluate(model, HELD_OUT, lambda output, target: losses(output, target)[0]))
    return run.digest(), values, all(module.training for module in model.modules())


def evaluate_parts(run: Run, *, precision: str = "fp32", plan: dict[str, str] | None = None) -> list[float]:
    """Evaluate a decoder whose layers are cut, or computed in 16 bits, between its steps."""
    model = run.shard(tensors.Decoder, blocks="blocks", tensor=plan, seed=3, precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dataset = Sentences(tensors.VOCABULARY, tensors.LENGTH)
    batches = run.batches(dataset, global_batch=14, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    values = []
    for batch in batches.until(step=2):
        values.append(run.evaluate(model, dataset, losses))
        run.step(optimizer, loss=run.backward(model, batch, loss_fn))
    return values


def evaluate_experts(run: Run) -> list[float]:
    """Evaluate a mixture whose experts are spread over the replicas, between its steps."""
    build, blocks, experts, loss = KINDS["own"]
    model = run.shard(build, blocks=blocks, experts=experts, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = run.batches(Sentences(), global_batch=8, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    values = []
    for batch in batches.until(step=2):
        values.append(run.evaluate(model, HELD_OUT, losses))
        run.step(optimizer, loss=run.backward(model, batch, loss))
    return values


def evaluate_wrongly(run: Run) -> list[str]:
    """Return what is said of calls that cannot be right."""
    model, optimizer, batches = begun(run)
    run.evaluate(model, HELD_OUT, losses)  # so that later ones take the model for one that draws nothing

    class Drawing:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            inputs, target = HELD_OUT[index]
            return inputs + torch.randint(1, ()), target

    wrong: list[Any] = [
        lambda: run.evaluate(model, iter(HELD_OUT), losses),  # type: ignore[arg-type]
        lambda: run.evaluate(model, [], losses),
        lambda: run.evaluate(model, HELD_OUT, lambda output, target: losses(output, target)[0].sum()),
        lambda: run.evaluate(model, HELD_OUT, lambda output, target: 1.0),  # type: ignore[arg-type, return-value]
        lambda: run.evaluate(model, Drawing(), losses),
        lambda: run.evaluate(model, HELD_OUT, losses, micro_batch=0),
    ]
    made = [said(call) for call in wrong]
    for batch in batches.until(step=1):
        loss = run.backward(model, batch, loss_fn)
        made.append(said(lambda: run.evaluate(model, HELD_OUT, losses)))
        run.step(optimizer, loss=loss)
    return made


def said(call: Any) -> str:
    try:
        call()
    except UsageError as error:
        return str(error)
    return ""
