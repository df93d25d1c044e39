"""The manifests fit their schemas and each other, and a manifest with a mistake is refused."""

from __future__ import annotations

import copy
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from elastic3d.cli import application
from elastic3d.cli.agent import LEFT
from elastic3d.quantities import parse_seconds
from tests.deploy.manifests import FOLDER, KUSTOMIZE, Refused, documents, everything, jobs, pods, validate
from tests.deploy.options import Started, started

JOB, JOBSET, RUNTIME, TRAINJOB = (
    "job/job.yaml",
    "jobset/jobset.yaml",
    "trainjob/runtime.yaml",
    "trainjob/train-job.yaml",
)
ALL = [*everything()]
FOLDERS = sorted(path.parent.name for path in FOLDER.glob("*/kustomization.yaml"))


@pytest.mark.parametrize(("name", "document"), ALL, ids=[f"{name} {one['kind']}" for name, one in ALL])
def test_a_manifest_fits_its_schema(name: str, document: dict[str, Any]) -> None:
    """Strictly, for the oldest Kubernetes that has all fields, and for the newest."""
    validate(document)


def only(path: str) -> dict[str, Any]:
    """Return a copy of the one document in a file."""
    (document,) = documents(path)
    return copy.deepcopy(document)


def job_of(document: dict[str, Any]) -> dict[str, Any]:
    return jobs(document)[0]


def container_of(document: dict[str, Any]) -> dict[str, Any]:
    containers: list[dict[str, Any]] = pods(document)[0]["spec"]["containers"]
    return containers[0]


MISTAKES: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "a typo": (JOB, lambda one: job_of(one).update(complettions=8)),
    "a deep typo": (JOB, lambda one: container_of(one)["securityContext"].update(readOnlyRootFileSystem=True)),
    "a text for a number": (JOB, lambda one: job_of(one).update(parallelism="8")),
    "a wrong action of a pod": (JOB, lambda one: job_of(one)["podFailurePolicy"]["rules"][0].update(action=1)),
    "a wrong action": (JOBSET, lambda one: one["spec"]["failurePolicy"]["rules"][0].update(action="Restart")),
    "an unknown field": (JOBSET, lambda one: one["spec"].update(elastic=True)),
    "a typo in the Job of a JobSet": (JOBSET, lambda one: job_of(one).update(completionsMode="Indexed")),
    "a policy that Trainer has not": (RUNTIME, lambda one: one["spec"]["mlPolicy"].update(elastic={"min": 2})),
    "a typo in a TrainJob": (TRAINJOB, lambda one: one["spec"]["trainer"].update(numNode=8)),
    "no runtime": (TRAINJOB, lambda one: one["spec"].pop("runtimeRef")),
    "a typo in a certificate": ("common/certificate.yaml", lambda one: one["spec"].update(secretname="x")),
    "a wrong time": ("common/certificate.yaml", lambda one: one["spec"].update(duration="90d")),
    "a file that nobody lists": ("job/kustomization.yaml", lambda one: one.update(resource=["job.yaml"])),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_refused(what: str) -> None:
    """Of each schema: fields that it does not know, values of another type, words that are not of the list."""
    path, mistake = MISTAKES[what]
    document = only(path)
    validate(document)
    mistake(document)
    with pytest.raises(Refused):
        validate(document)


def test_every_file_is_applied_by_a_kustomization() -> None:
    """And every file that one names is there."""
    for folder in FOLDERS:
        (one,) = documents(f"{folder}/kustomization.yaml")
        listed = {*one["resources"], *(patch["path"] for patch in one.get("patches", ()) if "path" in patch)}
        here = {path.name for path in (FOLDER / folder).glob("*.yaml")} - {"kustomization.yaml"}
        assert {name for name in listed if name.endswith(".yaml")} == here
        assert all((FOLDER / folder / name / "kustomization.yaml").exists() for name in listed - here)
    assert {name.partition("/")[0] for name, _ in ALL} == set(FOLDERS)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("folder", FOLDERS)
def test_what_kustomize_makes_fits_its_schemas(folder: str) -> None:
    """With its patches applied, and everything in one namespace."""
    done = subprocess.run(["kubectl", "kustomize", str(FOLDER / folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = [*yaml.safe_load_all(done.stdout)]
    for document in made:
        validate({**document, "metadata": {"name": document["metadata"]["name"]}})
        assert document["kind"] == "ClusterTrainingRuntime" or document["metadata"]["namespace"] == "training"
    if folder == "trainjob":
        apart = {"jobset.sigs.k8s.io/jobset-name": "gpt-1b"}
        (policy,) = (one["spec"] for one in made if one["kind"] == "NetworkPolicy")
        assert policy["podSelector"]["matchLabels"] == policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
        assert (
            policy["podSelector"]["matchLabels"] == policy["egress"][0]["to"][0]["podSelector"]["matchLabels"] == apart
        )
    if folder == "job-kueue":
        (job,) = (one for one in made if one["kind"] == "Job")
        assert job["metadata"]["labels"] == {"job": "gpt-1b", "kueue.x-k8s.io/queue-name": "training"}
        assert job["metadata"]["annotations"]["kueue.x-k8s.io/job-min-parallelism"] == "2"


def test_the_job_is_the_same_in_each_form() -> None:
    """Of the shared runtime, with the names of secrets and of pods that all jobs share."""
    job = only(JOB)["spec"]
    assert job_of(only(JOBSET)) == job
    shared = only(RUNTIME)
    trainer = only(TRAINJOB)["spec"]["trainer"]
    container = container_of(shared)
    assert "args" not in container
    container |= {"args": trainer["args"], "image": trainer["image"]}
    assert trainer["command"] == container["command"]
    text = yaml.safe_dump(job_of(shared)).replace("train-job", "gpt-1b")
    assert yaml.safe_load(text) == job
    assert trainer["numNodes"] == shared["spec"]["mlPolicy"]["numNodes"] == job["parallelism"]


def agent() -> Started:
    container = container_of(only(JOB))
    return started([*container["command"], *container["args"]])


def test_the_job_takes_the_options_that_its_pods_are_given() -> None:
    """As torchrun and the rendezvous read them; and its numbers are those of the Job and its budget."""
    job, options = only(JOB)["spec"], agent()
    assert (options.least, options.most) == (2, job["completions"])
    assert job["completions"] == job["parallelism"]
    assert options.settings.run_id == only(JOB)["metadata"]["name"]
    assert options.script == ["train.py"]
    assert str(options.slots) == container_of(only(JOB))["resources"]["limits"]["nvidia.com/gpu"]
    (budget,) = documents("common/disruption-budget.yaml")
    assert budget["spec"]["minAvailable"] == options.least
    (queue,) = documents("job-kueue/queue.yaml")
    assert queue["metadata"]["annotations"]["kueue.x-k8s.io/job-min-parallelism"] == str(options.least)
    rules = {rule["action"]: rule for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule}
    assert rules["Ignore"]["onExitCodes"]["values"] == [LEFT]
    assert rules["Ignore"]["onExitCodes"]["containerName"] == container_of(only(JOB))["name"]
    # A Job that names more may not be made smaller.
    assert "maxFailedIndexes" not in job


def test_trainers_options_win_over_what_a_torch_policy_would_inject(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubeflow Trainer injects PET_*, which torchrun takes for defaults."""
    for name, value in {"NNODES": "3", "NPROC_PER_NODE": "1", "NODE_RANK": "2", "MASTER_ADDR": "x"}.items():
        monkeypatch.setenv(f"PET_{name}", value)
    trainer = only(TRAINJOB)["spec"]["trainer"]
    options = started([*trainer["command"], *trainer["args"]])
    assert (options.least, options.most, options.slots) == (2, 8, 8)


def test_a_pod_has_time_to_leave() -> None:
    """Grace is above torchrun's own time, which is above the drain's."""
    pod = pods(only(JOB))[0]["spec"]
    environment = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
    shutdown = float(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    drain = parse_seconds(agent().conf["drain"])
    assert drain is not None
    assert drain + 2 <= shutdown <= pod["terminationGracePeriodSeconds"] - 5


def test_the_memory_limit_is_what_plan_says() -> None:
    """The command in the manifest says how much; /dev/shm comes on top. Its --nodes are the fewest that may train."""
    text = (FOLDER / JOB).read_text()
    match = re.search(r"# (elastic3d plan .*--host-memory)", text)
    assert match is not None
    words = shlex.split(match[1])
    result = CliRunner().invoke(application(), [*words[1:], "--json"])
    assert result.exit_code == 0, result.output
    (needed,) = re.findall(r'"limit": (\d+)', result.stdout)
    pod = pods(only(JOB))[0]["spec"]
    (shm,) = (one["emptyDir"] for one in pod["volumes"] if one["name"] == "shm")
    limit = container_of(only(JOB))["resources"]["limits"]["memory"]
    assert limit == container_of(only(JOB))["resources"]["requests"]["memory"]
    assert gib(limit) == (int(needed) >> 30) + gib(shm["sizeLimit"])
    assert words[words.index("--nodes") + 1] == str(agent().least)


def gib(quantity: str) -> int:
    assert quantity.endswith("Gi")
    return int(quantity[:-2])


def test_pods_may_do_nothing_that_they_need_not() -> None:
    """No token of the cluster, not root, no way to become it, nothing to write but what is mounted for it."""
    seen = 0
    for name, document in ALL:
        for pod in pods(document):
            spec = pod["spec"]
            assert spec["automountServiceAccountToken"] is False, name
            assert spec["securityContext"]["runAsNonRoot"] is True
            assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            for container in (*spec.get("initContainers", ()), *spec["containers"]):
                own = container["securityContext"]
                assert own["allowPrivilegeEscalation"] is False
                assert own["readOnlyRootFilesystem"] is True
                assert own["capabilities"] == {"drop": ["ALL"]}
                assert "memory" in container["resources"]["limits"]
                assert not container["image"].endswith(":latest")
                assert ":" in container["image"]
                assert {one["name"] for one in container["volumeMounts"]} <= {
                    *(volume["name"] for volume in spec.get("volumes", ())),
                    *(one["metadata"]["name"] for one in document["spec"].get("volumeClaimTemplates", ())),
                }
                # Credentials are files.
                assert not any("secretKeyRef" in one.get("valueFrom", {}) for one in container.get("env", ()))
            seen += 1
    assert seen == 5


def test_every_secret_is_made_by_a_certificate_or_named_in_the_guide() -> None:
    """And etcd's members are named in their certificate as jobs and members name them."""
    secrets = {
        volume["secret"]["secretName"]
        for _, document in ALL
        for pod in pods(document)
        for volume in pod["spec"].get("volumes", ())
        if "secret" in volume
    }
    made = {one["spec"]["secretName"] for _, one in ALL if one["kind"] == "Certificate"} | {"train-job-etcd"}
    guide = (FOLDER.parent.parent / "docs" / "guides" / "kubernetes.md").read_text()
    assert {name for name in secrets - made if f"`{name}`" not in guide} == set()
    (certificate,) = (one["spec"] for _, one in ALL if one.get("metadata") == {"name": "etcd-server"})
    text = (FOLDER / "etcd" / "stateful-set.yaml").read_text()
    hosts = {endpoint.partition(":")[0] for endpoint in agent().settings.endpoints.split(",")}
    assert hosts == {*re.findall(r"https://(etcd-\d[a-z.]+):2380", text)}
    assert {*certificate["dnsNames"]} == hosts | {"etcd-client.training.svc"}


def test_no_manifest_but_kustomizations_is_left_out() -> None:
    """Whatever a pod is made by is looked at by the tests above."""
    silent = {
        "Issuer",
        "Certificate",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "Service",
        "PersistentVolumeClaim",
        "TrainJob",
    }
    for name, document in ALL:
        if document["apiVersion"] != KUSTOMIZE and document["kind"] not in silent and name != "job-kueue/queue.yaml":
            assert pods(document), name
