"""A job as it is to be played."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from chaos.machine.clocks import Clocks
from chaos.machine.hung_files import HungFiles
from chaos.machine.network import Network
from chaos.machine.small_disk import SmallDisk
from chaos.servers.s3_proxy import S3Proxy
from elastic3d.etcd import EtcdClient
from elastic3d.values import Layout

RESIDENT, RESTART = "resident", "restart"
"""The modes in which a job is played, as `--rdzv-conf=mode=` has them."""
TRAIN_GPT = Path(__file__).parents[1] / "scripts" / "train_gpt.py"


class Etcd(Protocol):
    """An etcd server the job uses."""

    @property
    def endpoint(self) -> str:
        """HOST:PORT, several separated by commas."""
        ...

    def client(self) -> EtcdClient:
        """Return a client that may see everything."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A job: how many nodes, for how long, and on what model. store: None for a folder of the history's own.

    labels: where the first nodes stand, in order, "" for nowhere in particular. proxy: what stands before the store.
    network: where each node is a host of its own; etcd has to serve at its address, too. clocks: where each node has a
    wall clock of its own. disk: what `store` is on, where it is a file system of its own. hung: the one of which the
    script is told the folder, where it is told of one that does not answer. step_pattern: of lines that tell a step
    where the script is restarted, as `chaos.playing.step_lines` takes it.
    """

    nodes: int = 4
    slots: int = 1
    steps: int = 60
    seed: int = 17
    layout: Layout | None = None
    store: str | None = None
    global_batch: int = 8
    micro_batch: int = 2
    blocks: int = 8
    width: int = 208
    context: int = 64
    options: tuple[str, ...] = ()
    conf: Mapping[str, str] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    script: Path = TRAIN_GPT
    step_pattern: str = ""
    # How long the job may be silent before the history is given up: see `standing`.
    patience: float = 180.0
    proxy: S3Proxy | None = field(default=None, compare=False, repr=False)
    network: Network | None = field(default=None, compare=False, repr=False)
    clocks: Clocks | None = field(default=None, compare=False, repr=False)
    disk: SmallDisk | None = field(default=None, compare=False, repr=False)
    hung: HungFiles | None = field(default=None, compare=False, repr=False)

    @property
    def resident(self) -> bool:
        """Whether its script calls `elastic3d.run`; otherwise torchrun restarts it at each change of nodes."""
        return self.conf.get("mode", RESIDENT) == RESIDENT

    def consumed(self, step: int) -> int:
        """Return the samples of the steps up to one."""
        return step * self.global_batch

    def arguments(self, *, store: str, events: Path, out: Path) -> tuple[str, ...]:
        """Return the training script's arguments."""
        layout = () if self.layout is None else (f"--layout={self.layout.request()}",)
        return (
            f"--steps={self.steps}",
            f"--seed={self.seed}",
            f"--global-batch={self.global_batch}",
            f"--micro-batch={self.micro_batch}",
            f"--blocks={self.blocks}",
            f"--width={self.width}",
            f"--context={self.context}",
            f"--store={store}",
            f"--events={events}",
            f"--out={out}",
            *layout,
            *self.options,
        )
