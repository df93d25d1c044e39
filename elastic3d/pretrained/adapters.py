"""What is known of the adapters that peft has put into a model; peft itself is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from torch import nn

_OWN_INITIAL_VALUES = (True, False, None, "gaussian")
"""Values of `init_lora_weights` under which no adapter's initial value depends on the weights of the model."""


def configurations(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the configuration of each adapter, as peft writes it into `adapter_config.json`; {} without adapters."""
    found_at: Any = next((m for _, m in model.named_modules() if isinstance(vars(m).get("peft_config"), Mapping)), None)
    if found_at is None:
        return {}
    return {
        str(name): {key: _plain(value) for key, value in sorted(config.to_dict().items())}
        for name, config in vars(found_at)["peft_config"].items()
        if hasattr(config, "to_dict")
    }


def computed_from_weights(model: nn.Module) -> str:
    """Return why the initial values of adapters depend on the model's weights, "" where they do not."""
    for name, config in configurations(model).items():
        way = config.get("init_lora_weights", True)
        if way not in _OWN_INITIAL_VALUES:
            return f"adapter {name!r} has init_lora_weights={way!r}"
        if config.get("use_dora"):
            return f"adapter {name!r} has use_dora=True"
    return ""


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)
