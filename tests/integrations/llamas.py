"""A tiny model of transformers, rows of tokens for it, and arguments: what the tests of integrations train."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

VOCABULARY = 61


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
        )
    )


class Rows(Dataset[dict[str, Any]]):
    """Rows of one length; the labels of some tokens do not count, more of them in some rows than in others."""

    def __init__(self, size: int = 8, length: int = 12) -> None:
        self.size, self.length = size, length

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> dict[str, Any]:
        ids = [(number * 7 + place * 3 + place * place * number) % VOCABULARY for place in range(self.length)]
        return {"input_ids": ids, "labels": [-100] * (number % 4) + ids[number % 4 :], "source": f"row {number}"}


def arguments(**more: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "output_dir": "nowhere",
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "logging_steps": 1,
        "use_cpu": True,
        "seed": 5,
    }
    return TrainingArguments(**{**given, **more})


def perplexed(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """A number for each sample."""
    return output.logits.float().logsumexp(-1).mean(-1)
