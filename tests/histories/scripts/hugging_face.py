"""A script of transformers: a data set of tokens, TrainingArguments and callbacks, driven by elastic3d's Trainer."""

from __future__ import annotations

import sysconfig
import time
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset
from transformers import EarlyStoppingCallback, LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

import elastic3d
from chaos.scripts.train_gpt import arguments, report
from elastic3d.integrations.transformers import Trainer


class Rows(Dataset[dict[str, Any]]):
    """Bytes of one source file as rows; some of each row's labels do not count."""

    def __init__(self, length: int, first: int = 0, rows: int = 200) -> None:
        self.text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()
        self.length, self.first, self.rows = length, first, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, number: int) -> dict[str, Any]:
        start = (self.first + number) * self.length
        ids = list(self.text[start : start + self.length])
        return {"input_ids": ids, "labels": [-100] * (number % 5) + ids[number % 5 :], "path": "argparse.py"}


class Pause(TrainerCallback):
    """Leaves the machine to others before each step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(options.pause)


class Digest(TrainerCallback):
    """Writes the digest of the state at the end."""

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert state.global_step == state.max_steps
        assert [line["step"] for line in state.log_history if "loss" in line] == list(range(4, state.max_steps + 1, 4))
        report(kwargs["run"], options.out)


options = arguments()
config = LlamaConfig(
    vocab_size=256,
    hidden_size=options.width,
    intermediate_size=2 * options.width,
    num_hidden_layers=options.blocks,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=options.context,
)
trainer = Trainer(
    model=lambda: LlamaForCausalLM(config),
    args=lambda: TrainingArguments(
        "nowhere",
        max_steps=options.steps,
        per_device_train_batch_size=options.micro_batch,
        learning_rate=1e-3,
        weight_decay=0.1,
        warmup_steps=3,
        lr_scheduler_type="cosine",
        logging_steps=4,
        eval_strategy="steps",
        eval_steps=6,
        metric_for_best_model="loss",
        seed=options.seed,
    ),
    train_dataset=lambda: Rows(options.context),
    eval_dataset=lambda: Rows(options.context, first=200, rows=6),
    callbacks=[EarlyStoppingCallback(early_stopping_patience=50), Pause, Digest],
    global_batch=options.global_batch,
    blocks="model.layers",
)

if __name__ == "__main__":
    trainer.train(
        store=options.store,
        layout=options.layout,
        events=options.events,
        snapshot_every=options.snapshot_every,
        every=options.checkpoint_every,
        checkpointing=elastic3d.Checkpointing(keep=options.keep),
    )
