"""A script of Lightning for torchrun, with checkpoints of ours: lightning_ddp.py STORE STEPS SECONDS_PER_STEP."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from elastic3d.integrations.lightning import checkpoint_io


class Small(LightningModule):
    """Two layers, trained on a few numbers; each epoch is one step."""

    def __init__(self, pause: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
        self.pause = pause

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        time.sleep(self.pause)
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Says(Callback):
    """Says where each worker begins, and each step."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        say(f"begin rank={trainer.global_rank} world={trainer.world_size} step={trainer.global_step} pid={os.getpid()}")

    def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
        if trainer.global_rank == 0:
            say(f"step {trainer.global_step} world={trainer.world_size}")


def say(line: str) -> None:
    os.write(1, f"worker: {line}\n".encode())


def main(store: str, steps: int, pause: float) -> Small:
    torch.manual_seed(1)
    io = checkpoint_io(store, keep=3)
    saves = ModelCheckpoint(dirpath="nowhere", every_n_train_steps=2, save_top_k=-1, save_on_train_epoch_end=False)
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp" if "RANK" in os.environ else "auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        max_steps=steps,
        max_epochs=-1,
        plugins=[io],
        callbacks=[saves, Says()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    model = Small(pause)
    rows = torch.arange(64.0).reshape(16, 4) / 64
    trainer.fit(model, DataLoader(rows, batch_size=16), ckpt_path=io.newest())
    say(f"end step={trainer.global_step} {model.layers[0].weight.double().sum().item()!r}")
    return model


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
