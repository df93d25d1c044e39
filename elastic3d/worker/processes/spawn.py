"""New interpreters where a fork will not do: for a dead template's successor, and for scripts unsafe to fork.

The user's script is run again with the keeper's own command line. Environment variables say what it is to become when
it calls `elastic3d.run`; they are removed before any user code could pass them on.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from elastic3d import environment
from elastic3d.worker.processes import packets, process, template
from elastic3d.worker.processes.template import TrainerMain

# This runs in an empty interpreter, before the imports, which take seconds: from here on the child dies with its
# parent. The parent-death signal outlives exec, and setting it in a preexec function would not be safe beside threads.
_SHIM = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(85)
os.execv(sys.argv[2], sys.argv[2:])
"""

_BARE = """\
import json, sys
command = json.loads(sys.argv[1])
sys.path[:] = command["path"]
from elastic3d.worker.processes import spawn
spawn.bare_template(command)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """How this process was started, so that another can be started the same way.

    arguments: of the interpreter, its own options first. directory: where it was started.
    """

    executable: str
    arguments: tuple[str, ...]
    directory: str
    path: tuple[str, ...]

    @classmethod
    def current(cls) -> Script:
        """Return how this process was started. To be called early: the script may change its directory."""
        return cls(
            executable=sys.executable,
            arguments=tuple(sys.orig_argv[1:]),
            directory=os.getcwd(),
            path=tuple(os.path.abspath(entry) for entry in sys.path),
        )


def serve_role_from_environment(trainer_main: TrainerMain) -> None:
    """Become the template or the trainer this interpreter was started to be; return if it was started as neither.

    `elastic3d.run` calls it first. In a process started for a role it neither returns nor raises.
    """
    role = environment.ROLE.take()
    if role is None:
        return
    parent = int(environment.ROLE_PARENT.take() or "")
    descriptors = [int(number) for number in (environment.ROLE_DESCRIPTORS.take() or "").split(",")]
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    if role == "template":
        control = socket.socket(fileno=descriptors[0])
        if process.fork_hazard() is not None:
            script = Script.current()

            def trainer_main(spec: str, inherited: tuple[int, ...]) -> None:
                _exec_trainer(script, spec, inherited)

        template.serve(control, trainer_main, parent)
    process.die_with_parent(parent)
    with open(descriptors[0], encoding="utf-8") as file:
        spec = file.read()
    template.run_trainer_main(trainer_main, spec, tuple(descriptors[1:]))


def start_template(script: Script) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run the script again as a template; return its process and the keeper's end of its socket.

    The calling thread must live as long as the template may.
    """
    return _start(script, script.arguments, role=True)


def start_bare_template(script: Script) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a template whose trainers each run the script again, for scripts that are not safe to fork."""
    command = json.dumps(
        {
            "executable": script.executable,
            "arguments": script.arguments,
            "directory": script.directory,
            "path": script.path,
            "parent": os.getpid(),
        }
    )
    return _start(script, ("-c", _BARE, command), role=False)


def _start(script: Script, arguments: Sequence[str], *, role: bool) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = packets.socket_pair()
    with theirs:
        variables = {**os.environ, environment.THREADS.name: "1", environment.NVML_CHECK.name: "1"}
        if role:
            variables |= _role("template", os.getpid(), [theirs.fileno()])
        else:
            arguments = (*arguments, str(theirs.fileno()))
        started = subprocess.Popen(
            [script.executable, "-I", "-S", "-c", _SHIM, str(os.getpid()), script.executable, *arguments],
            env=variables,
            cwd=script.directory,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return started, ours


def _role(role: str, parent: int, descriptors: Sequence[int]) -> Mapping[str, str]:
    return {
        environment.ROLE.name: role,
        environment.ROLE_PARENT.name: str(parent),
        environment.ROLE_DESCRIPTORS.name: ",".join(map(str, descriptors)),
    }


def bare_template(command: dict[str, object]) -> NoReturn:
    """Serve as a template that runs the script again for each trainer: the main of a bare interpreter."""
    script = Script(
        executable=str(command["executable"]),
        arguments=tuple(command["arguments"]),  # type: ignore[arg-type]
        directory=str(command["directory"]),
        path=tuple(command["path"]),  # type: ignore[arg-type]
    )
    control = socket.socket(fileno=int(sys.argv[2]))
    os.set_inheritable(control.fileno(), False)

    def trainer_main(spec: str, descriptors: tuple[int, ...]) -> None:
        _exec_trainer(script, spec, descriptors)

    template.serve(control, trainer_main, int(str(command["parent"])))


def _exec_trainer(script: Script, spec: str, descriptors: tuple[int, ...]) -> NoReturn:
    """Replace this fresh child of a template with the script, run again as a trainer."""
    file = os.memfd_create("elastic3d-spec", 0)
    os.write(file, spec.encode())
    os.lseek(file, 0, os.SEEK_SET)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, True)
    os.chdir(script.directory)
    variables = {**os.environ, **_role("trainer", os.getppid(), [file, *descriptors])}
    os.execve(script.executable, [script.executable, *script.arguments], variables)
