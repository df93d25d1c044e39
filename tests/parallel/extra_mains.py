"""Mains for the tests' worlds whose scripts keep state of their own beside the model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from elastic3d.parallel.deferred import Deferred
from elastic3d.parallel.state import local
from elastic3d.training import Run
from tests.parallel import tensors
from tests.parallel.models import Block, Model, Sentences, loss_fn

STEPS = 4

follow: Any = get_ema_multi_avg_fn


class Curriculum:
    """Values of all kinds, which follow the steps: numbers, texts, nested ones, and tensors alike on all ranks."""

    def __init__(self) -> None:
        self.drawn = torch.Generator().manual_seed(5)
        self.seen: dict[str | int, Any] = {"losses": [], "span": (0.1, -0.0), 7: {"best": float("inf")}}
        self.weights = [torch.ones(3), torch.zeros((), dtype=torch.int64)]
        self.later: dict[str, torch.Tensor] = {}

    def step(self, loss: float) -> None:
        self.seen["losses"].append(loss)
        self.seen[7]["best"] = min(self.seen[7]["best"], loss)
        self.weights[0] += torch.rand(3, generator=self.drawn)
        self.weights[1] += 1
        self.later["in/use"] = self.weights[0] * loss

    def state_dict(self) -> dict[str, Any]:
        draw = self.drawn.get_state()
        return {"seen": self.seen, "weights": self.weights, "later": self.later, "draw": draw, "none": torch.ones(0, 2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["none"].shape == (0, 2)
        self.seen, self.weights, self.later = state["seen"], state["weights"], state["later"]
        self.drawn.set_state(state["draw"])


class Table(torch.nn.Module):
    """Adds a table of positions and drops some out: a buffer, and no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("values", torch.linspace(-1.0, 1.0, 35).view(5, 7))
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.dropout(x + self.values)
        return out


class Tabled(Model):
    """The model with a table of positions before its blocks, where only the first stage computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = Table()  # type: ignore[assignment]


def followed(run: Run, *, plan: str = "none", steps: int = STEPS) -> Any:
    """Train with averages that are updated after each step, at the beginning of each, and by functions of the script.

    plan: "none", "tensor" for a model that tensor parallelism cuts, or "places" for one with a table beside its blocks.
    Returns the digest of all that is kept, and what the curriculum has seen.
    """
    data, cut = Sentences(), None
    build: Any = Tabled if plan == "places" else Model
    if plan == "tensor":
        data, cut = Sentences(tensors.VOCABULARY, tensors.LENGTH), tensors.SEQUENCE
    model = run.shard(tensors.Decoder if cut else build, blocks="blocks", tensor=cut, seed=3)
    ema = AveragedModel(model, multi_avg_fn=follow(0.9))
    swa = AveragedModel(model, use_buffers=True)
    own = AveragedModel(model, avg_fn=lambda average, weight, number: average + (weight - average) / (number + 3))
    curriculum = Curriculum()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = run.batches(data, global_batch=14, micro_batch=2, seed=11)
    extra = {"ema": ema, "swa": swa, "own": own, "curriculum": curriculum}
    run.restore(model=model, optimizer=optimizer, batches=batches, extra=extra)
    for batch in batches.until(step=steps):
        swa.update_parameters(model)
        loss = run.backward(model, batch, loss_fn)
        run.step(optimizer, loss=loss, clip=0.5)
        ema.update_parameters(model)
        own.update_parameters(model)
        curriculum.step(loss.item())
    assert int(ema.n_averaged) == int(swa.n_averaged) == int(own.n_averaged) == steps
    pairs = zip(ema.module.parameters(), model.parameters(), strict=True)
    assert not all(torch.equal(local(average), local(weight)) for average, weight in pairs)
    return run.digest(), curriculum.seen, {key: value.tolist() for key, value in curriculum.later.items()}


class Counted:
    """What is given to it, as values or tensors."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def unlike(run: Run, *, at: int, what: str) -> None:
    """Train with something that becomes different on the last rank: when it is built, or after some steps."""
    model = run.shard(Model, blocks="blocks", seed=3)
    counted = Counted(seen=0, table={"same": torch.zeros(2), "rows": torch.zeros(3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batches = run.batches(Sentences(), global_batch=8, micro_batch=2, seed=11)

    def change() -> None:
        if run.steps == at and run.rank == run.world - 1:
            if what == "value":
                counted.state["seen"] = 17
            elif what == "tensor":
                counted.state["table"]["rows"][1] = 1e-30
            elif what == "new":
                counted.state["table"]["new"] = torch.ones(1)
            else:
                counted.state["table"] = {name: one.double() for name, one in counted.state["table"].items()}

    change()
    run.restore(model=model, optimizer=optimizer, batches=batches, extra={"counted": counted})
    for batch in batches.until(step=STEPS):
        run.step(optimizer, loss=run.backward(model, batch, loss_fn))
        counted.state["seen"] += 1
        change()


class CountingBlock(Block):
    """A block with a buffer."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__(width, dropout)
        self.register_buffer("count", torch.zeros(1))


def counting() -> Model:
    """Return the model with such blocks."""
    model = Model()
    model.blocks = torch.nn.ModuleList(CountingBlock(7, 0.2) for _ in range(4))
    return model


def buffered(run: Run) -> None:
    """Train with an average in which a buffer of the last stage is changed on its last rank, after two steps."""
    model = run.shard(counting, blocks="blocks", seed=3)
    ema = AveragedModel(model, multi_avg_fn=follow(0.9), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batches = run.batches(Sentences(), global_batch=8, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches, extra={"ema": ema})
    for batch in batches.until(step=STEPS):
        run.step(optimizer, loss=run.backward(model, batch, loss_fn))
        ema.update_parameters(model)
        for name, buffer in ema.named_buffers():
            if name == "module.blocks.3.count" and run.steps == 2 and run.rank == run.world - 1:
                buffer += 1.0


def averaged(run: Run, *, use_buffers: bool, called: bool) -> int:
    """Train with an average by a list function of the script's own; call it in the end, if it is to be."""
    model = run.shard(Model, blocks="blocks", seed=3)

    def average(averages: Any, weights: Any, number: Any) -> None:
        torch._foreach_lerp_(averages, weights, 0.5)

    ema = AveragedModel(model, multi_avg_fn=average, use_buffers=use_buffers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batches = run.batches(Sentences(), global_batch=8, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches, extra={"ema": ema})
    for batch in batches.until(step=2):
        run.step(optimizer, loss=run.backward(model, batch, loss_fn))
        ema.update_parameters(model)
    if called:
        ema(torch.zeros(1, 5, dtype=torch.int64))
    return int(ema.n_averaged)


def on_one_rank(run: Run) -> None:
    """Keep something on the first rank alone."""
    model = run.shard(Model, blocks="blocks", seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batches = run.batches(Sentences(), global_batch=8, micro_batch=2, seed=11)
    extra = {"counted": Counted()} if run.rank == 0 else None
    run.restore(model=model, optimizer=optimizer, batches=batches, extra=extra)


def reference(run: Run, *, kept: bool, steps: int) -> tuple[int, dict[str, torch.Tensor], str]:
    """Train with a copy of the weights that it began with, kept or not.

    Returns how often initial weights were made, what this rank has of the copy, and the digest.
    """
    made, make = [], Deferred.make

    def counted(deferred: Deferred) -> None:
        made.append(deferred)
        make(deferred)

    Deferred.make = counted  # type: ignore[method-assign, assignment]
    model = run.shard(Model, blocks="blocks", seed=3)
    first = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batches = run.batches(Sentences(), global_batch=8, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches, extra={"first": first} if kept else None)
    for batch in batches.until(step=steps):
        run.step(optimizer, loss=run.backward(model, batch, loss_fn))
    return len(made), {name: local(one).clone() for name, one in first.named_parameters()}, run.digest()
