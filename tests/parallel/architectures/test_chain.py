"""Which models of other libraries the proof of a chain accepts, and which it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elastic3d.errors import ModelError
from elastic3d.parallel import initial
from elastic3d.parallel.pipeline import chain
from tests.parallel.architectures import families

WIDTH = 4
TOKENS = torch.zeros(2, 3, dtype=torch.long)
MASKED = {"tokens": TOKENS, "mask": torch.ones(2, 3)}


class Pair(nn.Module):
    """A block in an older style: arguments by name, and a tuple with nothing else in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, None]:
        hidden = self.linear(hidden)
        return (hidden if mask is None else hidden * mask.unsqueeze(-1)), None


class Model(nn.Module):
    """A chain by names, with a mask beside the tokens, that returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList(Pair() for _ in range(2))
        self.head = nn.Linear(WIDTH, 9)

    def start(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.embed(tokens)
        return out

    def beside(self, tokens: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
        return mask

    def end(self, hidden: torch.Tensor, tokens: torch.Tensor) -> dict[str, Any]:
        return {"cache": None, "scores": [self.head(hidden)]}

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        hidden = self.start(tokens)
        beside = self.beside(tokens, mask)
        for block in self.blocks:
            hidden = block(hidden=hidden[:, :], mask=beside)[0]
        return self.end(hidden, tokens)


class WritesInPlace(Model):
    def start(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().start(tokens).mul_(2.0)


class MaskByChance(Model):
    def beside(self, tokens: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
        return torch.rand(tokens.shape[:2])


class MaskFromTokens(Model):
    def beside(self, tokens: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
        return (tokens != 0).float()


class LastDimIsLength(Model):
    """Takes a table from the input's last dim."""

    def beside(self, tokens: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
        return torch.full((2, 3), float(tokens.shape[-1]))


class HasLoss(Model):
    def end(self, hidden: torch.Tensor, tokens: torch.Tensor) -> dict[str, Any]:
        scores = self.head(hidden)
        return {"loss": nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten()), "scores": scores}


class Shrinks(Model):
    """Unpacks the input's shape."""

    def beside(self, tokens: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
        rows, columns = tokens.shape
        return torch.ones(rows, columns)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_inputs_and_outputs_may_be_tuples_and_dictionaries(device: str) -> None:
    """The chain's tensor is one entry of the input and one place in the output.

    The rest is available on every stage.
    """
    with torch.device(device):
        model = Model()
    proof = chain.prove(model, "blocks", {name: value.to(device) for name, value in MASKED.items()})
    assert (proof.frame.entry, proof.frame.everywhere) == ("tokens", True)
    assert list(proof.templates) == ["blocks.0", "blocks.1"]
    assert not any("forward" in vars(module) for module in model.modules())
    assert not chain.prove(model, "blocks", TOKENS.to(device)).frame.everywhere


class LearnedMask(Model):
    """Gives its blocks what a module with parameters returns."""

    def __init__(self) -> None:
        super().__init__()
        blocks, head = self.blocks, self.head
        del self.blocks, self.head
        self.gate = nn.Embedding(9, 1)
        self.blocks, self.head = blocks, head

    def beside(self, tokens: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
        gates: torch.Tensor = self.gate(torch.arange(tokens.shape[1]))
        return gates.view(1, -1)


REFUSED: list[tuple[Callable[[], nn.Module], str]] = [
    (MaskByChance, "'blocks.1' gets a further argument that was computed from random numbers"),
    (LearnedMask, "'blocks.1' gets a further argument that was computed from module 'gate'"),
]


@pytest.mark.parametrize(("build", "message"), REFUSED, ids=lambda v: getattr(v, "__name__", ""))
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_models_that_stages_would_compute_differently_are_refused(
    build: Callable[[], nn.Module], message: str, device: str
) -> None:
    """Each is named, with what would work."""
    with torch.device(device):
        model = build()
    with pytest.raises(ModelError, match=message):
        chain.prove(model, "blocks", TOKENS.to(device))


@pytest.mark.parametrize(
    ("build", "everywhere"),
    [(WritesInPlace, False), (LastDimIsLength, False), (Shrinks, False), (MaskFromTokens, True), (HasLoss, True)],
)
def test_what_depends_on_shapes_or_the_input_is_a_chain(build: Callable[[], nn.Module], everywhere: bool) -> None:
    """Every stage has the shape of the input, and its values where they are needed."""
    with torch.device("meta"):
        model = build()
    assert chain.prove(model, "blocks", TOKENS.to("meta")).frame.everywhere == everywhere


@pytest.mark.parametrize("family", sorted(set(families.FAMILIES) - {"mixtral"}))
def test_transformers_models_are_chains_on_meta(family: str) -> None:
    """The proof computes nothing, and changes neither model nor configuration."""
    build, blocks = families.FAMILIES[family]
    model: Any = initial.outline(build)
    proof = chain.prove(model, blocks, TOKENS.to("meta"))
    assert not proof.frame.everywhere
    assert getattr(model.config, "use_cache", True)


def test_a_loss_computed_by_the_model_is_computed_on_the_last_stage() -> None:
    """transformers computes it from labels, which every stage has then; the hidden states of all blocks none has."""
    given = {"input_ids": TOKENS.to("meta"), "labels": TOKENS.to("meta")}
    assert chain.prove(initial.outline(families.llama), "model.layers", given).frame.everywhere

    def shows() -> nn.Module:
        return families.LlamaForCausalLM(families.LlamaConfig(**families.SIZES, output_hidden_states=True))

    with pytest.raises(ModelError, match=r"forward returns .*output.hidden_states"):
        chain.prove(initial.outline(shows), "model.layers", TOKENS.to("meta"))


def test_blocks_that_are_left_out_at_random_are_refused() -> None:
    """Stages would draw other numbers, and leave out other blocks."""
    config = families.OPTConfig(**families.UNTIED, ffn_dim=24, layerdrop=1e-9)
    with pytest.raises(ModelError, match="decides by values that are computed from random numbers"):
        chain.prove(families.last_registered(families.OPTForCausalLM(config)), "model.decoder.layers", TOKENS)


def test_recomputation_of_transformers_leaves_a_chain() -> None:
    """Its blocks recompute themselves, with either kind of torch's checkpoint; stand-ins do not."""
    for reenters in (False, True):
        model: Any = initial.outline(families.llama)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reenters})
        assert list(chain.prove(model, "model.layers", TOKENS.to("meta")).early) == ["model.embed_tokens"]


def test_tied_embeddings_across_stages_are_refused() -> None:
    """By name, as transformers ties them."""

    def tied() -> nn.Module:
        config = families.LlamaConfig(**families.SIZES, tie_word_embeddings=True)
        return families.LlamaForCausalLM(config)

    with pytest.raises(ModelError, match=r"'model.embed_tokens.weight' and 'lm_head.weight' are one tensor"):
        chain.prove(initial.outline(tied), "model.layers", TOKENS.to("meta"))
