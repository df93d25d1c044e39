"""The public interface is small, and is listed here."""

from __future__ import annotations

import subprocess
import sys

import elastic3d
from elastic3d import errors
from elastic3d.log import EVENTS


def test_elastic3d_exports_exactly_the_listed_names() -> None:
    """A new public name is a promise, and is made here on purpose."""
    assert set(elastic3d.__all__) == {
        "run",
        "Run",
        "Checkpointing",
        "Health",
        "Islands",
        "Layout",
        "Growing",
        "Adaptive",
        "TokenBudget",
        "TokenFile",
        "Packed",
        "Stratified",
        "Mixture",
        "Cached",
        "Remote",
        "Tracker",
        "Elastic3dError",
    }
    for name in elastic3d.__all__:
        assert getattr(elastic3d, name) is not None


def test_every_error_is_in_the_tree_of_the_docstring() -> None:
    """The tree at the head of errors.py is complete, and every error descends from one base."""
    assert errors.__doc__ is not None
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, errors.Elastic3dError)
            assert f" {name} " in errors.__doc__ or f"{name}\n" in errors.__doc__, name


def test_every_event_is_a_noun_and_a_verb() -> None:
    """Event names are `noun.verb` in lower case."""
    for name in EVENTS:
        noun, _, verb = name.partition(".")
        assert noun.islower(), name
        assert verb.islower(), name


def test_the_command_line_starts_without_torch() -> None:
    """`elastic3d --help` answers at once: it does not import torch, which takes seconds."""
    code = "import sys, elastic3d.cli; elastic3d.cli.application(); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.strip() == "False"
