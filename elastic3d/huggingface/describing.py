"""The configuration of a model that is written as a Hugging Face folder: where it comes from, and what is in it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic3d.errors import UsageError
from elastic3d.provenance.record import Provenance

CONFIG, GENERATION = "config.json", "generation_config.json"
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "spm.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)
"""What is taken from a folder beside its configuration: a tokenizer's files, and its folder of templates."""

_DTYPES = ("dtype", "torch_dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a folder says of its model, beside the weights."""

    config: dict[str, Any]
    """The content of `config.json`, without a dtype."""
    generation: dict[str, Any] | None = None
    """That of `generation_config.json`, None for none."""
    copied: tuple[Path, ...] = ()
    """Files and folders that are copied as they are."""
    origin: str = ""
    """Where it comes from, in words."""

    @property
    def architecture(self) -> str:
        """Name of the model's class in transformers."""
        return str(self.config["architectures"][0])

    def with_dtype(self, dtype: str) -> Description:
        """Return it for weights of this dtype, so that they are loaded as they are."""
        return replace(self, config={**self.config, "dtype": dtype})


def recorded(made: Provenance | None, checkpoint: str) -> Description:
    """Return what a checkpoint says of its model; UsageError if it says nothing."""
    model = None if made is None else made.model
    if model is None:
        raise UsageError(
            f"checkpoint {checkpoint} does not have the configuration of a model of transformers: give a folder with "
            "its config.json as --config FOLDER, or write the tensors alone with --to safetensors"
        )
    config = {**model.config, "architectures": [model.architecture]}
    return _checked(config, model.generation, (), f"checkpoint {checkpoint}")


def of_folder(folder: Path) -> Description:
    """Return what a folder says of a model of transformers; UsageError if there is no such configuration in it."""
    if not (folder / CONFIG).is_file():
        raise UsageError(f"--config {folder}: there is no {CONFIG} in it; `config.save_pretrained(FOLDER)` writes one")
    generation = _read(folder / GENERATION) if (folder / GENERATION).is_file() else None
    copied = tuple(folder / name for name in COPIED if (folder / name).exists())
    return _checked(_read(folder / CONFIG), generation, copied, str(folder / CONFIG))


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise UsageError(f"{file}: is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{file}: is no object")
    return content


def _checked(
    config: dict[str, Any], generation: dict[str, Any] | None, copied: tuple[Path, ...], origin: str
) -> Description:
    named = config.get("architectures")
    if not isinstance(config.get("model_type"), str):
        raise UsageError(f"{origin}: names no model_type, and so is no configuration of transformers")
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        raise UsageError(
            f'{origin}: "architectures" does not name the class of the model, as ["LlamaForCausalLM"] does; add it'
        )
    plain = {key: value for key, value in config.items() if key not in _DTYPES}
    return Description(config=plain, generation=generation, copied=copied, origin=origin)
