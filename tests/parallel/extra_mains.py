"""Mains for the tests' worlds whose scripts keep state of their own beside the model."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from elastic3d.parallel.state import local
from elastic3d.training import Run
from tests.parallel import tensors
from tests.parallel.models import Model, Sentences, loss_fn

STEPS = 4


class Curriculum:
    """Values of all kinds, which follow the steps: numbers, texts, nested ones, and tensors alike on all ranks."""

    def __init__(self) -> None:
        self.drawn = torch.Generator().manual_seed(5)
        self.seen: dict[str, Any] = {"losses": [], "span": (0.1, -0.0), 7: {"best": float("inf")}}
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


def followed(run: Run, *, plan: str = "none", steps: int = STEPS, drop: bool = False) -> Any:
    """Train with averages that are updated after each step, at the beginning of each, and by functions of the script.

    plan: "none", or "tensor" for a model that tensor parallelism cuts. Returns the digest of all that is kept, and what
    the curriculum has seen.
    """
    data, cut = Sentences(), None
    if plan == "tensor":
        data, cut = Sentences(tensors.VOCABULARY, tensors.LENGTH), tensors.SEQUENCE
    model = run.shard(tensors.Decoder if cut else Model, blocks="blocks", tensor=cut, seed=3)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
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
