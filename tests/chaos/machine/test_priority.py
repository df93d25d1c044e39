"""Who watches a job gets a processor before the job, and passes that on to nobody."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from chaos.machine.priority import before_others

CHILD = "import os; print(os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0))"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may run before others")
def test_a_thread_runs_before_others_and_its_children_do_not() -> None:
    """It runs before those of other sessions and control groups too, and afterwards it is as it was."""
    before = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)
    with before_others():
        assert os.sched_getscheduler(0) == os.SCHED_RR | os.SCHED_RESET_ON_FORK
        child = subprocess.run([sys.executable, "-I", "-S", "-c", CHILD], check=True, stdout=subprocess.PIPE, text=True)
    assert child.stdout.split() == ["0", str(os.SCHED_OTHER)]
    assert (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)) == before
