"""The membership core, told as stories: tests/testdata/membership/*.txt.

`pytest tests/membership --rewrite-stories` writes the present course of events; a person reviews the diff.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.membership.story import Story
from tests.paths import DATA
from tests.planner.machines import costs, profile

STORIES = sorted((DATA / "membership").glob("*.txt"))


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story(path: Path, request: pytest.FixtureRequest) -> None:
    """Each story happens as it is written."""
    written = path.read_text()
    transcript = "\n".join(line.rstrip() for line in Story().tell(written)) + "\n"
    if request.config.getoption("--rewrite-stories"):
        path.write_text(transcript)
    assert transcript == path.read_text()


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_numbers_grow_and_no_generation_has_a_node_twice(path: Path) -> None:
    """In every story, sealed numbers grow only by the rules, and a generation holds each node once."""
    story = Story()
    story.tell(path.read_text())
    numbers = [generation.number for generation in story.sealed]
    assert numbers == sorted(set(numbers))
    for generation in story.sealed:
        names = [node.name for node in (*generation.nodes, *generation.spares)]
        assert len(names) == len(set(names))


def test_nodes_that_no_layout_is_for_are_said_to_wait_for_others() -> None:
    """With what the planner says of them, for as long as it is so."""
    story = Story()
    story.tell("> policy minimum=2 maximum=4\n> layout pp=2 dp=2\n> start a b c d\n> run 4")
    assert [len(generation.nodes) for generation in story.sealed] == [4]
    assert not story.awaited.get("a")
    story.tell("> kill d\n> run 10")
    assert len(story.sealed) == 1
    assert story.awaited == {"a": 1}
    assert story.unfit["a"].startswith("no layout fits 3 node(s)")
    story.tell("> start e\n> run 4")
    assert [len(generation.nodes) for generation in story.sealed] == [4, 4]
    assert (story.awaited, story.unfit) == ({"a": 0}, {"a": ""})


@pytest.mark.parametrize(
    ("rules", "lengths"),
    [("minimum=1", [6, 4]), ("minimum=5", [6, 5]), ("minimum=3 counts=3/5/6", [6, 5])],
)
def test_of_the_numbers_that_are_allowed_the_fastest_is_taken(rules: str, lengths: list[int]) -> None:
    """Where costs are known: twelve micro-batches take five nodes as long as four, and these exchange less."""
    story = Story()
    story.costs, story.profile = costs(), profile(blocks=1, micro_batches=12)
    story.tell(f"> policy maximum=6 {rules}\n> start a b c d e f\n> run 5\n> kill b\n> run 20")
    assert [len(generation.nodes) for generation in story.sealed] == lengths


def test_a_job_is_told_where_only_other_numbers_of_nodes_would_do() -> None:
    """And what is allowed."""
    story = Story()
    story.tell("> policy minimum=3 maximum=4\n> layout pp=2 dp=1\n> start a b c d\n> run 4")
    assert story.unfit["a"].startswith("no layout uses an allowed number of 4 node(s); the minimum is 3")


def test_only_the_leader_reports_missing_nodes() -> None:
    """And none once they have come."""
    story = Story()
    story.tell("> policy minimum=3 maximum=4\n> start a\n> run 2")
    assert story.awaited == {"a": 2}
    story.tell("> start b\n> run 2")
    assert story.awaited == {"a": 1}
    story.tell("> start c\n> run 3")
    assert story.awaited == {"a": 0}
    assert len(story.sealed) == 1
