"""The scripts in deploy/slurm without a Slurm: they are shell, and torchrun takes what they give it."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.distributed.run import config_from_args, get_args_parser

from elastic3d.rendezvous.settings import from_parameters
from tests.paths import ROOT

SCRIPTS = sorted((ROOT / "deploy" / "slurm").glob("*.sbatch"))
NAMES = [script.stem for script in SCRIPTS]
TRAINING = [script for script in SCRIPTS if script.stem != "etcd"]
VALUES = {
    "NODES": "2:8",
    "SLURM_JOB_NUM_NODES": "8",
    "SLOTS": "8",
    "ENDPOINT": "127.0.0.1:2379",
    "RUN_ID": "gpt-1b",
    "TRAIN[@]": "train.py",
}


def test_there_is_a_script_for_each_way_to_start() -> None:
    """As the guide lists them."""
    guide = (ROOT / "docs" / "guides" / "slurm.md").read_text()
    assert NAMES == ["array", "elastic", "etcd", "fixed", "heterogeneous", "requeue"]
    assert [name for name in NAMES if f"`{name}.sbatch`" not in guide] == []


@pytest.mark.parametrize("script", SCRIPTS, ids=NAMES)
def test_a_script_is_shell_with_one_block_to_edit(script: Path) -> None:
    """Options of sbatch stand above the first command, or Slurm does not read them."""
    text = script.read_text()
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    above, edit, rest = text.partition("# Edit from here ...\n")
    assert edit
    block, end, below = rest.partition("# ... to here.\n")
    assert end
    assert "#SBATCH" in above
    assert "#SBATCH" not in block + below
    assert [line for line in block.splitlines() if not re.match(r"[A-Z_]+=\S+ +# ", line)] == []


@pytest.mark.parametrize("script", TRAINING, ids=[script.stem for script in TRAINING])
def test_torchrun_takes_the_options_of_a_script(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the rendezvous its settings."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # torchrun sets it otherwise
    text = script.read_text().replace("\\\n", " ")
    line = re.search(r'torchrun (--.* "\$\{TRAIN\[@\]\}")', text)
    assert line is not None
    command = re.sub(r"\$\{?([A-Z_\[\]@]+)\}?", lambda match: VALUES[match[1]], line[1])
    config, _, _ = config_from_args(get_args_parser().parse_args(shlex.split(command)))
    settings = from_parameters(
        RendezvousParameters(
            backend=config.rdzv_backend,
            endpoint=config.rdzv_endpoint,
            run_id=config.run_id,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            **config.rdzv_configs,
        )
    )
    assert settings.run_id == "gpt-1b"
