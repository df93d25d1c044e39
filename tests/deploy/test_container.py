"""The Containerfile keeps its rules: it was linted here, not built."""

from __future__ import annotations

import json
import re

from tests.deploy.options import started
from tests.paths import ROOT

INSTRUCTIONS = {"ARG", "FROM", "ENV", "RUN", "COPY", "USER", "WORKDIR", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT"}


def lines() -> list[tuple[str, str]]:
    """Return each instruction and the rest of its line, with continuation lines joined."""
    text = (ROOT / "deploy" / "container" / "Containerfile").read_text()
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    parts = (line.partition(" ") for line in text.splitlines() if line.strip())
    return [(word, rest.strip()) for word, _, rest in parts]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Return the instructions of each stage by its name, "" for the last and for what stands before all."""
    made: dict[str, list[tuple[str, str]]] = {"head": []}
    name = "head"
    for word, rest in lines():
        if word == "FROM":
            name = rest.partition(" AS ")[2]
            made[name] = []
        made[name].append((word, rest))
    return made


def test_instructions_are_known_and_bases_are_named() -> None:
    """One base for all stages, by a full name with a tag that is no `latest`."""
    assert {word for word, _ in lines()} == INSTRUCTIONS
    assert stages()["head"] == [("ARG", "PYTHON=docker.io/library/python:3.11-slim-bookworm")]
    bases = [rest.partition(" AS ")[0] for word, rest in lines() if word == "FROM"]
    assert set(bases) <= {"${PYTHON}", *stages()}


def test_torch_has_a_layer_of_its_own_below_all_else() -> None:
    """A change of requirements or of the script leaves it as it is."""
    copied = [rest for word, rest in stages()[""] if word == "COPY"]
    assert copied == ["--from=torch /opt/venv /opt/venv", "--from=packages /opt/packages /opt/venv", "train.py /job/"]
    assert not any(word == "COPY" for word, _ in stages()["torch"])
    assert [rest for word, rest in stages()["torch"] if word == "RUN" and "pip install" in rest]


def test_compilers_stay_behind() -> None:
    """What runs has neither them nor lists of packages."""
    assert any("gcc" in rest for _, rest in stages()["packages"])
    assert not any("apt-get" in rest for _, rest in stages()[""])


def test_it_runs_as_nobody_special_and_has_no_secret() -> None:
    """The last user counts; the manifests' is the same."""
    last = stages()[""]
    assert [rest for word, rest in last if word == "USER"] == ["1000:1000"]
    assert last[-1][0] == "ENTRYPOINT"
    for _, rest in lines():
        assert not re.search(r"(?i)password|secret|token|credential|\.pem|\.key\b|\.git\b|\.aws", rest)
        assert not re.search(r"^(ADD|COPY) (--\S+ )*\. ", rest)
        assert "sudo" not in rest


def test_its_first_process_is_the_agent() -> None:
    """It takes torchrun's options, passes SIGTERM on, and is looked after."""
    last = dict(stages()[""])
    words = json.loads(last["ENTRYPOINT"])
    given = "--nnodes=2:8 --nproc-per-node=8 --rdzv-backend=etcd --rdzv-endpoint=127.0.0.1:2379 --rdzv-id=a train.py"
    assert started([*words, *given.split()]).script == ["train.py"]
    assert last["STOPSIGNAL"] == "SIGTERM"
    assert json.loads(last["HEALTHCHECK"].partition("CMD ")[2])
