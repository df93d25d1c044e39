"""The kinds of places that a job is started in, and the templates that each takes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Place(StrEnum):
    """What starts the nodes of a job."""

    KUBERNETES = "kubernetes"
    SLURM = "slurm"
    SKYPILOT = "skypilot"
    SYSTEMD = "systemd"
    LOCAL = "local"


HOST_ETCD = "e1:2379,e2:2379,e3:2379"
"""An etcd on three machines, as templates have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTemplate:
    """One file. source: its path among the templates; target: its path in the job's folder."""

    source: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceKind:
    """What a place needs.

    templates: always written. etcd: written where the job has no etcd yet. endpoint: of the place's own etcd, as the
    templates have it; "" where they start one themselves; None where there is none. store: where none is given, ""
    where one must be. object_store: a folder will not do.
    """

    templates: tuple[FileTemplate, ...]
    etcd: tuple[FileTemplate, ...] = ()
    endpoint: str | None = None
    store: str = ""
    object_store: bool = False


def _as_they_are(folder: str, *names: str, to: str = "") -> tuple[FileTemplate, ...]:
    return tuple(FileTemplate(source=f"{folder}/{name}", target=f"{to}{name}") for name in names)


_SCRIPT = _as_they_are("local", "train.py")
_REQUIREMENTS = _as_they_are("container", "requirements.txt")
_POD_ETCD = ",".join(f"etcd-{number}.etcd.training.svc:2379" for number in range(3))

PLACES: dict[Place, PlaceKind] = {
    Place.KUBERNETES: PlaceKind(
        templates=(
            *_SCRIPT,
            *_REQUIREMENTS,
            *_as_they_are("container", "Containerfile"),
            *_as_they_are(
                "kubernetes",
                "common/certificate.yaml",
                "common/disruption-budget.yaml",
                "common/kustomization.yaml",
                "common/network-policy.yaml",
                "job/job.yaml",
                "job/kustomization.yaml",
                to="kubernetes/",
            ),
        ),
        etcd=_as_they_are(
            "kubernetes/etcd",
            "backup.yaml",
            "certificates.yaml",
            "disruption-budget.yaml",
            "kustomization.yaml",
            "network-policy.yaml",
            "services.yaml",
            "stateful-set.yaml",
            to="kubernetes/etcd/",
        ),
        endpoint=_POD_ETCD,
        object_store=True,
    ),
    Place.SLURM: PlaceKind(
        templates=(*_SCRIPT, *_as_they_are("slurm", "array.sbatch", "elastic.sbatch")),
        etcd=_as_they_are("slurm", "etcd.sbatch"),
        endpoint="",
    ),
    Place.SKYPILOT: PlaceKind(
        templates=(*_SCRIPT, *_REQUIREMENTS, *_as_they_are("skypilot", "node.yaml")),
        object_store=True,
    ),
    Place.SYSTEMD: PlaceKind(
        templates=(*_SCRIPT, *_as_they_are("systemd", "elastic3d-node.service", "node.env", to="systemd/")),
        etcd=_as_they_are(
            "systemd", "etcd.service", "etcd.env", "etcd-backup.service", "etcd-backup.timer", to="systemd/"
        ),
        endpoint=HOST_ETCD,
    ),
    Place.LOCAL: PlaceKind(templates=_SCRIPT, endpoint="127.0.0.1:2379", store="./checkpoints"),
}


def templates(place: Place, *, with_etcd: bool) -> tuple[FileTemplate, ...]:
    """Return the templates of a place. with_etcd: also those of an etcd."""
    kind = PLACES[place]
    return (*kind.templates, *(kind.etcd if with_etcd else ()))
