"""Mains for the tests' worlds: importable, like a user's script."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from elastic3d.data import Growing, Mixture, Packed, Stratified, check
from elastic3d.parallel.reduction.ordered import Ordered
from elastic3d.parallel.state import local
from elastic3d.training import Run
from tests.data.streams import Stateful, sentence
from tests.parallel.models import Model, Plain, Recomputing, Sentences, loss_fn

STEPS = 4


def train(run: Run, *, steps: int = STEPS, dtype: torch.dtype | None = None, leaf: int = 1) -> str:
    """Train the small model with dropout, clipping, a schedule and 7 micro-batches a step; return the digest."""
    model = run.shard(lambda: Model(dtype=dtype), blocks="blocks", seed=3, leaf=leaf)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    batches = run.batches(Sentences(), global_batch=14, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, schedule=schedule, batches=batches)
    for batch in batches.until(step=steps):
        loss = run.backward(model, batch, loss_fn)
        run.step(optimizer, schedule, loss=loss, clip=0.5)
    return run.digest()


def train_head(run: Run) -> str:
    """Train the last layer alone, with clipping: nothing is frozen, and the optimizer has no other parameters."""
    model = run.shard(Model, blocks="blocks", seed=3)
    last = [parameter for name, parameter in model.named_parameters() if name.startswith("head.")]
    optimizer = torch.optim.SGD([{"params": last}], lr=0.5)
    batches = run.batches(Sentences(), global_batch=8, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=STEPS):
        run.step(optimizer, loss=run.backward(model, batch, loss_fn), clip=0.1)
    return run.digest()


class Twice(Model):
    """The model with its blocks run twice over."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(tokens))
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class TiedTwice(Plain):
    """A model that runs on meta, with tied ends, which is no chain, and blocks that are run twice over."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(tokens))
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Skips(Plain):
    """The model with blocks that some micro-batches leave out by chance, as stochastic depth does."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(tokens))
        for block in self.blocks:
            if not self.training or torch.rand([]) > 0.5:
                x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Drops(Plain):
    """The model with a block that always runs, and whose output each second pass drops."""

    passes = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(tokens))
        self.passes += 1
        for number, block in enumerate(self.blocks):
            came = block(x)
            if number != 1 or self.passes % 2:
                x = came
        logits: torch.Tensor = self.head(x)
        return logits


class Spares(Plain):
    """The model with a block whose output nothing ever uses, and parameters that nothing does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].spare = nn.Parameter(torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(tokens))
        for number, block in enumerate(self.blocks):
            came = block(x)
            x = x if number == 2 else came
        logits: torch.Tensor = self.head(x)
        return logits


def train_twice(
    run: Run, *, blocks: str | None = "blocks", precision: str = "fp32", build: type[nn.Module] = Twice
) -> str:
    """Train a model whose blocks run twice."""
    model = run.shard(build, blocks=blocks, seed=3, precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = run.batches(Sentences(), global_batch=8, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=2):
        run.step(optimizer, loss=run.backward(model, batch, loss_fn), clip=0.5)
    return run.digest()


def train_noted(run: Run, *, clip: float | None = None, skip: bool = False) -> list[str]:
    """Make one step; return in which order it sent the vote, finished its sums and updated."""
    noted: list[str] = []
    model = run.shard(lambda: Model(dropout=0.0), blocks="blocks", seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batches = run.batches(Sentences(), global_batch=8, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    optimizer.register_step_pre_hook(lambda *_: noted.append("update"))
    sent, finished = dist.all_reduce, Ordered.finish

    def send(*args: Any, **options: Any) -> Any:
        noted.append("vote")
        return sent(*args, **options)

    def finish(reduction: Ordered) -> None:
        finished(reduction)
        noted.append("sums")

    dist.all_reduce, Ordered.finish = send, finish  # type: ignore[method-assign]
    for batch in batches.until(step=1):
        run.step(optimizer, loss=run.backward(model, batch, loss_fn), clip=clip, skip_nonfinite=skip)
    return noted


def train_checkpointed(run: Run) -> str:
    """Train with activation checkpointing inside the model's forward, which recomputes whole blocks."""
    model = run.shard(Recomputing, blocks="blocks", seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9)
    batches = run.batches(Sentences(), global_batch=8, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=3):
        run.step(optimizer, loss=run.backward(model, batch, loss_fn))
    return run.digest()


def train_bfloat16(run: Run) -> str:
    """Train the small model with bf16 parameters."""
    return train(run, steps=3, dtype=torch.bfloat16)


def train_fast(run: Run, *, compress: str | None = None, width: int = 7) -> list[float]:
    """Train with the backend's own reduction, or a compressed one; return the losses."""
    model = run.shard(
        lambda: Model(dropout=0.0, width=width), blocks="blocks", seed=3, reduction="fast", compress=compress
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = run.batches(Sentences(), global_batch=14, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    losses = []
    for batch in batches.until(step=STEPS):
        loss = run.backward(model, batch, loss_fn)
        run.step(optimizer, loss=loss, clip=0.5)
        losses.append(loss.value)
    return losses


def thaw_fast(run: Run, *, compress: str | None) -> dict[str, list[bool]]:
    """Train with the fast reduction, and some parameters frozen until step 2; return of each whether it moved."""
    model = run.shard(lambda: Model(dropout=0.0), blocks="blocks", seed=3, reduction="fast", compress=compress)
    parts = ("blocks.1.up", "blocks.2.up", "blocks.2.norm", "blocks.2.down")
    held = {name: one for name, one in model.named_parameters() if name.startswith(("blocks.2.", "blocks.1.up"))}
    for one in held.values():
        one.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = run.batches(Sentences(), global_batch=8, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    begun = {name: local(one).clone() for name, one in held.items() if name.startswith(parts) and local(one).numel()}
    moved: dict[str, list[bool]] = {name: [] for name in begun}
    for batch in batches.until(step=5):
        for one in held.values():
            one.requires_grad_(batch.step >= 2)
        run.step(optimizer, loss=run.backward(model, batch, loss_fn))
        for name, was in begun.items():
            moved[name].append(not torch.equal(local(held[name]), was))
    return moved


def train_with_groups(run: Run, *, thaw: int | None = None, refreeze: int | None = None) -> str:
    """Train with a parameter group that is empty on some stages, frozen parameters and a learning rate per group.

    thaw: the step from which on all parameters are trained, as a whole block that was frozen; refreeze: from which on
    they no longer are.
    """
    model = run.shard(lambda: Model(dropout=0.0), blocks="blocks", seed=3)
    heads = [p for name, p in model.named_parameters() if name.startswith("head")]
    others = [p for name, p in model.named_parameters() if not name.startswith("head")]
    frozen = ("blocks.1.up",) if thaw is None else ("blocks.1.up", "blocks.2.", "embed")
    held = [parameter for name, parameter in model.named_parameters() if name.startswith(frozen)]

    def train_held(wanted: bool) -> None:
        for parameter in held:
            parameter.requires_grad_(wanted)

    train_held(False)
    optimizer = torch.optim.AdamW([{"params": others}, {"params": heads, "lr": 1e-3}], lr=1e-2, betas=(0.8, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 1e-3], total_steps=20)
    batches = run.batches(Sentences(), global_batch=8, micro_batch=2, seed=1)
    run.restore(model=model, optimizer=optimizer, schedule=schedule, batches=batches)
    for batch in batches.until(step=5):
        if thaw is not None:
            train_held(thaw <= run.steps < (refreeze or run.steps + 1))
        run.step(optimizer, schedule, loss=run.backward(model, batch, loss_fn), clip=1.0)
    return run.digest()


def initial(run: Run) -> dict[str, torch.Tensor]:
    """Return this rank's initial parameters, gathered over its replicas."""
    model = run.shard(lambda: Model(), blocks="blocks", seed=3)
    return whole_parameters(model)


def initial_large(run: Run) -> dict[str, torch.Tensor]:
    """The same for a model said to be too large to be built whole."""
    model = run.shard(lambda: Plain(), blocks="blocks", seed=3, whole_below=0)
    return whole_parameters(model)


def whole_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of this stage, whole."""
    parameters = {}
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        value = parameter.detach()
        parameters[name] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
    return parameters


def measured(run: Run) -> None:
    """Go up to restore, as a measuring trainer does."""
    model = run.shard(lambda: Model(), blocks="blocks")
    assert run.measuring
    optimizer = torch.optim.AdamW(model.parameters())
    batches = run.batches(Sentences(), global_batch=14, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    raise AssertionError("restore returned")


def measured_on_meta(run: Run) -> None:
    """Measure a model whose forward runs on meta."""
    model = run.shard(lambda: Plain(), blocks="blocks")
    assert all(parameter.is_meta for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    batches = run.batches(Sentences(), global_batch=14, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)


class Observed(Plain):
    """Notes on which device its forward runs."""

    devices: ClassVar[list[str]] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.devices.append(tokens.device.type)
        return super().forward(tokens)


def observed(run: Run) -> list[str]:
    """Make a step; return where forward ran."""
    model = run.shard(lambda: Observed(), blocks="blocks")
    optimizer = torch.optim.AdamW(model.parameters())
    batches = run.batches(Sentences(), global_batch=8, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=1):
        run.step(optimizer, loss=run.backward(model, batch, loss_fn))
    return Observed.devices


def dies(run: Run) -> None:
    """Kill rank 1 in the middle of a step."""
    model = run.shard(lambda: Model(), blocks="blocks")
    optimizer = torch.optim.AdamW(model.parameters())
    batches = run.batches(Sentences(), global_batch=8, micro_batch=2)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=50):
        if run.rank == 1 and run.steps == 2:
            os._exit(9)
        run.step(optimizer, loss=run.backward(model, batch, loss_fn))


def fails(run: Run) -> None:
    """Raise in the user's loss on every rank."""
    model = run.shard(lambda: Model(), blocks="blocks")
    optimizer = torch.optim.AdamW(model.parameters())
    batches = run.batches(Sentences(), global_batch=8, micro_batch=2)
    run.restore(model=model, optimizer=optimizer, batches=batches)

    def wrong(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a bug of the user's")

    for batch in batches.until(step=50):
        run.backward(model, batch, wrong)


def train_growing(run: Run) -> str:
    """Train with 3, then 7, then 4 micro-batches a step."""
    model = run.shard(lambda: Model(), blocks="blocks", seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sizes = Growing((0, 6), (2, 14), (3, 8))
    batches = run.batches(Sentences(), global_batch=sizes, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=STEPS):
        run.step(optimizer, loss=run.backward(model, batch, loss_fn), clip=0.5)
    assert check(run.ledger, batches.order).whole
    return run.digest()


def train_stream(run: Run) -> str:
    """Train on a stream whose position only its own state can restore, with a growing batch."""
    model = run.shard(lambda: Model(), blocks="blocks", seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = run.batches(Stateful(), global_batch=Growing((0, 6), (2, 10)), micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=STEPS):
        run.step(optimizer, loss=run.backward(model, batch, loss_fn), clip=0.5)
    assert check(run.ledger, batches.order).whole
    return run.digest()


def train_stratified(run: Run) -> str:
    """Train on a quarter of the sentences with each of two labels, which a step of 6 cannot have exactly."""
    sentences = Sentences()
    return _train_on(run, Stratified(sentences, labels=[n % 4 == 1 for n in range(len(sentences))]))


def train_mixture(run: Run) -> str:
    """Train on two sources of one weight each, the second of which is read more than once."""
    return _train_on(run, _mixed([(0, {"all": 0.7, "few": 0.3})]))


def train_mixture_changed(run: Run) -> str:
    """Train on the same, with other weights and one more source from step 3 on."""
    return _train_on(run, _mixed([(0, {"all": 0.7, "few": 0.3}), (3, {"all": 0.2, "few": 0.5, "new": 0.3})], new=4))


def _mixed(weights: Any, **more: int) -> Mixture:
    few: dict[str, Any] = {name: [sentence(n) for n in range(size)] for name, size in {"few": 3, **more}.items()}
    return Mixture({"all": Sentences(), **few}, weights=weights)


def _train_on(run: Run, dataset: Any) -> str:
    model = run.shard(lambda: Model(), blocks="blocks", seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = run.batches(dataset, global_batch=Growing((0, 6), (3, 10)), micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=STEPS):
        run.step(optimizer, loss=run.backward(model, batch, loss_fn), clip=0.5)
    assert check(run.ledger, batches.order).whole
    return run.digest()


def train_packed(run: Run) -> str:
    """Train on packed documents, which have no targets at their ends, with a growing batch.

    In step 0 no micro-batch uses `odd` of one block, but padding would, if it drew random numbers of its own.
    """
    model = run.shard(lambda: Model(), blocks="blocks", seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    packed = Packed([sentence(n)[0][: n % 5 + 1] for n in range(60)], length=6, seed=4, positions=False)
    batches = run.batches(packed, global_batch=Growing((0, 6), (2, 10)), micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=STEPS):
        run.step(optimizer, loss=run.backward(model, batch, loss_fn), clip=0.5)
    assert check(run.ledger, batches.order).whole
    return run.digest()


def pad(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad to the longest, as collators for transformers do; the first words are masked by chance."""
    longest = max(len(sample["tokens"]) for sample in samples)
    made = {}
    for name, filler in (("tokens", 0), ("labels", -100)):
        made[name] = torch.tensor([one[name] + [filler] * (longest - len(one[name])) for one in samples])
    made["tokens"][:, 0] = torch.where(torch.rand(len(samples)) < 0.5, made["tokens"][:, 0], 0)
    return made


def train_padded(run: Run, *, one_shape: bool = False) -> str:
    """Train on dictionaries of several lengths, padded to the longest of their micro-batch, or all to one."""
    model = run.shard(lambda: Model(), blocks="blocks", seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    texts = [sentence(n)[0].tolist()[: 5 if one_shape else n % 4 + 2] for n in range(37)]
    dataset = [{"tokens": text, "labels": [*text[1:], -100]} for text in texts]
    batches = run.batches(dataset, global_batch=14, micro_batch=2, seed=11, collate=pad, one_shape=one_shape)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=STEPS):
        run.step(optimizer, loss=run.backward(model, batch, loss_fn), clip=0.5)
    assert check(run.ledger, batches.order).whole
    return run.digest()


def train_padded_alike(run: Run) -> str:
    """Train on dictionaries that are padded to one length."""
    return train_padded(run, one_shape=True)


class TurnedBy(Sentences):
    """Samples that are turned by so many tokens. only: those of these numbers, all by default."""

    def __init__(self, by: int) -> None:
        super().__init__()
        self.by = by
        self.only = range(len(self))

    def __getitem__(self, index: int) -> Any:
        inputs, targets = super().__getitem__(index)
        return inputs.roll(self.by) if index in self.only else inputs, targets


def digest_of_samples(run: Run, *, apart: int = 0, first: bool = False) -> str:
    """Return what states say of the first micro-batch. apart: by which the samples of ranks are turned.

    first: only one of the first micro-batch is.
    """
    model = run.shard(Model, blocks="blocks", seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dataset = TurnedBy(apart * run.rank)
    batches = run.batches(dataset, global_batch=14, micro_batch=2, seed=11)
    if first:
        number = batches.order.micro_batch_samples(0, 0)[0]
        dataset.only = range(number, number + 1)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    return batches.samples
