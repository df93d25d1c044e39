"""`elastic3d samples check` on stores and event files as runs leave them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from checkpointing import Box, Piece, TensorSpec, commit, fence, open_store, save_rank
from elastic3d.cli import application
from elastic3d.data import Line, Order
from elastic3d.data.ledger import Ledger, add
from elastic3d.data.positions import fold_sums
from elastic3d.data.proportions import MixedSource, Proportions, WeightStage
from elastic3d.log import EventLog
from elastic3d.values import to_json

ORDER = Order(length=13, global_batch=4, micro_batch=2, seed=3, changes=((4, 6),))
STREAM = replace(ORDER, length=None)


def ledger(order: Order, steps: list[tuple[int, int]]) -> Ledger:
    made: Ledger = ()
    for generation, step in steps:
        first, stop = order.positions(step)
        made = add(
            made,
            generation=generation,
            step=step,
            layout="pp 2 x dp 1",
            samples=stop - first,
            sample_sum=order.sum_of_positions(first, stop),
        )
    return made


def saved(path: Path, facts: dict[str, Any]) -> str:
    """Commit a checkpoint of one tensor with these facts; return the store's URL."""
    store = open_store(str(path))
    spec = TensorSpec(key="model/w", dtype="uint8", shape=(2,))
    piece = Piece(spec=spec, box=Box(start=(0,), stop=(2,)), data=memoryview(b"ab"))
    fence(store, 1)
    save_rank(store, step=6, made_in=1, attempt=0, rank=0, world=1, pieces=[piece], facts=facts)
    commit(store, step=6, made_in=1, attempt=0, committed_in=1, world=1)
    return str(path)


def facts_of(order: Order, lines: Ledger) -> dict[str, Any]:
    return {"step": 6, "order": to_json(order), "ledger": to_json(lines)}


def call(*arguments: str) -> Result:
    return CliRunner().invoke(application(), ["samples", "check", *arguments])


WHOLE = [(1, 0), (1, 1), (1, 2), (2, 3), (2, 4), (2, 5)]


def test_a_complete_run_is_listed_line_by_line(tmp_path: Path) -> None:
    """Exit 0, with what each generation consumed; a growing batch is counted by the size of each step."""
    for name, order in (("data", ORDER), ("stream", STREAM)):
        result = call(saved(tmp_path / name, facts_of(order, ledger(order, WHOLE))))
        assert result.exit_code == 0, result.output
        assert "each of 28 samples was consumed once" in " ".join(result.output.split())
        assert "0 - 2" in result.output


def test_what_scripts_asked_for_is_shown_with_its_step(tmp_path: Path) -> None:
    """What they changed, and that one ended the run, whatever it said of that."""
    *others, first, second = ledger(ORDER, WHOLE)
    lines = (*others, replace(first, stopped="good\x1b[2J enough"), replace(second, changed="more data"))
    result = call(saved(tmp_path / "run", facts_of(ORDER, lines)))
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    assert "the script ended the run with step 2: good" in words
    assert "from step 3 on, as the script asked for: more data" in words
    assert "\x1b[2J" not in result.output


def test_json_has_the_account_and_the_lines(tmp_path: Path) -> None:
    """In one document, for programs."""
    result = call(saved(tmp_path / "run", facts_of(ORDER, ledger(ORDER, WHOLE))), "--json", "--of", "6")
    data = json.loads(result.output)
    assert (data["whole"], data["consumed"], data["missing"], data["repeated"]) == (True, 28, 0, 0)
    assert [line["generation"] for line in data["lines"]] == [1, 2]


def test_the_sources_of_a_mixture_are_listed(tmp_path: Path) -> None:
    """What each gave, its share, and how often all of it was read."""
    sources = (MixedSource(name="web", length=9), MixedSource(name="c[o]de", length=4))
    mixed = Proportions(sources=sources, stages=(WeightStage(step=0, weights=(3, 1)),))
    order = replace(ORDER, proportions=mixed)
    url = saved(tmp_path / "run", facts_of(order, ledger(order, WHOLE)))
    text = call(url)
    assert text.exit_code == 0, text.output
    assert "each of 28 samples was consumed once" in " ".join(text.output.split())
    rows = [line.split() for line in text.output.splitlines()]
    assert ["web", "21", "75.00%", "2.33"] in rows
    assert ["c[o]de", "7", "25.00%", "1.75"] in rows
    data = json.loads(call(url, "--json").output)
    assert data["sources"] == [
        {"name": "web", "samples": 21, "length": 9},
        {"name": "c[o]de", "samples": 7, "length": 4},
    ]
    other = replace(mixed, stages=(WeightStage(step=0, weights=(1, 1)),))
    wrong = call(saved(tmp_path / "other", facts_of(replace(order, proportions=other), ledger(order, WHOLE))))
    assert wrong.exit_code == 1


def test_gaps_overlaps_and_wrong_samples_exit_with_1(tmp_path: Path) -> None:
    """So do steps that the ledger lacks although the checkpoint was made after them."""
    gap = call(saved(tmp_path / "gap", facts_of(ORDER, ledger(ORDER, [(1, 0), (1, 1), (2, 4)]))), "--json")
    assert gap.exit_code == 1
    assert (json.loads(gap.output)["missing"], json.loads(gap.output)["repeated"]) == (8 + 6, 0)
    overlap = ledger(ORDER, WHOLE) + ledger(ORDER, [(3, 5)])
    twice = call(saved(tmp_path / "twice", facts_of(ORDER, overlap)))
    assert twice.exit_code == 1
    assert "6 repeated" in twice.output
    line: Line = replace(ledger(ORDER, [(1, step) for step in range(6)])[0], sample_sum=1)
    wrong = call(saved(tmp_path / "wrong", facts_of(ORDER, (line,))))
    assert wrong.exit_code == 1
    assert "1 line(s) whose samples are not those of their steps" in " ".join(wrong.output.split())


def test_what_was_left_out_is_accounted_for(tmp_path: Path) -> None:
    """Consumed and left out together are all; a run whose holes have shifted does not pass."""
    order = replace(ORDER, holes=((4, 6),))
    lines = list(ledger(ORDER, WHOLE))
    lines[0] = replace(
        lines[0],
        samples=lines[0].samples - 2,
        sample_sum=fold_sums((lines[0].sample_sum, -ORDER.sum_of_positions(4, 6))),
        excluded=2,
        excluded_sum=ORDER.sum_of_positions(4, 6),
    )
    whole = call(saved(tmp_path / "run", facts_of(order, tuple(lines))), "--json")
    assert whole.exit_code == 0, whole.output
    assert (json.loads(whole.output)["consumed"], json.loads(whole.output)["excluded"]) == (26, 2)
    text = call(str(tmp_path / "run"))
    assert "each of 26 samples was consumed once; 2 were left out" in " ".join(text.output.split())
    shifted = call(saved(tmp_path / "other", facts_of(replace(order, holes=((6, 8),)), tuple(lines))), "--json")
    assert shifted.exit_code == 1


def test_event_files_are_counted_by_position(tmp_path: Path) -> None:
    """Steps that a later generation repeated count once; a torn line is skipped."""

    def write(steps: list[tuple[int, int, tuple[int, int]]]) -> None:
        for rank in range(2):
            with EventLog(tmp_path / f"{rank}.jsonl") as log:
                for generation, step, samples in steps:
                    log.emit("step.committed", generation=generation, step=step, samples=samples)

    write([(1, 1, (0, 4)), (1, 2, (4, 8)), (2, 2, (4, 8)), (2, 3, (8, 14))])
    with (tmp_path / "0.jsonl").open("a") as file:
        file.write('{"event":"step.committed","st')
    result = call("--events", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "each of 14 samples was consumed once" in " ".join(result.output.split())
    write([(2, 5, (18, 20))])
    broken = call("--events", str(tmp_path), "--json")
    assert broken.exit_code == 1
    assert json.loads(broken.output)["missing"] == 4


def committed(run: str, steps: Iterable[int], *, generation: int = 1, begin: float = 0) -> str:
    """Return the lines of steps of 8 samples each, a second apart."""
    lines = (
        {
            "event": "step.committed",
            "at": begin + step,
            "run": run,
            "generation": generation,
            "step": step,
            "samples": [8 * step - 8, 8 * step],
        }
        for step in steps
    )
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_the_steps_of_two_runs_are_not_taken_for_those_of_one(tmp_path: Path) -> None:
    """The one that wrote last is checked, or one that is named; the others are named."""
    whole, broken = range(1, 51), [*range(1, 11), *range(21, 51)]
    (tmp_path / "n1-0.jsonl").write_text(
        committed("whole", whole, generation=2) + committed("broken", broken, begin=1000)
    )
    result = call("--events", str(tmp_path))
    assert result.exit_code == 1
    words = " ".join(result.output.split())
    assert "broken: 40 steps" in words
    assert "80 missing" in words
    assert "other runs in this folder, which --id names: whole" in words
    document = json.loads(call("--events", str(tmp_path), "--json").output)
    assert (document["run"], document["other_runs"], document["missing"]) == ("broken", ["whole"], 80)
    assert call("--events", str(tmp_path), "--id", "whole").exit_code == 0
    unknown = call("--events", str(tmp_path), "--id", "third")
    assert unknown.exit_code == 2
    assert "there are 'broken', 'whole'" in unknown.stderr


def restored(run: str, step: int, loss: str = "") -> str:
    line = {"event": "state.restored", "at": step, "run": run, "generation": 2, "step": step, "loss": loss}
    return json.dumps(line) + "\n"


def test_a_step_that_nobody_told_of_counts_where_the_run_went_on_from_its_state(tmp_path: Path) -> None:
    """A state that was loaded without a step before it, or of another run, and one that is no step's prove nothing."""
    told = [*range(1, 21), *range(22, 51)]
    file = tmp_path / "n1-0.jsonl"
    file.write_text(committed("job", told) + restored("other", 21, "0x1p0") + restored("job", 21))
    assert json.loads(call("--events", str(tmp_path), "--json").output)["missing"] == 8
    file.write_text(committed("job", told) + restored("job", 21, "0x1p0") + restored("job", 70, "0x1p0"))
    result = call("--events", str(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.output)
    assert (document["steps"], document["untold"], document["consumed"]) == (50, [21], 400)
    assert "nobody lived to tell of step 21" in " ".join(call("--events", str(tmp_path)).output.split())


def test_the_older_file_of_a_node_counts(tmp_path: Path) -> None:
    """Past half of its limit a log goes on in another file, and what was before is whole all the same."""
    (tmp_path / "n1-0.jsonl.1").write_text(committed("job", range(1, 51)))
    (tmp_path / "n1-0.jsonl").write_text(committed("job", range(51, 101)))
    result = call("--events", str(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    assert (json.loads(result.output)["steps"], json.loads(result.output)["consumed"]) == (100, 800)


def test_wrong_arguments_are_refused_with_what_would_work(tmp_path: Path) -> None:
    """Exit 2 for wrong arguments, 1 for a checkpoint without a ledger."""
    for arguments in ([], ["x", "--events", str(tmp_path)], ["--events", str(tmp_path / "none")], ["x", "--id", "job"]):
        assert call(*arguments).exit_code == 2
    assert call("--events", str(tmp_path)).exit_code == 2
    result = call(saved(tmp_path / "other", {"step": 3}))
    assert result.exit_code == 1
    assert "carries no account of samples" in result.output
