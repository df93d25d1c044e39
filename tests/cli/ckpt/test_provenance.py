"""`ckpt provenance` and `ckpt diff --config`: what made a checkpoint, and what changed from one to the next."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from checkpointing import Box, Piece, TensorSpec, commit, open_store, save_rank
from elastic3d.cli.ckpt import app
from elastic3d.provenance.code import CodeState, file_digest
from elastic3d.provenance.config import digest
from elastic3d.provenance.record import EarlierCode, Provenance
from elastic3d.values import to_json

ORDER = {"seed": 17, "micro_batch": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A store with checkpoints of steps 10 to 40, and the folder of the code that made the first two.

    Step 10 was made with one configuration, 20 with another, 30 does not say, and 40 says it wrongly.
    """

    url: str
    code: Path


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """See `Made`."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text("train")
    (code / "model.py").write_text("model")
    store = open_store(str(tmp_path / "store"))
    state = CodeState(
        script="train.py",
        without="the script is in no git repository",
        files={name: file_digest(code / name) for name in ("train.py", "model.py")},
    )
    first = {"lr": 0.1, "model": {"width": 8}, "[red]": "[/red]"}
    second = {"lr": 0.2, "model": {"width": 8, "depth": 2}}
    then = EarlierCode(
        generation=1, step=10, revision="", code="c" * 32, config=digest(first), torch="2.9", elastic3d="0.1"
    )
    lines = [line(1, 0, 10), line(3, 10, 20, excluded=8, changed="config: lr was 0.1 and is 0.2 from here on")]
    facts: dict[int, Any] = {
        10: {"provenance": said(first, state), "ledger": lines[:1]},
        20: {"provenance": said(second, state, then), "ledger": lines},
        30: {},
        40: {"provenance": {"code": 3}},
    }
    facts[20] |= {"rollbacks": [{"before": 3, "step": 9, "spike": 12, "first": 40, "stop": 48}], "data": "tokens-1"}
    for step, one in facts.items():
        spec = TensorSpec(key="model/w", dtype="uint8", shape=(1,))
        piece = Piece(spec=spec, box=Box(start=(0,), stop=(1,)), data=memoryview(bytes([step])))
        save_rank(
            store,
            step=step,
            made_in=1,
            attempt=0,
            rank=0,
            world=1,
            pieces=[piece],
            facts={"step": step, "order": ORDER, **one},
        )
        commit(store, step=step, made_in=1, attempt=0, committed_in=1, world=1)
    return Made(url=str(tmp_path / "store"), code=code)


def line(generation: int, first: int, stop: int, **more: Any) -> dict[str, Any]:
    layout = "pp 1 x dp 2 x tp 1, ZeRO-3"
    counts = {"samples": 4, "sample_sum": 5}
    return {"generation": generation, "first_step": first, "stop_step": stop, "layout": layout, **counts, **more}


def said(config: dict[str, Any], state: CodeState, *earlier: EarlierCode) -> Any:
    packages = {"python": "3.12.1", "torch": "2.10", "elastic3d": "0.1", "numpy": "2.0"}
    made = Provenance(
        config=config, config_version=digest(config), code=state, packages=packages, model_seed=5, earlier=earlier
    )
    return to_json(made)


def asked(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [*arguments])
    assert result.exit_code == code, result.output
    return result


def test_it_shows_what_made_a_checkpoint(made: Made) -> None:
    """Code, packages, data, seeds, configuration, and the generations with what they left out and changed."""
    shown = asked("provenance", f"{made.url}@20").stdout
    for words in (
        "script       train.py",
        "git          the script is in no git repository",
        "files        2 files imported or changed",
        "elastic3d 0.1, python 3.12.1, torch 2.10, numpy 2.0",
        "data         tokens-1",
        "seeds        data 17, model 5",
        "    model.depth 2",
        "made by 2 generations",
        "8 samples",
        "config: lr was",
        "went back    the loss jumped up in step 12: positions 40 to 47 are left out",
        "earlier      up to step 10: code cccccccccccc, torch 2.9",
    ):
        assert words in shown, shown
    assert "[red]" in asked("provenance", made.url, "10").stdout


def test_json_has_all_of_it(made: Made) -> None:
    """With the root that covers it."""
    found = json.loads(asked("provenance", made.url, "20", "--json").stdout)
    assert found["provenance"]["config"] == {"lr": 0.2, "model": {"width": 8, "depth": 2}}
    assert (found["data"], found["data_seed"], found["step"]) == ("tokens-1", 17, 20)
    assert [one["generation"] for one in found["generations"]] == [1, 3]
    assert len(found["root"]) == 64
    assert found["compared"] is None


def test_code_in_a_folder_is_compared(made: Made) -> None:
    """What differs is named, with exit code 1."""
    asked("provenance", made.url, "20", "--verify", "--code", str(made.code))
    (made.code / "model.py").write_text("other")
    result = asked("provenance", made.url, "20", "--verify", "--code", str(made.code), code=1)
    assert "2 files of" in result.stdout
    assert "model.py" in result.stdout.partition("1 difference")[2]
    found = json.loads(
        asked("provenance", made.url, "20", "--verify", "--code", str(made.code), "--json", code=1).stdout
    )
    assert [one["what"] for one in found["compared"]["differences"]] == ["model.py"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["20", "--code", "."], 2, "give --verify too"),
        (["20", "--verify", "--code", "/nothing"], 2, "there is no such folder"),
        (["20", "--verify", "--code", "/"], 2, "it has no train.py, which was the script"),
        (["30", "--verify"], 1, "does not say what made it"),
        (["40"], 1, "cannot be read"),
    ],
)
def test_wrong_calls_are_refused_in_one_line(made: Made, arguments: list[str], code: int, words: str) -> None:
    """Whatever a checkpoint says."""
    assert words in asked("provenance", made.url, *arguments, code=code).stderr


def test_a_checkpoint_that_does_not_say_is_shown_all_the_same(made: Made) -> None:
    """As those of older versions."""
    assert "made by      not said" in asked("provenance", made.url, "30").stdout


def test_diff_says_what_changed_in_the_configuration(made: Made) -> None:
    """By key, with both values; nothing else is looked at."""
    shown = asked("diff", made.url, "10", "20", "--config").stdout
    assert "lr" in shown
    assert "model.depth" in shown
    assert "model.width" not in shown
    found = json.loads(asked("diff", made.url, "10", "20", "--config", "--json").stdout)
    assert found["changes"] == [
        {"key": "[red]", "before": '"[/red]"', "after": ""},
        {"key": "lr", "before": "0.1", "after": "0.2"},
        {"key": "model.depth", "before": "", "after": "2"},
    ]
    asked("diff", made.url, "10", "20", "--config", "--quiet", code=1)
    asked("diff", made.url, "20", "20", "--config", "--quiet")
    assert "Both have the same configuration." in asked("diff", made.url, "20", "20", "--config").stdout
    assert "Neither has a configuration." in asked("diff", made.url, "30", "30", "--config").stdout
    assert "leave out --values" in asked("diff", made.url, "10", "20", "--config", "--values", code=2).stderr
    assert "cannot be read" in asked("diff", made.url, "10", "40", "--config", code=1).stderr


def test_a_plain_diff_names_the_keys_too(made: Made) -> None:
    """They are facts among others."""
    assert "provenance.config.lr" in asked("diff", made.url, "10", "20").stdout
