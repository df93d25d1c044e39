"""Samples of every usual form, and what a script's `collate` makes of them, as micro-batches."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic3d.data import Batches, Order, Share
from elastic3d.data.collating import digest_of
from elastic3d.errors import UsageError
from elastic3d.parallel.foreign import Caller
from elastic3d.training import Run, run_alone
from elastic3d.training.standalone import StandalonePort
from elastic3d.values import ModelProfile

TEXTS: list[Any] = [{"input_ids": list(range(1, 2 + n % 5)), "labels": list(range(1, 2 + n % 5))} for n in range(23)]


def pad(samples: list[Any]) -> Any:
    """As transformers' collators: another kind of mapping, padded to the longest, with words left out by chance."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    words = torch.tensor([one["input_ids"] + [0] * (longest - len(one["input_ids"])) for one in samples])
    kept = torch.rand(words.shape) < 0.8
    return UserDict({"input_ids": words * kept, "labels": words, "mask": (words > 0).long()})


class Stream:
    """The texts in turn."""

    def __iter__(self) -> Iterator[Any]:
        return iter(TEXTS)


def made(dp: int, dataset: Any = TEXTS, workers: int = 0) -> dict[tuple[int, int], Any]:
    """Return every counted micro-batch of three steps, over all dp ranks."""
    parts: dict[tuple[int, int], Any] = {}
    for index in range(dp):
        share = Share(dp=dp, index=index)
        batches = Batches(dataset, global_batch=10, micro_batch=2, seed=5, share=share, collate=pad, workers=workers)
        with nullcontext() if workers else pytest.warns(UserWarning, match="the data set draws"):
            for batch in batches.until(step=3):
                parts |= {(batch.step, p.index): (p.input, p.target) for p in batch.micro_batches if p.counts}
                batches.step += 1
    return parts


def same(one: Any, other: Any) -> bool:
    (inputs, target), (others, another) = one, other
    return (
        isinstance(inputs, dict)
        and inputs.keys() == others.keys() == {"input_ids", "mask"}
        and all(torch.equal(inputs[name], others[name]) for name in inputs)
        and torch.equal(target, another)
    )


@pytest.mark.parametrize("dataset", [TEXTS, Stream()], ids=["numbered", "stream"])
def test_a_padded_micro_batch_is_the_same_in_every_layout(dataset: Any) -> None:
    """Its length, and what collate= draws, depend on its own samples alone; so in a thread and in processes."""
    one = made(1, dataset)
    assert len(one) == 15
    assert len({inputs["input_ids"].shape for inputs, _ in one.values()}) > 1
    for other in (made(2, dataset), made(3, dataset), made(1, dataset, workers=1)):
        assert one.keys() == other.keys()
        assert all(same(one[key], other[key]) for key in one)


def one_batch(dataset: Any, **options: Any) -> Any:
    part = next(Batches(dataset, global_batch=2, micro_batch=2, seed=0, **options).until(step=1)).micro_batches[0]
    return part.input, part.target


def test_a_dictionary_is_an_input_and_its_labels() -> None:
    """Lists of numbers are tensors: stacked, never transposed; the target may be called label, too."""
    inputs, target = one_batch([{"input_ids": [1, 2, 3], "x": np.ones(2), "labels": [4, 5, 6]}] * 2)
    assert torch.equal(inputs["input_ids"], torch.tensor([[1, 2, 3]] * 2))
    assert inputs["x"].shape == (2, 2)
    assert torch.equal(target, torch.tensor([[4, 5, 6]] * 2))
    assert torch.equal(one_batch([{"x": torch.ones(1), "label": 1}] * 2)[1], torch.tensor([1, 1]))


def test_the_order_of_a_dictionarys_entries_means_nothing() -> None:
    """Lines of JSON have them as whoever wrote them liked; entries that others lack are named."""
    samples = [{"a": [1, 2], "b": [3], "labels": 1}, {"labels": 1, "b": [3], "a": [1, 2]}]
    inputs, target = one_batch(samples)
    assert {name: value.tolist() for name, value in inputs.items()} == {"a": [[1, 2]] * 2, "b": [[3]] * 2}
    assert target.tolist() == [1, 1]
    pairs = [({"x": torch.ones(1), "y": {"b": 1, "a": 2}}, 0), ({"y": {"a": 2, "b": 1}, "x": torch.ones(1)}, 0)]
    assert one_batch(pairs)[0]["y"]["a"].tolist() == [2, 2]
    with pytest.raises(
        UsageError, match=r"\['a'\] \[2\], \['[bc]'\] \[1\], \[\] and sample . .* \['[bc]'\] \[1\], \[\]; pad"
    ):
        one_batch([{"a": [1, 2], "b": [3], "labels": 1}, {"a": [1, 2], "c": [3], "labels": 1}])
    with pytest.raises(UsageError, match=r"\['a'\] list, \[\]"):
        one_batch([{"a": [], "labels": 1}, {"labels": 1}])


def test_halves_of_a_pair_may_be_what_tokenizers_return() -> None:
    """Such a UserDict is as a dictionary is: its tensors are moved to the device, cast, and told from others."""
    encoded = [(UserDict(ids=torch.tensor([n, n])), UserDict(ids=torch.tensor([n]))) for n in range(2)]
    for samples, collate in ((encoded, None), ([0, 0], lambda samples: encoded[1])):
        inputs, target = one_batch(samples, collate=collate)
        assert type(inputs) is type(target) is dict
    assert digest_of(one_batch(encoded)) != digest_of(one_batch(encoded[::-1]))
    with pytest.raises(UsageError, match="must be of one shape"):
        one_batch([encoded[0], (UserDict(ids=torch.ones(3)), encoded[0][1])])


def test_samples_and_results_that_are_no_pair_are_refused_by_name() -> None:
    """With what would do, and with the sample for which it was."""
    with pytest.raises(
        UsageError, match=r"sample \d+ of the data set is a dictionary without an entry 'labels'.* 'ids'"
    ):
        one_batch([{"ids": [1]}] * 2)
    with pytest.raises(UsageError, match=r"sample \d+ of the data set is int"):
        one_batch([7, 8])
    with pytest.raises(
        UsageError, match=r"or a dictionary with an entry 'labels'; what collate= returns is tuple of 3"
    ):
        one_batch([7, 8], collate=lambda samples: (1, 2, 3))
    with pytest.raises(UsageError, match=r"what collate= returns is a dictionary without an entry 'labels'.*nothing"):
        one_batch([7, 8], collate=lambda samples: {})
    with pytest.raises(UsageError, match="collate= takes a function of a list of samples, not int"):
        one_batch([7, 8], collate=3)
    with pytest.raises(UsageError, match=r"say how as run.batches\(..., collate=\)"):
        one_batch([{"x": [1], "labels": 0}, {"x": [1, 2], "labels": 0}])
    with pytest.raises(ValueError, match="expected sequence of length") as ragged:
        one_batch([{"x": [[1], [1, 2]], "labels": 0}] * 2)
    assert "of the data set" in ragged.value.__notes__[0]
    with pytest.raises(ZeroDivisionError) as raised:
        one_batch([7, 8], collate=lambda samples: 1 // 0)
    assert "collate= of sample" in raised.value.__notes__[0]


class Masked(nn.Linear):
    """A block."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x if mask is None else x * mask.unsqueeze(-1))


class Reader(nn.Module):
    """Takes its input by name, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.blocks = nn.ModuleList(Masked(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 9)

    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, mask)
        out: torch.Tensor = self.head(x)
        return out


def train(run: Run, *, one_shape: bool = False) -> float:
    model = run.shard(Reader, blocks="blocks")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = run.batches(TEXTS, global_batch=4, micro_batch=2, collate=pad, workers=1, one_shape=one_shape)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    loss = None
    for batch in batches.until(step=2):
        loss = run.backward(
            model, batch, lambda output, target: nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
        )
        run.step(optimizer, loss=loss)
    assert loss is not None
    return loss.value


def test_a_script_trains_on_dictionaries_of_several_lengths() -> None:
    """Without any change to data set, collator or model."""
    losses: list[float] = []
    run_alone(lambda run: losses.append(train(run)))
    assert losses[0] > 0.0


class Halved(nn.Embedding):
    """Makes one vector of two tokens."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens[:, ::2])


class Turned(nn.Embedding):
    """Has lengths first, then samples."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens.t())


class Made(Reader):
    """A reader whose blocks get another shape than that of the tokens."""

    def __init__(self, embedding: type[nn.Embedding]) -> None:
        super().__init__()
        self.embed = embedding(9, 4)


def measured(
    build: Callable[[], nn.Module], *, one_shape: bool = False, lengths: tuple[int, ...] = (), **asked: Any
) -> ModelProfile:
    """Return the profile of a run over texts of two to a micro-batch, the i-th of `lengths[i]` tokens."""

    class Profiled(Exception):
        pass

    profiles: list[ModelProfile] = []

    def take(profile: ModelProfile) -> Any:
        profiles.append(profile)
        raise Profiled

    order = Order(length=4, global_batch=4, micro_batch=2, seed=0).samples(0, 4).tolist()
    texts: list[Any] = [None] * 4
    for sample, length in zip(order, lengths or (4, 4, 6, 6), strict=True):
        texts[sample] = {"input_ids": [1] * length, "labels": [1] * length}
    run = Run(StandalonePort(measured=take))
    model = run.shard(build, blocks="blocks", **asked)
    batches = run.batches(texts, global_batch=4, micro_batch=2, seed=0, collate=plain, one_shape=one_shape)
    with pytest.raises(Profiled):
        run.restore(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), batches=batches)
    return profiles[0]


def plain(samples: list[Any]) -> dict[str, torch.Tensor]:
    longest = max(len(sample["labels"]) for sample in samples)
    return {
        name: torch.tensor([sample[name] + [0] * (longest - len(sample[name])) for sample in samples])
        for name in ("input_ids", "labels")
    }


@pytest.mark.parametrize("one_shape", [False, True])
def test_stages_are_planned_for_texts_of_several_lengths(one_shape: bool) -> None:
    """Where activations have the first dims of the input."""
    assert measured(Reader, one_shape=one_shape).unstaged == ""


def test_the_planner_learns_why_stages_cannot_pass_on_several_shapes() -> None:
    """It plans none then, and the script trains without; with one shape nothing is in the way."""
    halved = partial(Made, Halved)
    assert "activations of shape [2, 2, 4] of an input of [2, 4]" in measured(halved).unstaged
    assert measured(halved, one_shape=True).unstaged == ""


class Elsewhere(Reader):
    """A reader that runs on no CPU."""

    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        raise RuntimeError("this kernel is for another device")


def test_a_model_that_cannot_be_tried_is_trained_without_stages() -> None:
    """Where shapes vary; where they do not it is refused, as ever."""
    assert measured(Elsewhere).unstaged == "a pass on the CPU ended with: this kernel is for another device"
    with pytest.raises(RuntimeError, match="another device"):
        measured(Elsewhere, one_shape=True)


class ByValue(Reader):
    """A reader that looks at the tokens."""

    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        assert int(input_ids.min()) >= 0
        return super().forward(input_ids, mask)


def test_a_model_that_reads_values_is_tried_as_a_whole_unless_it_is_large() -> None:
    """Texts of several lengths never have a large model built whole, which nothing else does."""
    assert measured(ByValue).unstaged == ""
    assert "the model is too large to be built for that" in measured(ByValue, whole_below=16).unstaged


def test_a_second_micro_batch_shows_what_one_does_not() -> None:
    """The first one has as many samples as tokens, so that nobody could say which dim is which."""
    turned = measured(partial(Made, Turned), lengths=(2, 2, 3, 3)).unstaged
    assert "made an activation of shape [3, 2, 4], and the next stage expects [2, 3, 4]" in turned


def test_entries_that_forward_does_not_take_are_named() -> None:
    """As columns of a data set that nobody has removed; a dictionary of the model's own is passed as it is."""
    model = Reader()
    with pytest.raises(UsageError, match="forward of Reader has no parameter for its entries 'idx'"):
        Caller(model)(model, {"input_ids": torch.ones(1, 2).long(), "idx": 3})
