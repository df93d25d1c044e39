"""The tutorial, followed step by step: its script and its commands, with real torchruns and a real etcd."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chaos.machine.processes import descendants, wait_until
from chaos.servers.etcd import EtcdServer
from tests.paths import ROOT

TUTORIAL = ROOT / "docs" / "tutorial"
PATIENCE = 280.0


def blocks(page: str, language: str) -> list[str]:
    """Return a page's code blocks, with each shell command on one line."""
    text = (TUTORIAL / page).read_text().replace("\\\n", " ")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


class Reader:
    """Somebody who follows the tutorial in a folder. The programs are those of this environment."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self.folder, self._endpoint = folder, endpoint
        self._path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        (script,) = blocks("first-job.md", "python")
        (folder / "train.py").write_text(script)

    def words(self, page: str, begins: str, *, nth: int = 0) -> list[str]:
        """Return the nth command of a page that starts with `begins`, with the endpoint of the etcd that runs here."""
        shown = [block for block in blocks(page, "sh") if block.startswith(begins)]
        return shlex.split(shown[nth].replace("127.0.0.1:2379", self._endpoint))

    def run(self, words: list[str]) -> str:
        """Run a command that has to succeed, and return its output."""
        environment = os.environ | {"PATH": self._path}
        done = subprocess.run(
            words, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextmanager
    def node(self, words: list[str], output: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a node until the end of the block, with its output in a file of the folder."""
        with open(self.folder / output, "wb") as file:
            node = subprocess.Popen(
                words, cwd=self.folder, env=os.environ | {"PATH": self._path}, stdout=file, stderr=subprocess.STDOUT
            )
            try:
                yield node
            finally:
                kill(node)

    def sees(self, output: str, text: str) -> None:
        """Wait until a node has printed `text`."""
        assert wait_until(lambda: text in (self.folder / output).read_text(), PATIENCE), f"{output}: {text!r}"


def after_the_last(text: str, path: Path) -> str:
    """Return the text after the last `text` in a file."""
    return path.read_text().rpartition(text)[2]


def kill(node: subprocess.Popen[bytes]) -> None:
    """Kill a node as the tutorial's pkill does: the agent and all its descendants."""
    if node.poll() is None:
        for pid in reversed(descendants(node.pid)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    node.wait()


@pytest.mark.slow
@pytest.mark.etcd
@pytest.mark.timeout(1800)
def test_the_tutorial_can_be_followed(tmp_path: Path) -> None:
    """A first job that another node joins, that node's death, and a second job that resumes from the store."""
    with EtcdServer() as etcd:
        reader = Reader(tmp_path, etcd.endpoint)
        assert "1 ranks" in reader.run(reader.words("first-job.md", "python train.py"))

        with reader.node(reader.words("first-job.md", "torchrun", nth=0), "a"):
            reader.sees("a", "1 ranks")
            with reader.node(reader.words("first-job.md", "torchrun", nth=1), "b") as other:
                reader.sees("a", "2 ranks")
                assert "training" in reader.run(reader.words("first-job.md", "elastic3d status"))
                kill(other)
                assert wait_until(lambda: "1 ranks" in after_the_last("2 ranks", tmp_path / "a"), PATIENCE)
            output = reader.run(reader.words("first-failure.md", "elastic3d events"))
            assert re.findall(r"\b(start|join|death)\b", output) == ["start", "join", "death"]

        assert "latest" in reader.run(reader.words("first-restore.md", "elastic3d ckpt log"))
        reader.run(reader.words("first-restore.md", "elastic3d ckpt verify"))
        with reader.node(reader.words("first-restore.md", "torchrun"), "c"):
            reader.sees("c", "1 ranks")
            first = re.search(r"step (\d+): loss", (tmp_path / "c").read_text())
            assert first is not None
            assert int(first[1]) > 10, "it started over"
        reader.run(reader.words("first-restore.md", "elastic3d samples"))
        reader.run(reader.words("first-restore.md", "elastic3d ckpt export"))
        assert (tmp_path / "model.safetensors").stat().st_size > 0
