"""transformers models with their own tensor-parallel plans, for the tests' worlds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from elastic3d.training import Run
from tests.parallel.architectures.families import SIZES, logits_loss
from tests.parallel.models import Sentences
from tests.parallel.tensors import LENGTH, VOCABULARY

EVEN: dict[str, Any] = SIZES | {"vocab_size": VOCABULARY, "num_attention_heads": 4, "num_key_value_heads": 2}


def llama() -> nn.Module:
    """Its embedding and its head are one tensor."""
    return LlamaForCausalLM(LlamaConfig(**EVEN, tie_word_embeddings=True))


def qwen3() -> nn.Module:
    """Its queries and keys are normed by head."""
    return Qwen3ForCausalLM(Qwen3Config(**EVEN, head_dim=8))


def train(run: Run, build: Any, blocks: str | None) -> tuple[str, list[float], list[float]]:
    """Train with clipping; return digest, losses and norms."""
    model = run.shard(build, blocks=blocks, tensor="auto", seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = run.batches(Sentences(VOCABULARY, LENGTH), global_batch=8, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    losses = []
    for batch in batches.until(step=3):
        loss = run.backward(model, batch, logits_loss)
        run.step(optimizer, loss=loss, clip=0.5)
        losses.append(loss.value)
    return run.digest(), losses, [record.gradient_norm for record in run._port.records]  # type: ignore[attr-defined]


def train_llama(run: Run) -> tuple[str, list[float], list[float]]:
    """Train without stages, which would separate its tied parameters."""
    return train(run, llama, None)


def train_qwen3(run: Run) -> tuple[str, list[float], list[float]]:
    """Train with stages."""
    return train(run, qwen3, "model.layers")
