"""The memory of a keeper does not grow with its threads, and trainers allocate as any process does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT

COUNTING = """
import ctypes, os, sys, threading, time
from pathlib import Path

def arenas(path):
    # As many threads as a keeper has, each with memory of its own at the same time.
    libc = ctypes.CDLL(None)
    for name in ("malloc", "fopen"):
        getattr(libc, name).restype = ctypes.c_void_p
    met = threading.Barrier(32)

    def hold():
        libc.malloc(ctypes.c_size_t(2000))
        met.wait(60)

    threads = [threading.Thread(target=hold) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file = ctypes.c_void_p(libc.fopen(str(path).encode(), b"w"))
    libc.malloc_info(0, file)
    libc.fclose(file)
    return Path(path).read_text().count("<heap nr=")

from elastic3d.worker.processes.supervisor import TemplateSupervisor
from elastic3d.worker.processes.template import Fork

out = Path(sys.argv[1])

def trainer(spec, descriptors):
    (out / "trainer").write_text(str(arenas(out / "of-trainer")))

supervisor = TemplateSupervisor(trainer)
supervisor.send(Fork(trainer=1, spec=""))
(out / "keeper").write_text(str(arenas(out / "of-keeper")))
while not (out / "trainer").exists() or not (out / "trainer").read_text():
    time.sleep(0.01)
os._exit(0)
"""


def test_threads_of_a_keeper_share_their_arenas(tmp_path: Path) -> None:
    """Those that come and go with each generation would leave pieces of memory in one after another."""
    command = [sys.executable, "-c", COUNTING, str(tmp_path)]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=120, check=True)
    assert int((tmp_path / "keeper").read_text()) == 2
    assert int((tmp_path / "trainer").read_text()) > 2
