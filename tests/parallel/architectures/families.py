"""Tiny transformers models with random weights, and how they are trained: importable, like a script."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from elastic3d.training import Run
from tests.parallel.models import VOCABULARY, Sentences, loss_fn

STEPS = 3
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=1))


def qwen2() -> nn.Module:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=1))


def qwen3() -> nn.Module:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=8))


def wide_llama() -> nn.Module:
    """A llama that two tensor-parallel ranks and four stages can share."""
    sizes = {**SIZES, "vocab_size": VOCABULARY + 1, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2))


def mixtral() -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2))


def gpt_neox() -> nn.Module:
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, hidden_dropout=0.1, attention_dropout=0.1))


UNTIED: dict[str, Any] = {**SIZES, "tie_word_embeddings": False}


def gpt2(**options: Any) -> nn.Module:
    """Learned positions and dropout between the embeddings and the blocks."""
    return GPT2LMHeadModel(GPT2Config(**{**UNTIED, **options}))


def opt() -> nn.Module:
    """Positions with an offset, a projection before the blocks and one after them."""
    sizes = {**UNTIED, "ffn_dim": UNTIED["intermediate_size"]}
    return last_registered(OPTForCausalLM(OPTConfig(**sizes, word_embed_proj_dim=8)))


def last_registered(model: nn.Module) -> nn.Module:
    """Return an OPT whose modules after the blocks are registered after them, too."""
    decoder: Any = model.get_submodule("model.decoder")
    for name in ("final_layer_norm", "project_out"):
        last = getattr(decoder, name)
        delattr(decoder, name)
        setattr(decoder, name, last)
    return model


def phi() -> nn.Module:
    """A dropout before the blocks that is registered after them."""
    return PhiForCausalLM(PhiConfig(**UNTIED, embd_pdrop=0.1))


def gemma2() -> nn.Module:
    """Embeddings that are scaled, and logits that are capped."""
    return Gemma2ForCausalLM(Gemma2Config(**UNTIED, num_key_value_heads=1, head_dim=8, sliding_window=4))


def bloom() -> nn.Module:
    """A norm of the embeddings, biases made from shapes, and blocks that return their attention, too."""
    return BloomForCausalLM(BloomConfig(**UNTIED, hidden_dropout=0.1))


def granite() -> nn.Module:
    """Embeddings that are scaled before the blocks, and logits that are after the head."""
    scales = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5}
    return GraniteForCausalLM(GraniteConfig(**UNTIED, **scales, num_key_value_heads=1))


FAMILIES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "llama": (llama, "model.layers"),
    "qwen2": (qwen2, "model.layers"),
    "qwen3": (qwen3, "model.layers"),
    "wide_llama": (wide_llama, "model.layers"),
    "mixtral": (mixtral, "model.layers"),
    "gpt_neox": (gpt_neox, "gpt_neox.layers"),
    "gpt2": (gpt2, "transformer.h"),
    "opt": (opt, "model.decoder.layers"),
    "phi": (phi, "model.layers"),
    "gemma2": (gemma2, "model.layers"),
    "bloom": (bloom, "transformer.h"),
    "granite": (granite, "model.layers"),
}


class Masked(Dataset[tuple[dict[str, torch.Tensor], torch.Tensor]]):
    """Sentences with some of their last tokens masked, as dictionaries that transformers models accept."""

    def __len__(self) -> int:
        return len(Sentences())

    def __getitem__(self, index: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        words, target = Sentences()[index]
        mask = torch.ones_like(words)
        mask[len(mask) - index % 3 :] = 0
        return {"input_ids": words, "attention_mask": mask}, target


def logits_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Return the loss as users of transformers write it."""
    return loss_fn(output.logits, target)


def train(run: Run, *, family: str, masked: bool = False, **options: Any) -> tuple[str, list[float]]:
    """Train a family with clipping and 4 micro-batches a step; options are `run.shard`'s. Return digest and losses."""
    build, blocks = FAMILIES[family]
    model = run.shard(build, blocks=blocks, seed=3, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dataset: Any = Masked() if masked else Sentences()
    batches = run.batches(dataset, global_batch=8, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    losses = []
    for batch in batches.until(step=STEPS):
        loss = run.backward(model, batch, logits_loss)
        run.step(optimizer, loss=loss, clip=0.5)
        losses.append(loss.value)
    return run.digest(), losses


def trainer(family: str, **options: Any) -> Callable[[Run], Any]:
    """Return a main that trains a family."""
    return partial(train, family=family, **options)
