"""Start torchrun agents from one process that has imported torch already, and their workers from them.

An agent and its worker cost some seconds of processor time each, nearly all of it imports: on two cores a cluster of
four nodes is busy for half a minute before it trains its first step. Here one process imports everything and forks:

    server --fork--> agent --fork--> workers in waiting, each of which becomes a worker when torchrun starts one

Everything else is as usual: `torch.distributed.run.main` with its literal options in a session and
an environment of its own, the script run as `__main__`, and every process a child of the one that would have started
it, which dies with it. What differs: all agents share one hash seed; a process that starts itself again by its command
line is a fresh interpreter; and only as many workers wait as the agent has slots, later ones are fresh too.

Agents whose environment names libraries to load before the C library, as those of nodes with clocks of their own do,
come from another such process, which has loaded them: it is started when the first of them is.

Every process has its own environment where others look for it: `/proc/<pid>/environ` shows the block that exec made,
so the server is started with a block that has room to spare, and each child writes its own environment over it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from blake3 import blake3

from chaos.machine.clocks import LIBRARIES
from chaos.machine.groups import enter
from chaos.machine.network import move_into
from chaos.machine.processes import leashed, send

_ROOM = "ELASTIC3D_ENVIRONMENT_ROOM"
_ROOM_BYTES = 64 << 10
_LONGEST = 128 << 10
_PRELOADED = (
    "torch.distributed.run",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "chaos.scripts.train_gpt",
    # What `elastic3d` and its rendezvous import where they are first used.
    "elastic3d.entry",
    "elastic3d.rendezvous.resident",
    "elastic3d.rendezvous.restart",
)


class PreloadedAgent:
    """An agent's process, to be used like a `subprocess.Popen`. Its exit code is the server's to collect.

    Whatever first finds that the server is gone raises ChildProcessError; its agents died with it, and count as killed
    from then on.
    """

    def __init__(self, server: PreloadedServer, pid: int) -> None:
        self._server = server
        self._pidfd = os.pidfd_open(pid)
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, minus a signal's number for a signal; None while it runs."""
        if self.returncode is None and select.select([self._pidfd], [], [], 0)[0]:
            gone = self._server.gone
            self.returncode = -signal.SIGKILL if gone else int(self._server.ask({"reap": self.pid})["code"])
            os.close(self._pidfd)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; subprocess.TimeoutExpired where it does not end within `timeout` seconds."""
        if self.returncode is None and not select.select([self._pidfd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("torchrun", timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: signal.Signals | int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            # It may end meanwhile; and without its server somebody else reaps it, and its pid is anybody's.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class PreloadedServer(AbstractContextManager["PreloadedServer"]):
    """Holds the process that forks agents; a `cluster.Starter`. It and they die with the thread that enters it.

    gone: it was found to have ended. libraries: what it loads before the C library, as LD_PRELOAD lists it; each has to
    take from the environment what it needs of it when it is first used, and not before.
    """

    def __init__(self, libraries: str | None = None) -> None:
        self.gone = False
        self._libraries = os.environ.get(LIBRARIES, "") if libraries is None else libraries
        self._others: dict[tuple[bytes, ...], PreloadedServer] = {}
        self._asked = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._mine, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def __enter__(self) -> PreloadedServer:
        number = self._theirs.fileno()
        self._process = subprocess.Popen(
            leashed([sys.executable, "-m", "chaos.machine.preloaded", str(number)]),
            pass_fds=(number,),
            stdin=subprocess.DEVNULL,
            # Ctrl-C reaches its owner, which needs it to end the agents.
            start_new_session=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
                LIBRARIES: self._libraries,
                _ROOM: "x" * _ROOM_BYTES,
            },
        )
        self._theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        while self._others:
            self._others.popitem()[1].__exit__()
        self._mine.close()
        assert self._process is not None
        self._process.wait()

    def __call__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: io.BufferedWriter,
        entries: Sequence[Path],
        space: str = "",
    ) -> PreloadedAgent:
        """Start `python -m torch.distributed.run ...`."""
        _, flag, module, *arguments = command
        assert (flag, module) == ("-m", "torch.distributed.run"), command
        request = {
            "arguments": arguments,
            "environment": dict(environment),
            "directory": os.getcwd(),
            "entries": [*map(str, entries)],
            "space": space,
        }
        server = self.having(environment.get(LIBRARIES, ""))
        return PreloadedAgent(server, int(server.ask(request, [output.fileno()])["pid"]))

    def having(self, libraries: str) -> PreloadedServer:
        """Return this one, or another that has loaded the same libraries, wherever they were read from.

        It is started where there is none, to die with the calling thread.
        """
        if libraries == self._libraries:
            return self
        key = same_libraries(libraries)
        other = self._others.get(key)
        if other is None or other.ended:
            other = self._others[key] = PreloadedServer(libraries).__enter__()
        return other

    @property
    def ended(self) -> bool:
        """Whether its process has ended."""
        return self.gone or self._process is None or self._process.poll() is not None

    def ask(self, request: Mapping[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        """Return the server's answer; ChildProcessError where it is gone."""
        self._asked += 1
        try:
            socket.send_fds(self._mine, [json.dumps({"number": self._asked, **request}).encode()], list(descriptors))
            while message := self._mine.recv(_LONGEST):
                answer: dict[str, Any] = json.loads(message)
                if answer["number"] == self._asked:
                    return answer
                # It is to a request of which a signal ended the wait: nobody knows of an agent that was started by it.
                if "pid" in answer:
                    send([answer["pid"]], signal.SIGKILL)
        except (BrokenPipeError, ConnectionResetError):
            pass
        self.gone = True
        raise ChildProcessError("the process that forks agents ended; what it said is on standard error")


def same_libraries(listed: str) -> tuple[bytes, ...]:
    """Return what tells libraries, as LD_PRELOAD lists them: their contents, or the name by which one is looked for."""
    names = listed.replace(":", " ").split()
    return tuple(blake3(Path(one).read_bytes()).digest() if "/" in one else one.encode() for one in names)


def serve(end: socket.socket) -> None:
    """Fork an agent per request until the other end is closed."""
    for name in _PRELOADED:
        __import__(name)
    # Imported objects stay in shared pages: no garbage collection touches them again.
    gc.collect()
    gc.freeze()
    # What these modules would undo at the end is this process's own: a fork that undid it, torch's operators for
    # instance, would copy the pages of all that first.
    for one in tuple(weakref.finalize._registry):  # type: ignore[attr-defined]  # there is no other list of them
        one.atexit = False
    os.environ.pop(_ROOM, None)
    codes: dict[int, int] = {}
    while True:
        message, descriptors, _, _ = socket.recv_fds(end, _LONGEST, 1)
        if not message:
            return
        request = json.loads(message)
        number = request["number"]
        if "reap" in request:
            pid = request["reap"]
            # Who has not heard the answer asks again.
            if pid not in codes:
                codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            _answer(end, {"number": number, "code": codes[pid]})
            continue
        pid = _fork()
        if pid == 0:
            end.close()
            with _ending():
                _be_agent(request, descriptors[0])
        os.close(descriptors[0])
        codes.pop(pid, None)
        _answer(end, {"number": number, "pid": pid})


def _answer(end: socket.socket, answer: Mapping[str, Any]) -> None:
    # Nobody hears the answer to a request of which a signal ended the wait; then the other end is closed soon.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        end.send(json.dumps(answer).encode())


def _be_agent(request: Mapping[str, Any], output: int) -> None:
    enter(request["entries"])
    if request["space"]:
        move_into(request["space"])
    os.chdir(request["directory"])
    _take_output(output, output)
    os.close(output)
    _take_environment(request["environment"])
    arguments = request["arguments"]
    slots = [int(one.partition("=")[2]) for one in arguments if one.startswith("--nproc-per-node=")]
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    sys.argv = [run.__file__, *arguments]
    sys.orig_argv = [sys.executable, "-m", "torch.distributed.run", *arguments]
    waiting = _Waiting(sum(slots))
    fresh = SubprocessHandler._popen

    def popen(self: Any, command: tuple[str, ...], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        worker = waiting.start(command, environment, self._stdout, self._stderr)
        return worker or fresh(self, command, environment)

    SubprocessHandler._popen = popen  # type: ignore[assignment,method-assign]
    run.main(arguments)


class _Waiting:
    """Workers in reserve, forked before their agent has any thread."""

    def __init__(self, count: int) -> None:
        self._ends: list[tuple[int, socket.socket]] = []
        for _ in range(count):
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = _fork()
            if pid == 0:
                for _, end in self._ends:
                    end.close()
                mine.close()
                with _ending():
                    _be_worker(theirs)
            theirs.close()
            self._ends.append((pid, mine))

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], stdout: Any, stderr: Any
    ) -> subprocess.Popen[bytes] | None:
        """Return a worker made from one in reserve; None if none is left."""
        if not self._ends or command[1:2] != ("-u",):
            return None
        pid, end = self._ends.pop(0)
        request = {"arguments": list(command[2:]), "environment": dict(environment), "directory": os.getcwd()}
        outputs = [1 if stdout is None else stdout.fileno(), 2 if stderr is None else stderr.fileno()]
        with end:
            socket.send_fds(end, [json.dumps(request).encode()], outputs)
        return _Forked(pid, command)


class _Forked(subprocess.Popen[bytes]):
    """A forked child, with the part of Popen for waiting and signalling."""

    def __init__(self, pid: int, command: Sequence[str]) -> None:
        self.args, self.pid, self.returncode = command, pid, None
        self.stdin = self.stdout = self.stderr = None
        self._child_created = True
        self._waitpid_lock = threading.Lock()


def _be_worker(end: socket.socket) -> None:
    message, descriptors, _, _ = socket.recv_fds(end, _LONGEST, 2)
    end.close()
    if not message:
        return
    request = json.loads(message)
    _take_output(*descriptors)
    for number in descriptors:
        os.close(number)
    os.chdir(request["directory"])
    _take_environment(request["environment"])
    script, *arguments = request["arguments"]
    sys.argv = [script, *arguments]
    sys.orig_argv = [sys.executable, "-u", script, *arguments]
    # As a fresh interpreter would look for modules.
    own = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path[1:]]
    sys.path[:1] = [str(Path(script).resolve().parent), *own]
    runpy.run_path(script, run_name="__main__")


def _fork() -> int:
    """Fork a child that leads a session and dies with this process."""
    from elastic3d.worker.processes.process import die_with_parent

    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent(parent)
        os.setsid()
    return pid


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """End this process after the block as an interpreter would that has run nothing else."""
    code = 1
    try:
        yield
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1 if error.code else 0
        if isinstance(error.code, str):
            sys.stderr.write(error.code + "\n")
    except BaseException:  # noqa: BLE001 (a process's edge)
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _take_output(stdout: int, stderr: int) -> None:
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True, write_through=True)


def _take_environment(environment: Mapping[str, str]) -> None:
    """Make `environment` this process's own, for C, for Python and for whoever reads it under /proc."""
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, stop = int(fields[47]), int(fields[48])
    block = b"".join(f"{name}={value}".encode() + b"\0" for name, value in environment.items())
    assert len(block) <= stop - start, "the environment is larger than the room the server has for it"
    # Nothing points into the block any more: new values are elsewhere.
    ctypes.memset(start, 0, stop - start)
    ctypes.memmove(start, block, len(block))


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
