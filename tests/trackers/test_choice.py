"""What `trackers=` takes, and what it says of everything else."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from elastic3d.errors import UsageError
from elastic3d.trackers.choice import chosen
from elastic3d.trackers.event_files import EventFiles
from elastic3d.trackers.lines import Csv, JsonLines
from elastic3d.trackers.media import ObjectMedium
from elastic3d.trackers.mlflow_runs import MlflowRuns
from elastic3d.trackers.wandb_runs import WandbRuns
from tests.trackers.heard import Shelf, Shelved


def test_text_names_the_trackers_that_are_built_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is made on the disk yet."""
    monkeypatch.chdir(tmp_path)
    texts = [
        "csv:a.csv",
        "jsonl:~/a.jsonl",
        "tensorboard:runs/gpt",
        "mlflow:gpt",
        "wandb:team/gpt",
        "csv:memory://a/b.csv",
    ]
    named = chosen([*texts, Shelved(Shelf())])
    assert [one.name for one in named] == [*texts, "Shelved"]
    kinds = [Csv, JsonLines, EventFiles, MlflowRuns, WandbRuns, Csv, Shelved]
    assert [type(one.tracker) for one in named] == kinds
    assert isinstance(named[5].tracker._medium, ObjectMedium)  # type: ignore[attr-defined]
    assert list(tmp_path.iterdir()) == []


def test_a_password_is_not_shown() -> None:
    """Events name a tracker as it was given, but for that."""
    (one,) = chosen(["mlflow:gpt@http://me:secret@host:5000/x"])
    assert one.name == "mlflow:gpt@http://***@host:5000/x"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("csv:a.csv", "give a list"),
        (7, "give a list"),
        ([7], "such as"),
        (["losses.csv"], "such as"),
        (["csv:"], "such as"),
        (["csv: "], "such as"),
        (["csv:a\0b"], "such as"),
        (["cvs:a.csv"], "no tracker is named 'cvs': give one of csv, jsonl"),
        (["csv:a.csv", "csv:a.csv"], "given twice"),
        (["csv:a.csv", "jsonl:./a.csv"], "given twice"),
        (["csv:nowhere://a.csv"], "nowhere"),
        (["csv:~nobody-here/a.csv"], "knows no such user; write ./~ where it is a name"),
        (["tensorboard:s3://bucket/runs"], "a disk that all nodes share"),
        (["mlflow:@http://host"], "give an experiment"),
        (["mlflow:gpt@"], "give an experiment"),
        (["wandb:a/b/c"], "give a project"),
        (["wandb:what?"], "give a project"),
        ([f"csv:{n}.csv" for n in range(17)], "at most 16"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_to_do(given: Any, says: str) -> None:
    """Before anything is started."""
    with pytest.raises(UsageError) as caught:
        chosen(given)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "module"), [("tensorboard:a", "tensorboard"), ("mlflow:a", "mlflow"), ("wandb:a", "wandb")]
)
def test_what_is_not_installed_is_named_with_its_extra(text: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the run starts, and not in the middle of it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=rf"{module} is not installed: pip install 'elastic3d\[{module}\]'"):
        chosen([text])


def test_other_packages_bring_trackers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an entry point; one that fails, or makes something else, is named."""

    class Point(importlib.metadata.EntryPoint):
        def load(self) -> Any:
            return {"good": lambda text: Shelved(Shelf()), "bad": lambda text: 1 / 0, "odd": str}[self.name]

    points = {name: Point(name, f"package:{name}", "elastic3d.trackers") for name in ("good", "bad", "odd")}
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda group, name=None: [one for key, one in points.items() if name in (None, key)],
    )
    assert isinstance(chosen(["good:x"])[0].tracker, Shelved)
    for name, says in (("bad", "ZeroDivisionError"), ("odd", "did not return"), ("none", "wandb, bad, good, odd")):
        with pytest.raises(UsageError, match=says):
            chosen([f"{name}:x"])
