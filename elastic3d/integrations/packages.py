"""Import a package that an integration needs, when it needs it."""

from __future__ import annotations

import importlib
from typing import Any

from elastic3d.errors import ConfigurationError


def need(module: str, *, install: str, why: str) -> Any:
    """Return a module of another project; ConfigurationError where it is not installed.

    install: what pip is to be given. why: what needs it, for people.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name is None or module.partition(".")[0] != error.name.partition(".")[0]:
            raise
        raise ConfigurationError(
            f"{why} needs {module.partition('.')[0]}, which is not installed here: pip install {install!r}"
        ) from error
