"""What is refused before a sequence is cut, and what is found to be the same in chunks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from elastic3d.errors import LayoutError, ModelError, UsageError
from elastic3d.parallel.context.chunks import SequenceChunks, check_chunks, check_length, check_target, cut, length_of
from elastic3d.parallel.context.losses import check_adds_up
from elastic3d.parallel.context.proof import prove
from elastic3d.parallel.context.taking import check_model
from tests.parallel.contexts import VOCABULARY, Decoder, counted, mean

TOKENS = torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(5))


class Counting(Decoder):
    """It counts positions from the first token it is given."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(tokens)


class Averaging(Decoder):
    """It takes the mean of the sequence from each position."""

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        made = super().forward(tokens, positions)
        return made - made.mean(1, keepdim=True)


class ByHand(nn.Module):
    """A block with attention of its own, and no function of torch's."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        scores = x @ x.transpose(1, 2) / x.shape[-1] ** 0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        mixed: torch.Tensor = scores.masked_fill(mask, float("-inf")).softmax(-1) @ x
        return x + mixed


class Masking(nn.Module):
    """A block whose attention is given a mask."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        heads = x.unsqueeze(1)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return x + scaled_dot_product_attention(heads, heads, heads, attn_mask=mask).squeeze(1)


def with_blocks(block: Callable[[], nn.Module]) -> nn.Module:
    model = Decoder(0.0)
    model.blocks = nn.ModuleList([block(), block()])
    return model


def llama(**options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **options,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def test_a_decoder_that_uses_its_positions_is_the_same_in_chunks() -> None:
    """Rotary positions, grouped queries and causal attention."""
    assert prove(lambda: Decoder(0.0), "blocks", TOKENS, 4, seed=1)


def test_a_model_of_transformers_is_the_same_in_chunks() -> None:
    """As it comes; its positions are given to it as position_ids."""
    assert prove(llama, "model.layers", {"input_ids": TOKENS}, 4, seed=1)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Counting(0.0), "let forward take them as 'position_ids' or 'positions'"),
        (lambda: Averaging(0.0), "gives another result when computed in 4 chunks"),
        (lambda: with_blocks(ByHand), "may depend on others by scaled_dot_product_attention alone"),
        (lambda: with_blocks(Masking), "attention in 'blocks.0' is given a mask"),
    ],
    ids=["positions", "mean", "by hand", "mask"],
)
def test_models_that_mix_positions_in_another_way_are_refused(build: Callable[[], nn.Module], words: str) -> None:
    """By a trial on the CPU, where their shapes would fit."""
    with pytest.raises(ModelError, match=words):
        prove(build, "blocks", TOKENS, 4, seed=1)


def test_attention_that_looks_ahead_is_taken_on_trust() -> None:
    """One rank cannot compute its chunks one after the other."""
    assert not prove(lambda: Decoder(0.0, causal=False), "blocks", TOKENS, 4, seed=1)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: nn.Sequential(nn.Conv1d(4, 4, 3)), "module '0' \\(Conv1d\\) mixes neighbouring positions"),
        (lambda: nn.Sequential(nn.MultiheadAttention(4, 2)), "module '0' \\(MultiheadAttention\\) cannot be cut"),
        (lambda: nn.Sequential(nn.LSTM(4, 4)), "module '0' \\(LSTM\\) mixes neighbouring positions"),
        (lambda: llama(attn_implementation="eager"), "computes attention by 'eager'"),
    ],
    ids=["convolution", "multi-head", "recurrent", "eager"],
)
def test_modules_that_cannot_be_cut_are_refused_by_name(build: Callable[[], nn.Module], words: str) -> None:
    """As far as their class or configuration says so."""
    with pytest.raises(ModelError, match=words):
        check_model(build())


def test_a_sliding_window_is_refused() -> None:
    """A short trial would not show it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MistralConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=16,
    )
    with pytest.raises(ModelError, match="sliding window of 16"):
        check_model(transformers.MistralForCausalLM(config))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chunks": 0}, "chunks must be a number"),
        ({"chunks": True}, "chunks must be a number"),
        ({"reduction": "fast"}, 'does not go with reduction="fast"'),
        ({"experts": "blocks.*.experts"}, "does not go with experts="),
        ({"tensor": {}}, "does not go with tensor="),
        ({"recompute": "selective"}, 'does not go with recompute="selective"'),
    ],
    ids=str,
)
def test_arguments_that_do_not_go_together_are_refused(options: dict[str, Any], words: str) -> None:
    """When run.shard is called."""
    asked = {"chunks": 4, "reduction": "ordered", "experts": None, "tensor": None, "recompute": "none"} | options
    with pytest.raises(UsageError, match=words):
        check_chunks(**asked)


def test_samples_that_cannot_be_cut_are_refused() -> None:
    """Their length, an input without sequences, and a target without positions."""
    for length, chunks in ((15, 4), (4, 4)):
        with pytest.raises(ModelError, match=f"length {length} cannot be cut into {chunks} chunks"):
            check_length(length, chunks)
    with pytest.raises(ModelError, match="has no tensor of shape"):
        length_of({"x": torch.zeros(3)})
    with pytest.raises(ModelError, match=r"has none of shape \(batch, 16, ...\)"):
        check_target(torch.zeros(2), 16)


def test_chunks_cover_a_sequence_once_and_later_ranks_are_earlier_chunks() -> None:
    """Each turn has the chunks that follow those of the turn before, in reverse order of ranks."""
    for ranks in (1, 2, 4):
        dealt = [
            [SequenceChunks(count=4, ranks=ranks, rank=rank).mine(turn) for rank in range(ranks)]
            for turn in range(4 // ranks)
        ]
        assert sorted(chunk for turn in dealt for chunk in turn) == [0, 1, 2, 3]
        assert [sorted(turn, reverse=True) for turn in dealt] == dealt
        for turn, owners in enumerate(dealt):
            for rank, chunk in enumerate(owners):
                assert SequenceChunks(count=4, ranks=ranks).owner(chunk) == rank
                assert chunk // ranks == turn
    with pytest.raises(LayoutError, match="cp=3 does not divide the 4 chunks"):
        SequenceChunks(count=4, ranks=3)


def test_only_tensors_over_the_sequence_are_cut() -> None:
    """Others belong to every chunk."""
    given = {"tokens": TOKENS, "kind": torch.zeros(2), "wide": torch.zeros(2, 3)}
    part = cut(given, 16, 1, 4)
    assert torch.equal(part["tokens"], TOKENS[:, 4:8])
    assert part["kind"] is given["kind"]
    assert part["wide"] is given["wide"]


def shifting(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def of_some(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    total, number = counted(logits, target)
    return total / number


def stacked(loss_fn: Callable[..., Any], logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    made = loss_fn(logits, target)
    return torch.stack([one.double() for one in made]) if isinstance(made, tuple) else made


def test_losses_that_are_no_sum_over_positions_are_refused() -> None:
    """A shift within the loss loses the pairs at the ends of chunks; a mean over some positions weighs chunks alike."""
    values = torch.Generator().manual_seed(2)
    logits, target = torch.randn(2, 6, VOCABULARY, generator=values), torch.randint(0, 2, (2, 6), generator=values)
    for fine in (mean, counted):
        check_adds_up(functools.partial(stacked, fine), logits, target, 6)
    for wrong in (shifting, of_some):
        with pytest.raises(UsageError, match="Shift targets in the data set"):
            check_adds_up(functools.partial(stacked, wrong), logits, target, 6)
