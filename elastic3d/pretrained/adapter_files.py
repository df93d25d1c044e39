"""Adapters alone, as peft's `from_pretrained` loads them: `adapter_model.safetensors` and its configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from checkpointing import Checkpoint
from checkpointing.errors import NotExportable
from checkpointing.format.tiles import TensorSpec
from checkpointing.interchange import safetensors_files
from checkpointing.interchange.appearing import appearing
from checkpointing.interchange.contents import Contents
from elastic3d.pretrained import names

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
FACT = "adapters"
"""Name of the fact that has the adapters' configurations, by their names."""
DEFAULT = "default"
"""The adapter that peft has at the top of its folder; others are in folders of their own."""

_OF_ADAPTER = re.compile(r"\.(?:lora_[A-Za-z_]+|trainable_tokens_delta|modules_to_save)\.(?P<adapter>[^.]+)(?=\.|$)")
_MAGNITUDE = "lora_magnitude_vector"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedAdapters:
    """What was written. without_config: names of adapters whose configuration is not known."""

    adapters: tuple[str, ...]
    tensors: int
    bytes: int
    without_config: tuple[str, ...]


def adapter_tensors(specs: Mapping[str, TensorSpec], biases: Mapping[str, str]) -> dict[str, dict[str, TensorSpec]]:
    """Return the tensors of each adapter in a state, by the names that peft's files have for them.

    biases: for each adapter which biases it has trained: "none", "all" or "lora_only".
    """
    made: dict[str, dict[str, TensorSpec]] = {}
    adapted: set[str] = set()
    for key, spec in sorted(specs.items()):
        name = key.removeprefix(names.OF_A_RUN)
        match = _OF_ADAPTER.search(name)
        if key.startswith(names.OF_A_RUN) and match is not None:
            # What names an adapter in memory does not in a file; copies of whole modules have the module's own name.
            kept = "" if ".modules_to_save." in match[0] else match[0].rpartition(".")[0]
            file_name = name[: match.start()] + kept + name[match.end() :]
            if f".{_MAGNITUDE}" in kept:
                file_name = file_name.removesuffix(".weight")
            made.setdefault(match["adapter"], {})[file_name] = spec
            adapted.add(name[: match.start()])
    for adapter, which in biases.items():
        for key, spec in specs.items():
            name = key.removeprefix(names.OF_A_RUN)
            mine = which == "all" or (which == "lora_only" and name.removesuffix(".base_layer.bias") in adapted)
            if adapter in made and key.startswith(names.OF_A_RUN) and name.endswith(".bias") and mine:
                made[adapter].setdefault(name, spec)
    return made


def export_adapters(
    checkpoint: Checkpoint, target: Path, *, progress: Callable[[int, int], None] = lambda done, total: None
) -> ExportedAdapters:
    """Write the adapters of a checkpoint into a folder, which appears whole or not at all.

    NotExportable if it has none, or the folder is there already.
    """
    said: Any = checkpoint.facts.get(FACT)
    configs: dict[str, dict[str, Any]] = said if isinstance(said, dict) else {}
    biases = {name: str(config.get("bias", "none")) for name, config in configs.items()}
    found_adapters = adapter_tensors(checkpoint.specs, biases)
    if not found_adapters:
        raise NotExportable(
            f"{checkpoint.name}: has no adapters of peft's: no tensor below {names.OF_A_RUN} is called lora_A or the "
            "like. `elastic3d ckpt export` writes whole models"
        )
    contents = Contents(checkpoint)
    sizes = {adapter: _nbytes(tensors.values()) for adapter, tensors in found_adapters.items()}
    total, before = sum(sizes.values()), 0
    with appearing(target) as whole:
        whole.mkdir(parents=True)
        for adapter, tensors in found_adapters.items():
            folder = whole if adapter == DEFAULT else whole / adapter
            folder.mkdir(exist_ok=True)
            safetensors_files.write(contents, tensors, folder / TENSORS, partial(_after, before, total, progress))
            before += sizes[adapter]
            if adapter in configs:
                config = {**configs[adapter], "inference_mode": True}
                (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return ExportedAdapters(
        adapters=tuple(found_adapters),
        tensors=sum(map(len, found_adapters.values())),
        bytes=total,
        without_config=tuple(sorted(found_adapters.keys() - configs.keys())),
    )


def _after(before: int, total: int, progress: Callable[[int, int], None], done: int, _: int) -> None:
    progress(before + done, total)


def _nbytes(specs: Iterable[TensorSpec]) -> int:
    return sum(spec.box.numel * spec.itemsize for spec in specs)
