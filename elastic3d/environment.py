"""The environment variables of elastic3d and those of others that it reads: their names are here and nowhere else.

Users set few of them, for settings of a machine rather than of a job. The rest pass information from one process of a
node to another that it starts, and are of no use to anybody else.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum


class SetBy(StrEnum):
    """The one that sets a variable; the values are words for people."""

    USER = "you"
    ELASTIC3D = "elastic3d, for processes that it starts"
    TORCHRUN = "torchrun"
    MACHINE = "the scheduler or the system"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One environment variable, and its default."""

    name: str
    """As it is written in the environment."""
    meaning: str
    """Its meaning, in a few words for people."""
    set_by: SetBy
    """Who sets it."""
    default: str = ""
    """Its value if it is not set; "" for none."""

    def read(self) -> str:
        """Return the variable's value in this process's environment, the default if it is not set."""
        return os.environ.get(self.name, self.default)

    def need(self) -> str:
        """Return the variable's value in this process's environment, where it is always set; KeyError otherwise."""
        return os.environ[self.name]

    def take(self) -> str | None:
        """Return the variable's value, None if not set, and remove it: processes started next must not see it."""
        return os.environ.pop(self.name, None)


_list: list[Variable] = []


def _variable(name: str, set_by: SetBy, meaning: str, default: str = "") -> Variable:
    _list.append(Variable(name=name, set_by=set_by, meaning=meaning, default=default))
    return _list[-1]


LOG = _variable(
    "ELASTIC3D_LOG",
    SetBy.USER,
    "what to show on stderr: debug (all events), info (what people should know), json (the same, one object per line)",
    "info",
)
TAKE_OVER_ETCD = _variable(
    "ELASTIC3D_TAKE_OVER_ETCD", SetBy.USER, "0 leaves --rdzv-backend=etcd to torch's own backend", "1"
)
DEVICE = _variable(
    "ELASTIC3D_DEVICE", SetBy.USER, 'what device="auto" of elastic3d.run means here: auto, cpu or cuda', "auto"
)
LABELS = _variable("ELASTIC3D_LABELS", SetBy.USER, "where this node stands, as zone=eu1,rack=r7")
PODINFO = _variable("ELASTIC3D_PODINFO", SetBy.USER, "file of a Kubernetes downward API volume with the pod's labels")
ENDPOINT = _variable("ELASTIC3D_ENDPOINT", SetBy.USER, "--endpoint of the command line: where etcd is")
RUN_ID = _variable("ELASTIC3D_RUN_ID", SetBy.USER, "--id of the command line: which job is meant")
KEY_FILE = _variable("ELASTIC3D_KEY_FILE", SetBy.USER, "--key-file of the command line: the key of an encrypted store")
STORE_KEY = _variable("ELASTIC3D_STORE_KEY", SetBy.USER, "the key of an encrypted store itself, as text")

RENDEZVOUS = _variable("ELASTIC3D_RENDEZVOUS", SetBy.ELASTIC3D, "torchrun's options, as JSON, from agent to keepers")
NODE_TOKEN = _variable("ELASTIC3D_NODE_TOKEN", SetBy.ELASTIC3D, "names the sockets between a node's keepers")
AGENT_PROCESS = _variable(
    "ELASTIC3D_AGENT_PROCESS", SetBy.ELASTIC3D, "the agent that keepers end with: its pid and start"
)
AGENT_BEGUN = _variable(
    "ELASTIC3D_AGENT_BEGUN", SetBy.ELASTIC3D, "when `elastic3d agent` was started, on the machine's monotonic clock"
)
AGENT = _variable("ELASTIC3D_AGENT", SetBy.ELASTIC3D, "the mark by which a guard finds the processes of its agent")
ROLE = _variable("ELASTIC3D_ROLE", SetBy.ELASTIC3D, "that a script runs as a template or as a trainer")
ROLE_PARENT = _variable("ELASTIC3D_ROLE_PARENT", SetBy.ELASTIC3D, "the pid that process ends with")
ROLE_DESCRIPTORS = _variable("ELASTIC3D_ROLE_DESCRIPTORS", SetBy.ELASTIC3D, "the descriptors it inherits")
ASKED = _variable("ELASTIC3D_ASKED", SetBy.ELASTIC3D, "what `elastic3d plan` or `calibrate` asks a script, as JSON")
EVALUATED = _variable("ELASTIC3D_EVALUATED", SetBy.ELASTIC3D, "which checkpoint `elastic3d eval` asks a script about")

RANK = _variable("RANK", SetBy.TORCHRUN, "rank of this process", "0")
WORLD_SIZE = _variable("WORLD_SIZE", SetBy.TORCHRUN, "number of processes", "1")
LOCAL_RANK = _variable("LOCAL_RANK", SetBy.TORCHRUN, "rank of this process on its node", "0")
LOCAL_WORLD_SIZE = _variable("LOCAL_WORLD_SIZE", SetBy.TORCHRUN, "number of processes on this node", "1")
MASTER_ADDR = _variable("MASTER_ADDR", SetBy.TORCHRUN, "host of rank 0's store")
MASTER_PORT = _variable("MASTER_PORT", SetBy.TORCHRUN, "port of rank 0's store")
TORCH_RUN_ID = _variable("TORCHELASTIC_RUN_ID", SetBy.TORCHRUN, "--rdzv-id; set wherever torchrun started the process")
TORCH_RESTARTS = _variable("TORCHELASTIC_RESTART_COUNT", SetBy.TORCHRUN, "how often the workers were started anew", "0")
TORCH_ERROR_FILE = _variable("TORCHELASTIC_ERROR_FILE", SetBy.TORCHRUN, "where torchrun looks for why a worker failed")

SHUTDOWN_TIMEOUT = _variable(
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SetBy.USER, "seconds between torchrun's SIGTERM to its workers and SIGKILL", "30"
)
THREADS = _variable("OMP_NUM_THREADS", SetBy.USER, "CPU threads; 1 in keepers, trainers set their own", "1")
NVML_CHECK = _variable(
    "PYTORCH_NVML_BASED_CUDA_CHECK", SetBy.ELASTIC3D, "that torch looks for devices without initialising CUDA"
)
GLOO_INTERFACE = _variable("GLOO_SOCKET_IFNAME", SetBy.ELASTIC3D, "network interface of a trainer's collectives")
NCCL_INTERFACE = _variable("NCCL_SOCKET_IFNAME", SetBy.ELASTIC3D, "the same for NCCL; your own value stays")
NCCL_ERROR_HANDLING = _variable(
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", SetBy.ELASTIC3D, "0: torch's watchdog ends no trainer; elastic3d does"
)
NCCL_MONITORING = _variable(
    "TORCH_NCCL_ENABLE_MONITORING", SetBy.ELASTIC3D, "0: nor does what watches over that watchdog"
)
NCCL_NVLS = _variable("NCCL_NVLS_ENABLE", SetBy.ELASTIC3D, "0 with tp above 1, where sums in the switch change bits")
CUBLAS_WORKSPACE = _variable("CUBLAS_WORKSPACE_CONFIG", SetBy.ELASTIC3D, "workspaces with which products repeat")
OTLP_PROTOCOL = _variable(
    "OTEL_EXPORTER_OTLP_PROTOCOL",
    SetBy.USER,
    "how telemetry= is sent: http/protobuf, and nothing else",
    "http/protobuf",
)
OTEL_INTERVAL = _variable(
    "OTEL_METRIC_EXPORT_INTERVAL",
    SetBy.USER,
    "milliseconds from one export of metrics by telemetry= to the next",
    "60000",
)
VISIBLE_CUDA = _variable("CUDA_VISIBLE_DEVICES", SetBy.USER, "which NVIDIA devices a process sees")
VISIBLE_ROCM = _variable("HIP_VISIBLE_DEVICES", SetBy.USER, "which AMD devices a process sees")
ACCELERATE_CPU = _variable(
    "ACCELERATE_USE_CPU",
    SetBy.ELASTIC3D,
    "that Accelerate opens no device, while TrainingArguments are made in a trainer",
)
PMI_SIZE = _variable("PMI_SIZE", SetBy.MACHINE, "number of MPI processes, hidden from Accelerate in a trainer")
OPEN_MPI_SIZE = _variable("OMPI_COMM_WORLD_SIZE", SetBy.MACHINE, "the same of Open MPI")
MVAPICH_SIZE = _variable("MV2_COMM_WORLD_SIZE", SetBy.MACHINE, "the same of MVAPICH2")
TEMPORARY = _variable("TMPDIR", SetBy.MACHINE, "folder for temporary files")
SLURM_NODE = _variable("SLURMD_NODENAME", SetBy.MACHINE, "name of this node in Slurm: its label host")
SLURM_LEVELS = _variable("SLURM_TOPOLOGY_ADDR_PATTERN", SetBy.MACHINE, "kinds of the parts of SLURM_TOPOLOGY_ADDR")
SLURM_PLACE = _variable("SLURM_TOPOLOGY_ADDR", SetBy.MACHINE, "where this node stands in Slurm's topology")
KUBERNETES_NODE = _variable("NODE_NAME", SetBy.MACHINE, "name of the Kubernetes node, if the pod passes it on")

VARIABLES: tuple[Variable, ...] = tuple(_list)
"""All of them: first those for users, then those between processes, then those of others."""
