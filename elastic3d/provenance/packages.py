"""Versions of the distributions that this process has imported. Nothing is imported to find them."""

from __future__ import annotations

import functools
import os
import platform
import sys
from collections.abc import Container, Iterable, Mapping
from importlib import metadata

MOST = 128
"""Distributions that a state names besides Python, torch and elastic3d, in order of their names."""

ALWAYS = ("elastic3d", "torch")


def versions(named: Iterable[str]) -> tuple[dict[str, str], int]:
    """Return the versions of Python, torch, elastic3d and these distributions; and how many of the last are left out.

    named: as `distributions` returns them.
    """
    others = sorted({*named}.difference(ALWAYS, [""]))
    names = (*ALWAYS, *others[:MOST])
    by_name = {"python": platform.python_version(), **{name: _version(name) for name in names}}
    return by_name, max(0, len(others) - MOST)


def distributions(known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the distributions of all imported modules, by top-level module, "" for one of none.

    known: what need not be looked for again.
    """
    by_module = dict(known or {})
    wanted = set(_imported(by_module))
    for name in sorted(wanted):
        try:
            by_module[name] = metadata.distribution(name).metadata["Name"] or name
        except (metadata.PackageNotFoundError, ValueError, OSError):
            continue
    missing = wanted - by_module.keys()
    if missing:
        by_module |= dict.fromkeys(missing, "") | _by_contents(missing)
    return by_module


def _imported(known: Container[str]) -> Iterable[str]:
    """Return top-level modules of installed distributions: not Python's own, not the script's, not those known."""
    for name, module in tuple(sys.modules.items()):
        if "." in name or name in known:
            continue
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and not of_python(name, file) and installed(file):
            yield name


def of_python(module: str, file: str) -> bool:
    """Return whether a top-level module is of Python's own library."""
    return module in sys.stdlib_module_names or os.path.dirname(file) == _LIBRARY


_LIBRARY = os.path.dirname(os.__file__)


def installed(file: str) -> bool:
    """Return whether a file is in a folder where distributions are installed."""
    if "/site-packages/" in file or "/dist-packages/" in file:
        return True
    return any(file.startswith(f"{folder}/") and _has_distributions(folder) for folder in sys.path if folder)


@functools.cache
def _has_distributions(folder: str) -> bool:
    """Return whether distributions were installed there, as `pip install --target` does."""
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    except OSError:
        return False


def _by_contents(modules: Iterable[str]) -> dict[str, str]:
    """Return the distributions that say, or list files which show, that these modules are theirs."""
    wanted, by_module = set(modules), dict[str, str]()
    for one in metadata.distributions():
        try:
            tops = set((one.read_text("top_level.txt") or "").split())
            listed = "" if tops else "\n" + (one.read_text("RECORD") or "")
            mine = {name for name in wanted if name in tops or f"\n{name}/" in listed or f"\n{name}.py," in listed}
            by_module |= dict.fromkeys(mine, one.metadata["Name"] or "") if mine else {}
        except (OSError, UnicodeDecodeError, ValueError):
            continue
        wanted -= mine
        if not wanted:
            break
    return {module: name for module, name in by_module.items() if name}


@functools.cache
def _version(name: str) -> str:
    if name == "torch" and "torch" in sys.modules:
        return str(sys.modules["torch"].__version__)  # what runs, with the build for a device in it
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
