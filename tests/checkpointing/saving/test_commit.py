"""Commits, fences, races, lost responses and killed writers."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpointing import Ref, Store, commit, fence, open_checkpoint, open_store, read_latest, verify
from checkpointing.errors import Fenced, StoreError, Superseded
from checkpointing.format.names import Save
from checkpointing.format.refs import Verdict, decide_commit, decide_fence
from checkpointing.stores.protocol import Data, Versioned
from tests.checkpointing.states import SMALL, load, make_state, save, save_and_commit
from tests.paths import ROOT

_numbers = itertools.count()


def fresh() -> Store:
    return open_store(f"memory://commit-{next(_numbers)}")


class Lossy:
    """A store whose writes may happen while their response is lost, or not happen and fail."""

    def __init__(self, store: Store, fail: Callable[[str, str], str]) -> None:
        self._store, self._fail, self.url = store, fail, store.url

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._store.get(name, start, stop)

    def read(self, name: str) -> Versioned | None:
        return self._store.read(name)

    def size(self, name: str) -> int:
        return self._store.size(name)

    def list(self, prefix: str):  # type: ignore[no-untyped-def]
        return self._store.list(prefix)

    def entries(self, prefix: str):  # type: ignore[no-untyped-def]
        return self._store.entries(prefix)

    def delete(self, name: str) -> None:
        self._store.delete(name)

    def put(self, name: str, data: Data, *, check: bool = False) -> None:
        self._lose("put", name, lambda: self._store.put(name, data, check=check))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        return self._lose("create", name, lambda: self._store.put_if_absent(name, data))

    def compare_and_swap(self, name: str, expected: str | None, data: bytes) -> bool:
        return self._lose("swap", name, lambda: self._store.compare_and_swap(name, expected, data))

    def _lose(self, verb, name, act):  # type: ignore[no-untyped-def]
        mode = self._fail(verb, name)
        if mode == "before":
            raise StoreError("connection refused")
        result = act()
        if mode == "after":
            raise StoreError("response lost")
        if mode == "twice":  # a client below repeated the write, and was refused by its own first try
            return act()
        return result


def test_decisions_on_a_ref_follow_the_format_document() -> None:
    """The table of format.md, section 9."""
    save = Save(step=5, made_in=2, attempt=0)
    name = "000000000005.00000002.0000.00000003"
    at = Ref(generation=3, checkpoint=name, record_digest="d", step=5, made_in=2)
    rows = [
        (None, Verdict.MOVE),
        (Ref(generation=3), Verdict.MOVE),
        (Ref(generation=2), Verdict.MOVE),
        (Ref(generation=4), Verdict.FENCED),
        (at, Verdict.DONE),
        (Ref(generation=4, checkpoint="x", record_digest="e", step=6, made_in=2, earlier=(name,)), Verdict.DONE),
        (Ref(generation=3, checkpoint="x", record_digest="e", step=4, made_in=2), Verdict.MOVE),
        (Ref(generation=3, checkpoint="x", record_digest="e", step=5, made_in=2), Verdict.SUPERSEDED),
        (Ref(generation=3, checkpoint="x", record_digest="e", step=9, made_in=1), Verdict.MOVE),
        (Ref(generation=3, checkpoint="x", record_digest="e", step=1, made_in=3), Verdict.SUPERSEDED),
    ]
    for ref, verdict in rows:
        assert decide_commit(ref, save, 3, "d") is verdict, ref
    assert [decide_fence(ref, 3) for ref in (None, Ref(generation=2), Ref(generation=3), Ref(generation=4))] == [
        Verdict.MOVE, Verdict.MOVE, Verdict.DONE, Verdict.FENCED,
    ]  # fmt: skip


def test_a_fence_keeps_the_target_and_stops_older_leaders() -> None:
    """After a fence the old leader cannot commit, and the new one can commit saves of the old generation."""
    store, state = fresh(), make_state(SMALL)
    fence(store, 1)
    first = save_and_commit(store, state, step=1)
    save(store, make_state(SMALL, seed=2), step=2, made_in=1)
    ref = fence(store, 2)
    assert (ref.generation, ref.checkpoint) == (2, first.checkpoint)
    with pytest.raises(Fenced, match="generation 2 owns"):
        commit(store, step=2, made_in=1, attempt=0, committed_in=1, world=2)
    with pytest.raises(Fenced):
        fence(store, 1)
    assert fence(store, 2).generation == 2
    done = commit(store, step=2, made_in=1, attempt=0, committed_in=2, world=2)
    assert open_checkpoint(store).name == done.checkpoint
    assert read_latest(store).committed == (done.checkpoint, first.checkpoint)  # type: ignore[union-attr]


def test_a_fence_that_lands_between_check_and_swap_wins() -> None:
    """The decision at the swap is the one that counts."""
    inner = fresh()
    fence(inner, 1)
    save(inner, make_state(SMALL))

    def fail(verb: str, name: str) -> str:
        if verb == "create" and name.startswith("checkpoints/"):
            fence(inner, 2)
        return ""

    with pytest.raises(Fenced):
        commit(Lossy(inner, fail), step=1, made_in=1, attempt=0, committed_in=1, world=2)
    assert read_latest(inner).checkpoint is None  # type: ignore[union-attr]


def test_an_older_step_does_not_move_latest_back() -> None:
    """A save overtaken by its successor stays uncommitted."""
    store, state = fresh(), make_state(SMALL)
    save(store, state, step=1)
    save_and_commit(store, make_state(SMALL, seed=2), step=2)
    with pytest.raises(Superseded, match="step 2"):
        commit(store, step=1, made_in=1, attempt=0, committed_in=1, world=2)
    assert open_checkpoint(store).step == 2


@pytest.mark.parametrize("mode", ["before", "after", "twice"])
@pytest.mark.parametrize("where", ["packs/", "saves/", "checkpoints/", "refs/"])
def test_a_commit_survives_one_lost_write(where: str, mode: str) -> None:
    """A write that fails, loses its response, or is repeated below us ends in one commit."""
    inner, state = fresh(), make_state(SMALL)
    lost: list[str] = []

    def fail(verb: str, name: str) -> str:
        if name.startswith(where) and not lost:
            lost.append(name)
            return mode
        return ""

    store = Lossy(inner, fail)
    for _ in range(2):
        try:
            done = save_and_commit(store, state)
            break
        except StoreError:
            assert mode in ("before", "after")
    assert lost
    assert read_latest(inner) == done.ref
    assert done.moved  # it knows its own swap by the write-id
    assert load(open_checkpoint(inner))[0] == state
    assert len(list(inner.list("checkpoints/"))) == 1
    assert not list(verify(inner))


LEADER = """
import sys, time
from checkpointing import open_store
from checkpointing import commit
from checkpointing.errors import CommitRefused
store = open_store(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
wins = []
for step in range(1, 9):
    try:
        done = commit(store, step=step, made_in=1, attempt=int(sys.argv[2]), committed_in=1, world=1)
        wins.append(done.checkpoint)
    except CommitRefused:
        pass
print(" ".join(wins), flush=True)
"""


def test_of_two_racing_leaders_one_wins_each_step(tmp_path: Path) -> None:
    """Two processes that both believe they lead commit rival attempts: each step is committed at most once."""
    store = open_store(str(tmp_path))
    for step, attempt in itertools.product(range(1, 9), (0, 1)):
        save(store, make_state(SMALL, seed=attempt), step=step, attempt=attempt, world=1)
    leaders = [start(LEADER, str(tmp_path), str(attempt)) for attempt in (0, 1)]
    try:
        for leader in leaders:
            assert leader.stdout.readline() == "ready\n"
        for leader in leaders:
            leader.stdin.write("\n")
            leader.stdin.flush()
        wins = [set(leader.stdout.readline().split()) for leader in leaders]
        assert [leader.wait(30) for leader in leaders] == [0, 0]
    finally:
        stop(leaders)
    ref = read_latest(store)
    assert ref is not None
    steps = [name.split(".")[0] for name in ref.committed]
    assert len(steps) == len(set(steps)) == len(ref.committed)
    assert wins[0] | wins[1] == set(ref.committed)
    assert not wins[0] & wins[1]
    assert not list(verify(store))


WRITER = """
import os, signal, sys
sys.path.insert(0, sys.argv[3])
from tests.checkpointing.states import make_state, save, SMALL
from checkpointing import fence, open_store
from checkpointing import commit
import checkpointing.stores.local as local
count = 0
def hook(event, arguments):
    global count
    if event in ("os.link", "os.rename", "os.remove", "os.mkdir", "open") and str(arguments[0]).startswith(sys.argv[1]):
        count += 1
        if count == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
store = open_store(sys.argv[1])
sys.addaudithook(hook)
fence(store, 1)
save(store, make_state(SMALL, seed=9), step=2, made_in=1)
commit(store, step=2, made_in=1, attempt=0, committed_in=1, world=2)
print(count, flush=True)
"""


def test_a_writer_killed_anywhere_leaves_latest_restorable(tmp_path: Path) -> None:
    """SIGKILL at points spread over all file operations of fence, save and commit; then the next try commits."""
    here, probe = str(ROOT), tmp_path / "probe"
    save_and_commit(open_store(str(probe)), make_state(SMALL))
    whole = subprocess.run(
        [sys.executable, "-c", WRITER, str(probe), "0", here],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    operations = int(whole.stdout)
    assert operations > 20
    for point in sorted({1, 2, operations, *range(3, operations, max(1, operations // 12))}):
        root = tmp_path / f"at-{point}"
        store = open_store(str(root))
        save_and_commit(store, make_state(SMALL))
        done = subprocess.run(
            [sys.executable, "-c", WRITER, str(root), str(point), here],
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        store = open_store(str(root))
        checkpoint = open_checkpoint(store)
        assert load(checkpoint)[0] == make_state(SMALL, seed=0 if checkpoint.step == 1 else 9)
        assert not list(verify(store))
        assert not list((root / "tmp").iterdir())
        fence(store, 1)
        save(store, make_state(SMALL, seed=9), step=2, made_in=1)
        commit(store, step=2, made_in=1, attempt=0, committed_in=1, world=2)
        assert load(open_checkpoint(store))[0] == make_state(SMALL, seed=9)


def test_a_living_writers_scratch_file_is_left_alone(tmp_path: Path) -> None:
    """Opening a store removes what dead writers left behind, not what is being written."""
    store = open_store(str(tmp_path))
    code = """
import sys, time
from checkpointing import open_store
def chunks():
    yield b"half"
    print("half", flush=True)
    sys.stdin.readline()
    yield b" and half"
open_store(sys.argv[1]).put("packs/x", chunks())
"""
    writer = start(code, str(tmp_path))
    try:
        assert writer.stdout.readline() == "half\n"
        open_store(str(tmp_path))
        writer.stdin.write("\n")
        writer.stdin.flush()
        assert writer.wait(30) == 0
    finally:
        stop([writer])
    assert store.get("packs/x") == b"half and half"


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def stop(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
