"""No block of code in the documentation is only text: each is run, or read by the program that it is written for."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import pytest
import yaml

from chaos.schedules.files import parse
from chaos.schedules.schedule import check
from chaos.simulation import schedule as simulated
from chaos.simulation.bugs import FOUND
from tests.docs.test_commands import PAGES
from tests.paths import ROOT
from tools import grafana

PATIENCE = 240.0
SHELL = ("elastic3d", "torchrun", "make", "pip", "etcd", "pkill", "python", "curl", "kubectl", "srun", "openssl")
"""What a line of shell begins with. test_commands.py takes the first two apart."""
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^\n)((?:^(?:    .*)?\n)+)", re.MULTILINE)


class Language(StrEnum):
    """What a block is."""

    PYTHON = "python"
    SHELL = "shell"
    SESSION = "session"
    PROMETHEUS = "configuration of Prometheus"
    QUERY = "query of Prometheus"
    OUTPUT = "output"
    SCHEDULE = "schedule"
    SIMULATED = "simulated schedule"


def blocks() -> Iterator[tuple[Path, str]]:
    """Return the blocks of all pages, fenced and indented ones, flush left."""
    for page in (*PAGES, ROOT / "CONTRIBUTING.md"):
        text = page.read_text()
        for _, block in FENCE.findall(text):
            yield page, block
        for block in INDENTED.findall(FENCE.sub("", text)):
            if block.strip():
                yield page, textwrap.dedent(block).strip("\n") + "\n"


def language(block: str) -> Language | None:
    """Return what a block is by how it begins, None where nobody can tell."""
    first = block.splitlines()[0]
    word = first.partition(" ")[0]
    if first.startswith(("#!/bin/bash", "# on ")) or word in SHELL:
        return Language.SHELL
    if first.startswith("$ ") and first[2:].partition(" ")[0] in SHELL:
        return Language.SESSION
    if first == "[[fault]]":
        return Language.SCHEDULE
    if first.startswith("job seed="):
        return Language.SIMULATED
    if first == "scrape_configs:":
        return Language.PROMETHEUS
    if first.startswith("sum by "):
        return Language.QUERY
    if re.match(r'("""|import|from|class|def|model =|batches =|elastic3d\.)', first):
        return Language.PYTHON
    return Language.OUTPUT if first.startswith("Samples  ") else None


def of(kind: Language) -> list[tuple[str, str]]:
    """Return all blocks of a kind, each with its page."""
    return [(str(page.relative_to(ROOT)), block) for page, block in blocks() if language(block) is kind]


def test_no_block_is_left_out() -> None:
    """Whoever adds a block of another kind says here who reads it."""
    assert [f"{page}: {block.splitlines()[0]}" for page, block in blocks() if language(block) is None] == []
    assert len(of(Language.SHELL)) > 40


def test_python_compiles() -> None:
    """All of it."""
    blocks = of(Language.PYTHON)
    for page, block in blocks:
        compile(block, page, "exec")
    assert len(blocks) >= 6


def test_shell_is_shell() -> None:
    """And what is to be made has a target."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for page, block in of(Language.SHELL):
        if "[OPTIONS]" in block:
            continue
        done = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True, check=False)
        assert done.returncode == 0, f"{page}: {done.stderr}"
        assert set(re.findall(r"^make (\S+)", block, re.MULTILINE)) <= set(targets), page


def test_the_configuration_of_prometheus_names_rules_that_are_there() -> None:
    """And scrapes a port of every node."""
    ((_page, block),) = of(Language.PROMETHEUS)
    read = yaml.safe_load(block)
    assert [(ROOT / "deploy" / "prometheus" / name).exists() for name in read["rule_files"]] == [True]
    (job,) = read["scrape_configs"]
    assert job["static_configs"][0]["targets"]


def test_a_query_is_that_of_the_dashboard() -> None:
    """For all runs at once, and over five minutes."""
    ((_page, block),) = of(Language.QUERY)
    asked = grafana.UTILISATION.replace('{run="$run"}', "").replace('run="$run",', "").replace("$__rate_interval", "5m")
    assert " ".join(block.split()) == asked


def test_schedules_are_read() -> None:
    """Those of the guide can happen to one job, too."""
    taken = 0
    for page, block in of(Language.SCHEDULE):
        schedule = parse(tomllib.loads(block), page, nodes=4, seed=7)
        if page.startswith("docs/guides/"):
            check(schedule.faults, nodes=4, steps=60)
        taken += 1
    assert taken == 2


def test_simulated_schedules_are_read() -> None:
    """As printed, they can be played from a file."""
    texts = [block for _page, block in of(Language.SIMULATED)]
    assert [str(simulated.parse(text)) for text in texts] == [str(bug.schedule) for bug in FOUND]


def run(folder: Path, script: str) -> str:
    """Run a script by hand and return what it says."""
    (folder / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=folder, text=True, capture_output=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


MODEL = """
from torch import nn
from torch.utils.data import Dataset
config = None


class GPT(nn.Module):
    tensor_plan = None

    def __init__(self, config):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 16)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Pairs(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        return torch.arange(4) + number % 8, torch.arange(4) + number % 8 + 1


dataset = Pairs()


def loss_fn(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
"""
"""What the script of the README leaves to its reader."""


def test_the_script_is_the_same_everywhere() -> None:
    """One of them is run below."""
    scripts = {page: block for page, block in of(Language.PYTHON) if "import torch, elastic3d" in block}
    assert scripts.keys() == {"README.md", "docs/guides/scripts.md"}
    assert len(set(scripts.values())) == 1


@pytest.mark.long
def test_the_script_of_the_readme_trains(tmp_path: Path) -> None:
    """With a model and data of its own, three steps instead of twenty thousand, and smaller batches."""
    script = next(block for page, block in of(Language.PYTHON) if page == "README.md")
    first, _, rest = script.partition("\n")
    for shown, tried in (
        ("20_000", "3"),
        ("global_batch=512", "global_batch=4"),
        ("clip=1.0)", "clip=1.0)\n    print(loss)"),
    ):
        assert shown in rest
        rest = rest.replace(shown, tried)
    said = run(tmp_path, f"{first}\n{MODEL}{rest}")
    assert "started by hand" in said
    assert re.search(r"^[0-9.]+$", said, re.MULTILINE)


@pytest.mark.long
def test_the_python_of_the_guide_to_checkpoints_runs(tmp_path: Path) -> None:
    """The options of checkpoints are those of `Checkpointing`, and DCP saves and loads through our writer."""
    options, dcp = (block for page, block in of(Language.PYTHON) if page == "docs/guides/checkpoints.md")
    state = "import torch\nstate, step = {'weight': torch.arange(4.0)}, 1\n"
    check = "\nassert state['weight'].tolist() == [0.0, 1.0, 2.0, 3.0]\n"
    loaded = dcp.replace("s3://bucket/my-run", str(tmp_path / "store"))
    run(tmp_path, state + loaded + check + "import elastic3d\nmain = lambda run: print('entered')\n" + options)
