"""A tiny model of speech that leaves layers out by chance, and how it is trained: importable, like a script."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

from elastic3d.training import Run

LAYERS = 3


class Sounds(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sample i is noise drawn from i, of one of two classes."""

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.Generator().manual_seed(index)
        return torch.randn(200, generator=made), torch.tensor(index % 2)


def wav2vec2() -> nn.Module:
    convolutions: dict[str, Any] = {"conv_dim": (8, 8), "conv_kernel": (4, 4), "conv_stride": (4, 4)}
    return Wav2Vec2ForSequenceClassification(
        Wav2Vec2Config(
            **convolutions,
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            classifier_proj_size=8,
            mask_time_prob=0.0,
            layerdrop=0.5,
        )
    )


def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the classes."""
    return nn.functional.cross_entropy(output.logits.float(), target)


def train(run: Run, *, blocks: str | None = None) -> tuple[str, list[int], int]:
    """Train for two steps; return the digest, how often each layer ran on this rank, and in how many micro-batches."""
    model: Any = run.shard(wav2vec2, blocks=blocks, seed=3)
    ran = [0] * LAYERS

    def count(number: int) -> None:
        ran[number] += 1

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = run.batches(Sounds(), global_batch=8, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for number, layer in enumerate(model.wav2vec2.encoder.layers):
        layer.register_forward_hook(lambda *_, number=number: count(number))
    passes = 0
    for batch in batches.until(step=2):
        passes += len(batch.micro_batches)
        run.step(optimizer, loss=run.backward(model, batch, loss_fn), clip=0.5)
    return run.digest(), ran, passes
