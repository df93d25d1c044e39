"""Models of transformers that begin with weights from files, and adapters in them: importable, like a script."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastic3d.training import Run
from tests.parallel.architectures.families import FAMILIES, logits_loss, wide_llama
from tests.parallel.models import Sentences

STEPS = 2


def saved(build: Callable[[], nn.Module], folder: Path, **options: Any) -> nn.Module:
    """Save a model with other weights than any seed of a run gives, as transformers does it; return it."""
    torch.manual_seed(99)
    model: Any = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01 + options.get("more", 0))
    options.pop("more", None)
    model.to(options.pop("dtype", torch.float32)).save_pretrained(folder, **options)
    return model  # type: ignore[no-any-return]


def begin(
    run: Run, *, build: Callable[[], nn.Module], blocks: str, weights: Any, steps: int = STEPS, **options: Any
) -> dict[str, Any]:
    """Begin a run with weights, and train; return what was seen. options: of `run.shard`."""
    model = run.shard(build, blocks=blocks, seed=3, weights=weights, **options)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    batches = run.batches(Sentences(), global_batch=8, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    first = run.digest()
    losses = []
    for batch in batches.until(step=steps):
        loss = run.backward(model, batch, logits_loss)
        run.step(optimizer, loss=loss, clip=0.5)
        losses.append(loss.value)
    read = run._weights.bytes if run._weights is not None else 0
    held = len(list(optimizer.state))
    return {"first": first, "digest": run.digest(), "read": read, "losses": losses, "held": held}


def family(name: str, weights: Any, **options: Any) -> Callable[[Run], Any]:
    """Return a main that trains a family from weights."""
    build, blocks = FAMILIES[name]
    return partial(begin, build=build, blocks=blocks, weights=weights, **options)


def adapted(build: Callable[[], nn.Module] = wide_llama, **options: Any) -> nn.Module:
    """Return a model with adapters of peft on its attention, its last layers trained whole."""
    from peft import LoraConfig, get_peft_model

    settings: dict[str, Any] = {
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "o_proj"],
        "task_type": "CAUSAL_LM",
        **options,
    }
    made: Any = get_peft_model(build(), LoraConfig(**settings))
    return made  # type: ignore[no-any-return]


def adapters(weights: Any, **options: Any) -> Callable[[Run], Any]:
    """Return a main that trains adapters over weights."""
    settings = options.pop("lora", {})
    return partial(
        begin, build=partial(adapted, **settings), blocks="base_model.model.model.layers", weights=weights, **options
    )


def elsewhere(first: Path, others: Path) -> Callable[[Run], Any]:
    """Return a main whose ranks but the first are given other weights."""
    return partial(_elsewhere, first=first, others=others)


def _elsewhere(run: Run, *, first: Path, others: Path) -> Any:
    return begin(run, build=wide_llama, blocks="model.layers", weights=others if run.rank else first)


__all__ = ["adapted", "adapters", "begin", "elsewhere", "family", "saved"]
