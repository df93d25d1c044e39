"""A keeper ends with its agent, whatever it was doing when that died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from elastic3d.rendezvous import agent
from elastic3d.worker.processes.process import ExitCode
from tests.paths import ROOT
from tests.worker.keepers import eventually, gone

ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}

# An agent starts a worker, through a wrapper or not; the worker "imports" until it is told to go on.
AGENT = """
import os, subprocess, sys, time
from elastic3d import environment
from elastic3d.rendezvous import agent

variables = os.environ | {environment.AGENT_PROCESS.name: agent.identity(os.getpid())}
command = [sys.executable, "-c", sys.argv[1]]
if sys.argv[2] == "wrapped":
    command = ["sh", "-c", '"$@"; exit $?', "wrapper", *command]
subprocess.Popen(command, env=variables, stdin=int(sys.argv[3]), start_new_session=True)
time.sleep(600)
"""
WORKER = """
import os, sys, time
print(os.getpid(), flush=True)
if {importing}:
    sys.stdin.readline()
from elastic3d import environment
from elastic3d.rendezvous import agent
from elastic3d.worker.processes.process import ExitCode, die_with_agent

identity = environment.AGENT_PROCESS.read()
die_with_agent(identity)
if agent.pid_of(identity) != os.getppid():
    agent.end_with(identity, lambda: os._exit(ExitCode.ORPHANED))
print("trains", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["direct", "wrapped"])
@pytest.mark.parametrize("importing", [True, False])
def test_a_keeper_does_not_outlive_its_agent(how: str, importing: bool) -> None:
    """Killed while the worker still imports, before it has asked to die with its parent, or afterwards."""
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", AGENT, WORKER.format(importing=importing), how, str(reading)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        pass_fds=[reading],
        text=True,
    )
    os.close(reading)
    assert process.stdout is not None
    with process.stdout as said:
        worker = int(said.readline())
        if not importing:
            assert said.readline() == "trains\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
        if importing:
            os.write(writing, b"go on\n")
        os.close(writing)
        assert eventually(lambda: gone(worker), 60)
        # None of them got as far as training, except the one that already did.
        assert said.read() == ""


def test_an_agent_is_identified_by_more_than_its_pid() -> None:
    """Another process under its pid is not the agent, nor is one that is dead and not reaped."""
    me = agent.identity(os.getpid())
    assert agent.lives(me)
    assert agent.pid_of(me) == os.getpid()
    assert not agent.lives(f"{os.getpid()}:1")
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert agent.identity(child.pid) == ""
    child.wait()
    assert ExitCode.ORPHANED == 85
