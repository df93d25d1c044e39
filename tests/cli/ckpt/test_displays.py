"""What the commands print for a person: tests/testdata/ckpt/*.txt.

`pytest tests/cli/ckpt --rewrite-displays` writes the present output; a person reviews the diff.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable

import pytest
from rich.console import Console, RenderableType

from checkpointing import open_checkpoint
from checkpointing.format import names
from checkpointing.inspection.difference import by_key, difference
from checkpointing.inspection.documents import CheckpointDocuments, find
from checkpointing.inspection.history import history as commits
from checkpointing.inspection.statistics import summarise as statistics
from checkpointing.inspection.summary import lineage, summarise
from checkpointing.inspection.tree import tree
from checkpointing.inspection.usage import usage
from checkpointing.inspection.values import doubtful, value_differences
from checkpointing.reading.verify import Fault, Finding
from checkpointing.stores.protocol import Entry
from elastic3d.cli.ckpt.planning import homes_of, plan_reads
from elastic3d.cli.ckpt.render import checks, keeping, one, store, two
from elastic3d.planner.placement import place_of
from elastic3d.planner.shares import MeshSizes
from tests.cli.ckpt.conftest import History
from tests.paths import DATA

DISPLAYS = DATA / "ckpt"
WIDTHS = (120, 80, 44)
URL = "s3://bucket/gpt"
LABELS = ("verified", "tag best")
WHEN = 1_790_000_000.0
Picture = Callable[[int], RenderableType]


def printed(what: RenderableType, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None, force_terminal=False, highlight=False)
    with console.capture() as capture:
        console.print(what)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def saved(history: History, place: int) -> CheckpointDocuments:
    return find(history.store, history.names[place], modified=WHEN + 60 * place)


def listed(history: History) -> list[store.Row]:
    rows = []
    for place in reversed(range(4)):
        record = saved(history, place).record
        labels = ("latest",) if place == 3 else LABELS if place == 1 else ()
        rows.append(
            store.CheckpointRow(
                checkpoint=record.checkpoint,
                labels=labels,
                latest=place == 3,
                step=record.save.step,
                made_in=record.save.made_in,
                committed_in=record.committed_in,
                ranks=record.world,
                tensors=record.totals.tensors,
                tiles=record.totals.tiles,
                bytes=record.totals.bytes,
                root=record.root,
                modified=WHEN + 60 * place,
            )
        )
    broken = store.CheckpointRow(
        checkpoint="000000000050.00000001.0000.00000001", error="its bytes do not have their digest"
    )
    return [*rows, broken]


def ls(history: History) -> Picture:
    rows = listed(history)
    return lambda width: store.checkpoints(URL, 3, rows, width)


def log(history: History) -> Picture:
    modified = {name: WHEN + 60 * place for place, name in enumerate(history.names)}
    entries = list(commits(history.store, history.names[::-1], modified))
    return lambda width: store.commits(URL, entries, {history.names[1]: LABELS}, 7, width)


def du(history: History) -> Picture:
    """All documents get one size, because those with random contents vary in length."""
    listing = list(history.store.entries(""))
    entries = [entry for entry in listing if names.parse_pack(entry.name)]
    entries += [dataclasses.replace(entry, size=1000) for entry in listing if names.parse_record(entry.name)]
    entries += [dataclasses.replace(entry, size=2000) for entry in listing if names.parse_manifest(entry.name)]
    entries.append(Entry(name=names.pack("ab" * 32), size=123_456, modified=0.0))
    sizes = usage([saved(history, place) for place in (3, 2, 1, 0)], entries)
    return lambda width: store.usage(URL, sizes, {history.names[3]: ("latest",)}, width)


def show(history: History) -> Picture:
    second = saved(history, 1)
    summary = summarise(second, LABELS, lineage(history.store, second, 8))
    return lambda width: one.summary(URL, summary, width)


def show_shrunk(history: History) -> Picture:
    last = saved(history, 3)
    summary = summarise(last, ("latest",), lineage(history.store, last, 8))
    return lambda width: one.summary(URL, summary, width, all_facts=True)


def tree_(history: History) -> Picture:
    last = saved(history, 3)
    nodes = tree(last.specs.values())
    return lambda width: one.names(last.name, nodes, width, depth=3 if width < 80 else 99)


def stats(history: History) -> Picture:
    last = saved(history, 3)
    tiles = by_key(last.tiles)
    rows = [statistics(spec, tiles[key]) for key, spec in last.specs.items() if key.startswith("model/")]
    return lambda width: one.statistics(last.name, rows, width, bad=False, number_of=8, each=False)


def diff(history: History) -> Picture:
    changes = difference(saved(history, 0), saved(history, 1))
    return lambda width: two.difference(changes, {}, width)


def diff_values(history: History) -> Picture:
    old, new = saved(history, 2), saved(history, 3)
    changes = difference(old, new)
    sides = [(side, open_checkpoint(history.store, side.name)) for side in (old, new)]
    distances = {one.key: one for one in value_differences(sides[0], sides[1], doubtful(changes), lambda _: None)}
    return lambda width: two.difference(changes, distances, width)


def diff_recut(history: History) -> Picture:
    changes = difference(saved(history, 1), saved(history, 2))
    return lambda width: two.difference(changes, {}, width)


def same(history: History) -> Picture:
    changes = difference(saved(history, 1), saved(history, 1))
    return lambda width: two.difference(changes, {}, width)


def planned(history: History, to: str, *, slots: int = 1, last: tuple[str, ...] = ()) -> Picture:
    first, target = saved(history, 3), MeshSizes.parse(to)
    homes = homes_of(first, None, list(last))
    readers = []
    for number, reads in enumerate(plan_reads(first, target, homes, slots)):
        ranks = tuple(range(number * slots, (number + 1) * slots))
        places = tuple(place_of(rank, target) for rank in ranks)
        readers.append(two.ReadingRanks(ranks=ranks, places=places, reads=reads))
    return lambda width: two.plan(first, target, homes, readers, width)


def findings(history: History) -> Picture:
    problems = [
        Finding(
            object=names.pack("12" * 32),
            fault=Fault.CORRUPT,
            detail="bytes 8 to 4104 do not have their digest",
            tensor="model/blocks.0.mlp.weight",
            box="[0:64, 0:16]",
            rank=1,
            pack="12" * 32,
            checkpoints=(history.names[1],),
        ),
        Finding(object="packs/notes.txt", fault=Fault.UNEXPECTED, detail="is no object of this format"),
    ]
    return lambda width: checks.findings(URL, 4711, problems, width)


def sound(history: History) -> Picture:
    return lambda width: checks.findings(URL, 4_711_471, [], width)


def tags(history: History) -> Picture:
    refs = {"best": history.names[1], "before-lr-drop": history.names[0]}
    return lambda width: keeping.pairs("tag", refs, URL)


SCENES: dict[str, Callable[[History], Picture]] = {
    "ls": ls,
    "log": log,
    "du": du,
    "show": show,
    "show-shrunk": show_shrunk,
    "tree": tree_,
    "stats": stats,
    "diff": diff,
    "diff-values": diff_values,
    "diff-recut": diff_recut,
    "diff-same": same,
    "plan": lambda history: planned(history, "pp=2,dp=3,tp=2"),
    "plan-nodes": lambda history: planned(history, "pp=2,dp=4", slots=4, last=("norm.*", "head.*")),
    "plan-many": lambda history: planned(history, "dp=40"),
    "verify": findings,
    "verify-sound": sound,
    "tags": tags,
}


@pytest.mark.parametrize("name", SCENES)
def test_display(name: str, history: History, request: pytest.FixtureRequest) -> None:
    """The output fits terminals of 120, 80 and 44 columns and is the reviewed one."""
    picture = SCENES[name](history)
    pictures = []
    for width in WIDTHS:
        text = printed(picture(width), width)
        assert max(map(len, text.splitlines())) <= width
        pictures.append(f"{'-' * width}\n{text}\n")
    path, text = DISPLAYS / f"{name}.txt", "".join(pictures)
    if request.config.getoption("--rewrite-displays", default=False):
        path.write_text(text)
    assert text == path.read_text()
