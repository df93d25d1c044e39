"""A real Slurm on this machine's loopback: one slurmctld, one slurmd per node, a munged of its own.

    with SlurmCluster(3) as slurm:
        job = slurm.submit(Path("deploy/slurm/elastic.sbatch"), "--nodes=3")
        slurm.kill_node("node2")

Not the system's services: configuration, key, spool and logs lie in a temp folder, the ports are the system's choice,
and leaving the `with` block ends every daemon and every task by pid. Needs root and the Debian packages slurmctld,
slurmd, slurm-client and munge, whose slurmd is built for several of them on one machine (`slurmd -N NAME`).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from chaos.machine.processes import MARK, all_pids, children, end_all, free_port, leashed, marked, send, wait_until

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo", "munged")
START_TRIES = 3
START_TIMEOUT = 30.0

_CONFIGURATION = """\
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdLogFile={folder}/%n.log
SlurmctldLogFile={folder}/slurmctld.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/linear
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_min_interval=100000
SlurmdParameters=config_overrides
SlurmdTimeout={timeout}
InactiveLimit=0
KillWait=30
MinJobAge=3600
ReturnToService=2
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """Return the names of Slurm's programs that are not on this machine."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


class SlurmError(Exception):
    """Slurm did not come up, or one of its commands failed."""


class SlurmCluster:
    """Nodes node0, node1 and so on, each of which one job at a time has as a whole.

    timeout: seconds after which a node that says nothing is down (Slurm's `SlurmdTimeout`).
    """

    def __init__(self, nodes: int, *, timeout: int = 10) -> None:
        self.names = [f"node{number}" for number in range(nodes)]
        self._timeout = timeout
        self._mark = f"slurm-{uuid.uuid4().hex}"
        self._folder = Path()
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    # Slurm's own commands.

    def run(self, *command: str) -> str:
        """Run one of Slurm's commands; return what it prints. SlurmError if it fails."""
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=self.environment)
        if done.returncode != 0:
            raise SlurmError(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr}{done.stdout}")
        return done.stdout

    def submit(self, script: Path, *options: str) -> str:
        """Submit a script; return the job's number."""
        return self.run("sbatch", "--parsable", *options, str(script)).strip().partition(";")[0]

    def show(self, job: str) -> dict[str, str]:
        """Return what `scontrol show job` says of a job, or of the first one of several, by key."""
        first = self.run("scontrol", "--oneliner", "show", "job", job).splitlines()[0]
        return dict(word.split("=", 1) for word in first.split() if "=" in word)

    def state(self, job: str) -> str:
        """Return a job's state, such as RUNNING."""
        return self.show(job)["JobState"]

    # Nodes.

    def start_node(self, name: str) -> None:
        """Start a node's slurmd."""
        self._start(name, ["slurmd", "-D", "-N", name, "-f", str(self._folder / "slurm.conf")])

    def processes(self, name: str) -> list[int]:
        """Return the pids of all there is of a node: its slurmd, its slurmstepd, and the tasks, whoever started them.

        Tasks lead sessions of their own, and a slurmstepd is nobody's child.
        """
        ours = {process.pid for process in marked(self._mark)}
        tasks = [process.pid for process in marked(name, "SLURMD_NODENAME") if process.pid in ours]
        # A slurmstepd writes its title over its environment: it is known by the log that it writes.
        steps = _writers(self._folder / f"{name}.log")
        daemon = self._daemons[name]
        return [*([daemon.pid] if daemon.poll() is None else []), *steps, *tasks]

    def kill_node(self, name: str) -> None:
        """Kill all processes of a node at once, as a power cut would."""
        while pids := self.processes(name):
            # Before its parent, by a moment: the second process of an srun has the step ended everywhere when the first
            # one is gone. Stopping all of them would not do: the kernel wakes those whose parents are gone.
            send((child for pid in pids if _is_srun(pid) for child in children(pid) if _is_srun(child)), signal.SIGKILL)
            send(pids, signal.SIGKILL)
            if self._daemons[name].pid in pids:
                self._daemons[name].wait()

    # Start and end.

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to speak with this Slurm; what a killed node leaves in its temp folder goes with it."""
        own = {"SLURM_CONF": str(self._folder / "slurm.conf"), "TMPDIR": str(self._folder / "tmp")}
        return {**os.environ, MARK: self._mark, **own}

    def logs(self) -> str:
        """Return the ends of the daemons' logs, for messages about what went wrong."""
        return "\n".join(
            f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in sorted(self._folder.glob("*.log"))
        )

    def __enter__(self) -> Self:
        for attempt in range(START_TRIES):
            try:
                self._start_all()
                return self
            except SlurmError:
                self._close()
                # Somebody may have taken a port between our choice and the daemon's start.
                if attempt == START_TRIES - 1:
                    raise
            except BaseException:
                self._close()
                raise
        raise AssertionError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _start_all(self) -> None:
        # Not a test's own folder: the path of a Unix socket has room for 107 bytes.
        self._folder = folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        host = os.uname().nodename.partition(".")[0]
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=1 State=UNKNOWN"
            for name in self.names
        )
        for name in ("state", "tmp", *self.names):
            (folder / name).mkdir()
        (folder / "slurm.conf").write_text(
            _CONFIGURATION.format(host=host, port=free_port(), folder=folder, timeout=self._timeout, nodes=nodes)
        )
        (folder / "key").touch(mode=0o600)
        (folder / "key").write_bytes(os.urandom(1024))
        files = {"socket": "munge", "key-file": "key", "pid-file": "munge.pid", "seed-file": "seed"}
        own = [f"--{option}={folder / file}" for option, file in files.items()]
        # Temp folders are everybody's to write, which munged takes for a danger to its key.
        self._start("munged", ["munged", "--foreground", "--force", f"--log-file={folder / 'munged.log'}", *own])
        self._wait("munged", (folder / "munge").exists)
        self._start("slurmctld", ["slurmctld", "-D", "-c", "-f", str(folder / "slurm.conf")])
        for name in self.names:
            self.start_node(name)
        self._wait("slurmctld", lambda: self._idle() == len(self.names))

    def _idle(self) -> int:
        try:
            return self.run("sinfo", "--Node", "--noheader", "--format=%t").split().count("idle")
        except SlurmError:
            return 0

    def _start(self, name: str, command: list[str]) -> None:
        program = shutil.which(command[0])
        assert program is not None, f"{command[0]} is not installed"
        with (self._folder / f"{name}.out.log").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                leashed([program, *command[1:]]),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self.environment,
                cwd="/",
            )

    def _wait(self, daemon: str, ready: Callable[[], bool]) -> None:
        def over() -> bool:
            return ready() or any(process.poll() is not None for process in self._daemons.values())

        wait_until(over, START_TIMEOUT)
        if not ready():
            raise SlurmError(f"{daemon} does not come up:\n{self.logs()}")

    def _close(self) -> None:
        for name in self.names:
            if name in self._daemons:
                self.kill_node(name)
        for process in self._daemons.values():
            process.kill()
            process.wait()
        self._daemons.clear()
        end_all(self._mark)
        shutil.rmtree(self._folder, ignore_errors=True)


def _is_srun(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text() == "srun\n"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _writers(log: Path) -> list[int]:
    """Return the pids of the slurmstepds that have a log file open."""
    pids = []
    for pid in all_pids():
        folder = Path(f"/proc/{pid}")
        try:
            step = (folder / "comm").read_text().startswith("slurmstepd")
            if step and any(os.readlink(file) == str(log) for file in (folder / "fd").iterdir()):
                pids.append(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return pids
