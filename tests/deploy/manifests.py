"""The manifests under deploy/kubernetes, each checked strictly against the schema of its kind, without a cluster.

Kinds of Kubernetes: the schemas in kubernetes-validate. JobSet and Kubeflow Trainer: the models in
kubeflow-trainer-api, which are made from their API. cert-manager: the fields used here, written down by hand below, for
no package has them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from kubeflow_trainer_api.models.trainer_v1alpha1_cluster_training_runtime import TrainerV1alpha1ClusterTrainingRuntime
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

from tests.paths import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
VERSIONS = ("1.33", "1.37")
"""The oldest Kubernetes in which all fields used are stable, and the newest with a schema."""
JOBSET, TRAINER, CERTIFICATES = "jobset.x-k8s.io/v1alpha2", "trainer.kubeflow.org/v1alpha1", "cert-manager.io/v1"
KUSTOMIZE = "kustomize.config.k8s.io/v1beta1"
_MODELS: dict[tuple[str, str], Any] = {
    (JOBSET, "JobSet"): JobsetV1alpha2JobSet,
    (TRAINER, "ClusterTrainingRuntime"): TrainerV1alpha1ClusterTrainingRuntime,
    (TRAINER, "TrainJob"): TrainerV1alpha1TrainJob,
}
ACTIONS = (
    "FailJobSet",
    "RestartJobSet",
    "RestartJobSetAndIgnoreMaxRestarts",
    "RestartJob",
    "RestartJobAndIgnoreMaxRestarts",
)
"""Of a JobSet's failure policy. The models take any text, and name these in their documentation."""

_WRITTEN_AS_TEXT = ("IoK8sApimachineryPkgApiResourceQuantity", "IoK8sApimachineryPkgUtilIntstrIntOrString")
"""Models that have fields where a manifest has text or a number. They are checked as parts of the Job they stand in."""


def _fields(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": [*required], "properties": properties}


_TEXT = {"type": "string", "minLength": 1}
_TIME = {"type": "string", "pattern": r"^([0-9]+h)?([0-9]+m)?([0-9]+s)?$", "minLength": 2}
_SPECS = {
    "Issuer": {
        **_fields(selfSigned=_fields(), ca=_fields(("secretName",), secretName=_TEXT)),
        "minProperties": 1,
        "maxProperties": 1,
    },
    "Certificate": _fields(
        ("secretName", "issuerRef"),
        secretName=_TEXT,
        commonName=_TEXT,
        isCA={"type": "boolean"},
        dnsNames={"type": "array", "items": _TEXT},
        duration=_TIME,
        renewBefore=_TIME,
        privateKey=_fields(
            algorithm={"enum": ["RSA", "ECDSA", "Ed25519"]},
            size={"type": "integer"},
            rotationPolicy={"enum": ["Never", "Always"]},
        ),
        usages={"type": "array", "items": {"enum": ["digital signature", "server auth", "client auth"]}},
        issuerRef=_fields(("name",), kind={"enum": ["Issuer", "ClusterIssuer"]}, name=_TEXT),
    ),
}
_KUSTOMIZATION = _fields(
    ("resources",),
    apiVersion={"const": KUSTOMIZE},
    kind={"const": "Kustomization"},
    namespace=_TEXT,
    resources={"type": "array", "items": _TEXT},
    patches={"type": "array", "items": _fields(path=_TEXT, patch=_TEXT, target=_fields(kind=_TEXT, name=_TEXT))},
)


class Refused(Exception):
    """A manifest does not fit its schema."""


def documents(path: str, folder: Path = FOLDER) -> list[dict[str, Any]]:
    """Return the documents of a file under deploy/kubernetes, or another folder."""
    return [*yaml.safe_load_all((folder / path).read_text())]


def everything(folder: Path = FOLDER) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return every document with the path of its file."""
    for path in sorted(folder.rglob("*.yaml")):
        name = str(path.relative_to(folder))
        yield from ((name, document) for document in documents(name, folder))


def validate(document: dict[str, Any]) -> None:
    """Check a document strictly; Refused says what does not fit."""
    kind = (document["apiVersion"], document["kind"])
    if document["apiVersion"] == KUSTOMIZE:
        _check(document, _KUSTOMIZATION)
    elif document["apiVersion"] == CERTIFICATES:
        if document["kind"] not in _SPECS:
            raise Refused(f"cert-manager has no {document['kind']} that is used here")
        named = _fields(("name",), name=_TEXT)
        parts = {"apiVersion": _TEXT, "kind": _TEXT, "metadata": named, "spec": _SPECS[document["kind"]]}
        _check(document, _fields(("metadata", "spec"), **parts))
    elif kind in _MODELS:
        _check(document, _schema(kind))
        for job in jobs(document):
            _check_core({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job})
    else:
        _check_core(document)


def jobs(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the spec of each Job that a document makes."""
    spec = document.get("spec", {})
    match document["kind"]:
        case "Job":
            return [spec]
        case "JobSet":
            return [one["template"]["spec"] for one in spec["replicatedJobs"]]
        case "ClusterTrainingRuntime":
            return [one["template"]["spec"] for one in spec["template"]["spec"]["replicatedJobs"]]
        case "CronJob":
            return [spec["jobTemplate"]["spec"]]
    return []


def pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the template of each pod that a document makes."""
    own = [document["spec"]["template"]] if document["kind"] == "StatefulSet" else []
    return own + [job["template"] for job in jobs(document) if "template" in job]


def _check_core(document: dict[str, Any]) -> None:
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except (
            kubernetes_validate.ValidationError,
            kubernetes_validate.InvalidSchemaError,
            kubernetes_validate.SchemaNotFoundError,
        ) as error:
            raise Refused(f"{document['kind']} in Kubernetes {version}: {error}") from error


def _check(document: dict[str, Any], schema: dict[str, Any]) -> None:
    try:
        jsonschema.validate(document, schema)
    except jsonschema.ValidationError as error:
        raise Refused(f"{document['kind']}: {error.json_path}: {error.message}") from error


@functools.cache
def _schema(kind: tuple[str, str]) -> dict[str, Any]:
    """Return the JSON schema of a model, in which nothing that it does not name is allowed."""
    schema: dict[str, Any] = _MODELS[kind].model_json_schema(by_alias=True)
    for one in (schema, *schema["$defs"].values()):
        if one.get("properties"):
            one.setdefault("additionalProperties", False)
        if one.get("title") in _WRITTEN_AS_TEXT:
            one.clear()
        elif one.get("title") == "JobsetV1alpha2FailurePolicyRule":
            one["properties"]["action"] = {"enum": [*ACTIONS]}
    return schema
