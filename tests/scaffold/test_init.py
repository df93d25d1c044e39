"""What `elastic3d init` writes is what deploy/ has, with the job's own values, and fits what will read it."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer.main
import yaml
from torch.distributed.run import config_from_args, get_args_parser
from typer.testing import CliRunner, Result

from elastic3d.cli import application
from elastic3d.errors import UsageError
from elastic3d.etcd_server.binary import etcd_version, find_etcd, require_sound
from elastic3d.scaffold.files import HOME, MEMORY, files, replacements
from elastic3d.scaffold.job import NewJob, checked
from elastic3d.scaffold.places import PLACES, Place, templates
from elastic3d.scaffold.steps import next_steps
from tests.deploy import test_skypilot
from tests.deploy.manifests import documents, everything, jobs, pods, validate
from tests.deploy.options import started
from tests.deploy.units import command, read, variables
from tests.paths import ROOT

OWN_ETCD = [Place.KUBERNETES, Place.SLURM, Place.SYSTEMD, Place.LOCAL]
EXAMPLE = NewJob(
    name="gpt-1b",
    least=2,
    most=8,
    slots=8,
    store="s3://bucket/gpt-1b",
    endpoint="",
    image="example.org/gpt-1b:1",
    namespace="training",
)
OTHER = NewJob(
    name="my-job",
    least=3,
    most=12,
    slots=4,
    store="s3://mine/my-job",
    endpoint="",
    image="registry.example.net:5000/team/my-job:v2",
    namespace="team-a",
)
ETCD = "x1:4001,x2:4001"


def written(place: Place, job: NewJob, folder: Path) -> Path:
    """Write the files of a job to a folder, and return it."""
    for file in files(place, job):
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text)
    return folder


def init(*arguments: object) -> Result:
    """Run the command."""
    return CliRunner().invoke(application(), ["init", *map(str, arguments)])


def refused(*arguments: object) -> str:
    """Run a command that has to be refused, and return why."""
    result = init(*arguments)
    assert isinstance(result.exception, UsageError), result.output
    assert result.exception.exit_code == 2
    return str(result.exception)


def every_template() -> Iterator[tuple[Place, str]]:
    for place in Place:
        for template in templates(place, with_etcd=True):
            yield place, template.source


def test_templates_are_the_files_of_deploy() -> None:
    """Not copies of them, which would go their own way."""
    for _, source in every_template():
        assert (HOME / source).resolve() == ROOT / "deploy" / source


@pytest.mark.parametrize("place", OWN_ETCD)
def test_the_examples_job_is_written_as_deploy_has_it(place: Place) -> None:
    """But for what init cannot know: paths are the job's own, and how much memory the model takes."""
    sources = {template.target: template.source for template in templates(place, with_etcd=True)}
    for file in files(place, EXAMPLE):
        text = (ROOT / "deploy" / sources[str(file.path)]).read_text()
        ours = file.text
        for one, other in (("deploy/kubernetes/", "kubernetes/"), ("deploy/container/", ""), ('"./check', '"s3')):
            text = text.replace(one, other)
        lines = zip(text.splitlines(), ours.splitlines(), strict=True)
        changed = [line for before, line in lines if before != line]
        known = ("# Change: ", "STORE = ", "ENDPOINT=  ")
        assert [line for line in changed if not line.strip().startswith(known)] == [], file.path


def test_every_text_that_is_replaced_is_in_a_template() -> None:
    """A template that says it in another way would keep the example's value, unnoticed."""
    seen: dict[str, set[str]] = {}
    for place, source in every_template():
        text = (HOME / source).read_text()
        for one in replacements(source, place, OTHER):
            seen.setdefault(f"{source.partition('/')[0]}: {one}", set()).update({source} if one in text else ())
    assert [one for one, sources in seen.items() if not sources] == []
    assert len(seen) > 30


@pytest.mark.parametrize("place", Place)
def test_nothing_of_the_example_is_left_in_another_job(place: Place) -> None:
    """Neither its name, nor its numbers, nor its etcd."""
    for file in files(place, dataclasses.replace(OTHER, endpoint=ETCD)):
        text = re.sub(r"# Change: .*", "", file.text)
        for gone in ("gpt-1b", "2:8", "e1:2379", ".training.", "namespace: training", "deploy/", MEMORY):
            assert gone not in text, f"{file.path}: {gone}"


def test_what_is_written_for_kubernetes_fits_its_schemas(tmp_path: Path) -> None:
    """Each document strictly, and the numbers of one job wherever they stand."""
    folder = written(Place.KUBERNETES, OTHER, tmp_path) / "kubernetes"
    everyone = [*everything(folder)]
    for _, document in everyone:
        validate(document)
    assert {name.partition("/")[0] for name, _ in everyone} == {"common", "etcd", "job"}
    for name in ("common", "etcd", "job"):
        (kustomization,) = documents(f"{name}/kustomization.yaml", folder)
        assert kustomization["namespace"] == "team-a"
        assert all((folder / name / one).exists() for one in kustomization["resources"])
    (job,) = documents("job/job.yaml", folder)
    (container,) = pods(job)[0]["spec"]["containers"]
    options = started([*container["command"], *container["args"]])
    assert (options.least, options.most, options.slots) == (3, 12, 4)
    assert options.settings.run_id == job["metadata"]["name"] == "my-job"
    assert options.settings.endpoints.split(",")[0] == "etcd-0.etcd.team-a.svc:2379"
    assert container["image"] == OTHER.image
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert jobs(job)[0]["completions"] == jobs(job)[0]["parallelism"] == 12
    (budget,) = documents("common/disruption-budget.yaml", folder)
    assert budget["spec"] == {
        "minAvailable": 3,
        "selector": {"matchLabels": {"job": "my-job"}},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    # The members of etcd are named in their certificate as jobs name them.
    (certificate,) = (one["spec"] for _, one in everyone if one.get("metadata") == {"name": "etcd-server"})
    assert {*options.settings.endpoints.replace(":2379", "").split(",")} < {*certificate["dnsNames"]}


def test_an_etcd_that_is_there_is_named_and_none_is_written(tmp_path: Path) -> None:
    """In each place."""
    for place in Place:
        job = dataclasses.replace(OTHER, endpoint=ETCD)
        names = {str(file.path) for file in files(place, job)}
        assert not any("etcd" in name for name in names)
        text = "".join(file.text for file in files(place, job))
        assert (ETCD in text) is (place is not Place.LOCAL)


@pytest.mark.parametrize("endpoint", ["", ETCD])
def test_what_is_written_for_slurm_is_read_by_bash_and_torchrun(
    tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options of sbatch are the job's; without an etcd each script looks for the one of etcd.sbatch, by one file."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = written(Place.SLURM, dataclasses.replace(OTHER, endpoint=endpoint), tmp_path)
    scripts = sorted(folder.glob("*.sbatch"))
    assert [one.stem for one in scripts] == ["array", "elastic", *([] if endpoint else ["etcd"])]
    for script in scripts:
        text = script.read_text()
        done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        if script.stem == "etcd":
            assert "ADDRESS=$HOME/my-job.etcd" in text
            continue
        assert "RUN_ID=my-job " in text
        assert f"ENDPOINT={endpoint} " in text
        line = re.search(r'torchrun (--.* "\$\{TRAIN\[@\]\}")', text.replace("\\\n", " "))
        assert line is not None
        values = dict(re.findall(r"^([A-Z]\w*)=(\S*)", text, re.MULTILINE)) | {"TRAIN[@]": "train.py"}
        words = re.sub(r"\$\{?([A-Z_\[\]@]+)\}?", lambda match, known=values: known[match[1]], line[1])  # type: ignore[misc]
        config, _, _ = config_from_args(get_args_parser().parse_args(shlex.split(words)))
        assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (3, 12, 4)
    assert "#SBATCH --array=0-11\n" in (folder / "array.sbatch").read_text()
    assert "#SBATCH --nodes=1\n" in (folder / "array.sbatch").read_text()
    assert "#SBATCH --nodes=12\n" in (folder / "elastic.sbatch").read_text()


def test_what_is_written_for_skypilot_fits_its_schema(tmp_path: Path) -> None:
    """Its envs are texts, whatever is in them."""
    for endpoint in (ETCD, "[::1]:2379"):
        folder = written(Place.SKYPILOT, dataclasses.replace(OTHER, endpoint=endpoint), tmp_path)
        task: dict[str, Any] = yaml.safe_load((folder / "node.yaml").read_text())
        jsonschema.validate(task, test_skypilot.SCHEMA)
        assert task["envs"] == {"RUN_ID": "my-job", "ETCD": endpoint}
        assert task["resources"]["accelerators"] == "H100:4"
    assert (folder / "requirements.txt").read_text().splitlines()[-1] == "elastic3d[obstore]"


def test_what_is_written_for_systemd_is_read_as_systemd_reads_it(tmp_path: Path) -> None:
    """Units without unknown keys, and a command that the agent takes."""
    folder = written(Place.SYSTEMD, OTHER, tmp_path) / "systemd"
    for path in (*folder.glob("*.service"), *folder.glob("*.timer")):
        read(path.read_text())
    service = read((folder / "elastic3d-node.service").read_text())["Service"]
    options = started(command(service["ExecStart"][0], variables(folder / "node.env")))
    assert (options.least, options.most, options.slots) == (3, 12, 4)
    assert options.settings.run_id == "my-job"
    members = dict(one.split("=", 1) for one in variables(folder / "etcd.env")["ETCD_INITIAL_CLUSTER"].split(","))
    assert {f"{name}:2379" for name in members} == {*options.settings.endpoints.split(",")}


def test_the_command_for_the_memory_limit_exists() -> None:
    """With the job's own numbers."""
    text = "".join(file.text for file in files(Place.KUBERNETES, OTHER))
    (line,) = re.findall(r"elastic3d plan (train\.py .*)", text)
    assert line == "train.py --nodes 3 --slots 4 --host-memory"
    plan = typer.main.get_command(application()).commands["plan"]  # type: ignore[attr-defined]
    assert plan.make_context("plan", line.split()).params["host"] is True


def test_the_script_is_that_of_the_tutorial() -> None:
    """Word for word: what people read there is what they have."""
    text = (ROOT / "docs" / "tutorial" / "first-job.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert block == (HOME / "local" / "train.py").read_text()


@pytest.mark.parametrize("store", ["s3://bucket/a", "/data/ein Ordner/ü", "/data/𠮷野/🙂", 'a"b\\n', "./checkpoints"])
def test_the_store_is_in_the_script_as_it_was_given(store: str) -> None:
    """Also with quotes and spaces in it."""
    (script,) = files(Place.LOCAL, dataclasses.replace(OTHER, store=store))
    code = compile(script.text, "train.py", "exec")
    assert store in code.co_consts


GIVEN = {"name": "a", "nodes": "2:8", "slots": 8, "store": "", "endpoint": "", "image": "", "namespace": "training"}


@pytest.mark.parametrize(
    ("place", "wrong", "why"),
    [
        *(("local", {"name": name}, "--name") for name in ("", "A", "-a", "a-", "a_b", "a.b", "ä", "a" * 51, "a\n")),
        *(("local", {"name": name}, "etcd's own") for name in ("etcd", "etcd-for-jobs")),
        *(
            ("local", {"nodes": text}, "--nodes")
            for text in ("0", "0:2", "3:2", "2:", ":2", "-1", "two", "2:99999", "٣")
        ),
        *(("local", {"slots": count}, "--slots") for count in (0, -1, 65)),
        *(
            ("local", {"endpoint": text}, "--endpoint")
            for text in ("h:1:2", "http://", "a b:1", "$(id):1", ",", "h:99999")
        ),
        ("kubernetes", {"store": "/data"}, "share no folder"),
        ("kubernetes", {}, "--store is needed"),
        ("slurm", {"store": "data"}, "absolute"),
        ("slurm", {"store": "s4://bucket"}, "known are"),
        ("slurm", {"store": "s3:bucket"}, "after its scheme"),
        ("slurm", {"store": "s3://key:secret@bucket/x"}, "leave passwords"),
        ("slurm", {"store": "/data\nimport os"}, "characters"),
        ("skypilot", {"store": "s3://b/x"}, "--endpoint is needed"),
        *(
            ("kubernetes", {"store": "s3://b/x", "image": image}, "--image")
            for image in ("x", "x:latest", "x:", "X:1", "x y:1", "example.org:5000/x", "x:1 # no")
        ),
        ("kubernetes", {"store": "s3://b/x", "namespace": "Team"}, "--namespace"),
        ("kubernetes", {"store": "s3://b/x", "namespace": "on"}, "--namespace 'on': YAML takes it"),
        *(
            (place, {"store": "s3://b/x", "endpoint": "e1:1", "name": name}, f"--name '{name}': YAML takes it")
            for place in ("kubernetes", "skypilot")
            for name in ("2026", "2026-11-28", "1e5", "1e-5", "0x1f", "0o17", "0b1", "null", "true", "no", "y")
        ),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(place: str, wrong: dict[str, Any], why: str) -> None:
    """Before anything is written, whatever the place would have said of it much later."""
    with pytest.raises(UsageError, match=re.escape(why)) as caught:
        checked(Place(place), **{**GIVEN, **wrong})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["7b", "1-2", "2026-11", "2026-11-28-llama", "nullable", "e5", "0x", "0xg", "0b2", "a"]
)
def test_a_name_of_digits_is_a_name_in_manifests(name: str, tmp_path: Path) -> None:
    """As long as YAML takes it for a text; elsewhere any may be."""
    given: dict[str, Any] = {**GIVEN, "name": name, "store": "s3://b/x"}
    folder = written(Place.KUBERNETES, checked(Place.KUBERNETES, **given), tmp_path) / "kubernetes"
    (job,) = documents("job/job.yaml", folder)
    assert job["metadata"] == {"name": name, "labels": {"job": name}}
    assert checked(Place.LOCAL, **{**given, "name": "2026-11-28"}).name == "2026-11-28"


def test_one_number_of_nodes_is_both() -> None:
    """As torchrun has it."""
    job = checked(Place.LOCAL, **{**GIVEN, "nodes": "4"})
    assert (job.least, job.most) == (4, 4)
    assert checked(Place.SLURM, **{**GIVEN, "store": "/d", "endpoint": "https://a,b:1"}).endpoint == (
        "https://a:2379,b:1"
    )


def test_files_that_are_there_are_kept(tmp_path: Path) -> None:
    """With other contents nothing at all is written, and all of them are named; the same contents are no hindrance."""
    folder = tmp_path / "job"
    assert init(folder, "--on", "slurm", "--store", "/data").exit_code == 0
    assert init(folder, "--on", "slurm", "--store", "/data").exit_code == 0
    (folder / "train.py").write_text("mine")
    (folder / "array.sbatch").unlink()
    why = refused(folder, "--on", "slurm", "--store", "/data")
    assert str(folder / "train.py") in why
    assert "etcd.sbatch" not in why
    assert not (folder / "array.sbatch").exists()
    assert (folder / "train.py").read_text() == "mine"
    result = init(folder, "--on", "slurm", "--store", "/data", "--force", "--json")
    document = json.loads(result.stdout)
    assert {file["path"]: file["state"] for file in document["files"]} == {
        "train.py": "replaced",
        "array.sbatch": "new",
        "elastic.sbatch": "same",
        "etcd.sbatch": "same",
    }
    assert (document["schema"], document["place"], document["written"]) == (1, "slurm", True)
    assert (folder / "train.py").read_text().startswith('"""A small job')
    assert sorted(path.name for path in folder.iterdir()) == sorted(file["path"] for file in document["files"])


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    """And says of each file what would become of it."""
    result = init(tmp_path / "job", "--on", "kubernetes", "--store", "s3://b/x", "--dry-run")
    assert result.exit_code == 0
    assert "would be written to" in result.stdout
    assert "kubernetes/job/job.yaml" in result.stdout
    assert not (tmp_path / "job").exists()
    (tmp_path / "train.py").write_text("mine")
    result = init(tmp_path, "--on", "local", "--name", "a", "--dry-run", "--json")
    assert json.loads(result.stdout)["files"] == [{"path": "train.py", "state": "in the way"}]


def test_what_stands_in_the_way_is_named(tmp_path: Path) -> None:
    """A file where a folder must be, a folder or a link where a file must be: never followed, never removed."""
    (tmp_path / "file").write_text("x")
    assert "is no folder" in refused(tmp_path / "file", "--on", "local", "--name", "a")
    (tmp_path / "a" / "train.py").mkdir(parents=True)
    assert "no plain file" in refused(tmp_path / "a", "--on", "local", "--force")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "train.py").symlink_to(tmp_path / "file")
    assert "no plain file" in refused(tmp_path / "b", "--on", "local", "--force")
    assert (tmp_path / "file").read_text() == "x"
    assert "File name too long" in refused(tmp_path / ("x" * 300), "--on", "local", "--name", "a")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "kubernetes").write_text("x")
    assert "is no folder" in refused(tmp_path / "c", "--on", "kubernetes", "--store", "s3://b/x")


def test_the_name_is_that_of_the_folder() -> None:
    """Where that can be a name."""
    assert "--name 'My Project'" in refused("/tmp/My Project", "--on", "local", "--dry-run")
    result = init("/tmp/gpt-2b", "--on", "local", "--dry-run")
    assert "--rdzv-id=gpt-2b" in result.stdout
    assert "--name is needed" in refused("/", "--on", "local", "--dry-run")


def test_the_place_has_to_be_said() -> None:
    """And to be one that is known."""
    assert init().exit_code == 2
    assert init("--on", "cloud").exit_code == 2
    assert {*PLACES} == {*Place}


def test_the_printed_etcd_is_one_that_the_command_takes(tmp_path: Path) -> None:
    """`demo` brings an etcd that is refused unless it is named: the printed command names it."""
    (up,) = (line for line in next_steps(Place.LOCAL, EXAMPLE, tmp_path) if line.startswith("elastic3d etcd up"))
    words = shlex.split(up, comments=True)
    allowed = words[words.index("--allow-version") + 1] if "--allow-version" in words else ""
    require_sound(find_etcd(), etcd_version(find_etcd()), allowed)
