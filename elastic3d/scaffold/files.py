"""The templates with a job's own values in them.

A template is a file that works as it is, for one example job; a value is put in by replacing the text that stands for
it there, all of them in one pass, so that no value is taken for a text of the template. tests/scaffold hold that each
text is still in a template, and that nothing of the example is left in what another job is given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from elastic3d.errors import ConfigurationError
from elastic3d.scaffold.job import NewJob
from elastic3d.scaffold.places import HOST_ETCD, PLACES, Place, templates

HOME = Path(__file__).parent
NAME, LEAST, MOST, SLOTS, NAMESPACE, STORE = "gpt-1b", 2, 8, 8, "training", "./checkpoints"
"""Of the job in the templates."""
MEMORY = "elastic3d plan --model llama-7b --nodes 2 --slots 8 --device h200 --host-memory"
"""The command in the templates that says where their memory limit comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFile:
    """A file that is to be written, at a path below the job's folder."""

    path: PurePosixPath
    text: str


def files(place: Place, job: NewJob) -> tuple[NewFile, ...]:
    """Return the files of a job; ConfigurationError where the templates are not installed."""
    with_etcd = not job.endpoint
    return tuple(
        NewFile(path=PurePosixPath(one.target), text=_filled(_read(one.source), replacements(one.source, place, job)))
        for one in templates(place, with_etcd=with_etcd)
    )


def replacements(source: str, place: Place, job: NewJob) -> Mapping[str, str]:
    """Return the new text for each text of the template at `source` that stands for a value."""
    folder = source.partition("/")[0]
    counts = f"{job.least}:{job.most}"
    match folder:
        case "local":
            # As it is: JSON's escapes of what lies beyond 16 bits are two halves of nothing in Python.
            return {json.dumps(STORE): json.dumps(job.store, ensure_ascii=False)}
        case "container":
            extra = "[obstore]" if "://" in job.store and not job.store.startswith("file://") else ""
            return {
                "deploy/container/Containerfile": "Containerfile",
                f"example.org/{NAME}:1": job.image,
                "elastic3d[obstore]": f"elastic3d{extra}",
            }
        case "slurm":
            return {
                NAME: job.name,
                f"NODES={LEAST}:{MOST}": f"NODES={counts}",
                f"ENDPOINT={HOST_ETCD}": f"ENDPOINT={job.endpoint}",
                f"SLOTS={SLOTS}": f"SLOTS={job.slots}",
                f"--array=0-{MOST - 1}": f"--array=0-{job.most - 1}",
                f"--nodes={MOST}\n": f"--nodes={job.most}\n",
            }
        case "skypilot":
            return {
                "deploy/skypilot/node.yaml": "node.yaml",
                NAME: job.name,
                f"seq {MOST}": f"seq {job.most}",
                f"H100:{SLOTS}": f"H100:{job.slots}",
                f"ETCD: {HOST_ETCD}": f'ETCD: "{job.endpoint}"',
                f"--nnodes={LEAST}:{MOST}": f"--nnodes={counts}",
            }
        case "systemd":
            return {
                NAME: job.name,
                f"NNODES={LEAST}:{MOST}": f"NNODES={counts}",
                f"SLOTS={SLOTS}": f"SLOTS={job.slots}",
                f"\nETCD={HOST_ETCD}": f"\nETCD={job.endpoint or PLACES[place].endpoint}",
                MEMORY: _memory(job),
            }
    assert folder == "kubernetes"
    own = _in_namespace(PLACES[place].endpoint or "", job.namespace)
    return {
        "deploy/kubernetes/": "kubernetes/",
        f"example.org/{NAME}:1": job.image,
        NAME: job.name,
        PLACES[place].endpoint or "": job.endpoint or own,
        f".{NAMESPACE}.svc": f".{job.namespace}.svc",
        f"namespace: {NAMESPACE}": f"namespace: {job.namespace}",
        f"and {NAMESPACE},": f"and {job.namespace},",
        f"{LEAST} to {MOST} nodes of {SLOTS} devices": f"{job.least} to {job.most} nodes of {job.slots} devices",
        f"completions: {MOST}": f"completions: {job.most}",
        f"parallelism: {MOST}": f"parallelism: {job.most}",
        f"minAvailable: {LEAST}": f"minAvailable: {job.least}",
        f"--nnodes={LEAST}:{MOST}": f"--nnodes={counts}",
        f"--nproc-per-node={SLOTS}": f"--nproc-per-node={job.slots}",
        f'nvidia.com/gpu: "{SLOTS}"': f'nvidia.com/gpu: "{job.slots}"',
        f"The {LEAST} of --nnodes": f"The {job.least} of --nnodes",
        MEMORY: _memory(job),
    }


def _memory(job: NewJob) -> str:
    return (
        f"Change: what llama-7b takes on {LEAST} nodes of {SLOTS} H200. For yours: "
        f"elastic3d plan train.py --nodes {job.least} --slots {job.slots} --host-memory"
    )


def _in_namespace(text: str, namespace: str) -> str:
    return text.replace(f".{NAMESPACE}.svc", f".{namespace}.svc")


def _filled(text: str, new: Mapping[str, str]) -> str:
    """Return `text` with all texts replaced in one pass, the longest that fits first."""
    texts = sorted(new, key=len, reverse=True)
    return re.sub("|".join(map(re.escape, texts)), lambda match: new[match[0]], text)


def _read(source: str) -> str:
    try:
        return (HOME / source).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"the template {source} is not there ({error.strerror}): this installation of elastic3d lacks files; "
            "install it anew, from a wheel or from a checkout whose symbolic links were kept"
        ) from error
