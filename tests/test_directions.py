"""Packages depend on each other in one direction only."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from tests.paths import ROOT

PACKAGES = ("checkpointing", "elastic3d", "chaos", "tests")

# Inside elastic3d each line may import itself and what stands above it. `training` is the Run that a user's main sees,
# `entry` the elastic3d.run that a script calls; `storage` is the run's store, `etcd_refs` its refs in etcd;
# `rendezvous` is torchrun's side of a node, `worker` the job's. `calibration` asks scripts and measures,
# `doctor` looks at one node, `evaluation` asks scripts for numbers of checkpoints, `huggingface` writes them as
# folders. `etcd_server` runs the servers of those who have none. `scaffold` has the files that a job begins with;
# `islands` is what a run has of the others that it merges with. `integrations` gives `entry` other projects' shapes.
# `dashboard` and `report` say what commands print, as pages made of `pages`; one command serves the first, another
# writes the second.
LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "accounting",
        "global_random",
        "source_waits",
        "values",
        "errors",
        "clock",
        "control_groups",
        "coverage",
        "distrust",
        "environment",
        "etcd_keys",
        "event_file",
        "event_process",
        "log",
        "nearest",
        "output",
        "owners",
        "pace",
        "paths",
        "rollback",
        "quantities",
        "script_processes",
        "shortfall",
        "tagged",
        "threads",
        "torch_support",
    ),
    ("devices", "provenance"),
    ("planner", "data", "etcd", "notices", "trackers", "trust", "port"),
    ("storage", "etcd_refs", "etcd_server"),
    ("membership",),
    ("snapshots", "parallel", "health", "metrics", "pretrained"),
    ("telemetry",),
    ("rendezvous", "admission"),
    ("worker",),
    ("islands",),
    ("training",),
    ("calibration", "doctor", "evaluation", "huggingface"),
    ("entry",),
    ("integrations",),
    ("cli", "dashboard", "pages", "report", "scaffold"),
)


def imports(path: Path) -> set[str]:
    """Return the modules that a file imports, at any depth of its code."""
    package = ".".join(path.relative_to(ROOT).parent.parts)
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            name = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names |= {name, *(f"{name}.{alias.name}" for alias in node.names)}
    return names


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", PACKAGES[:-1])
def test_a_package_imports_only_lower_packages(package: str) -> None:
    """In the order checkpointing, elastic3d, chaos, tests, each may import only those before it."""
    above = PACKAGES[PACKAGES.index(package) + 1 :]
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files(package)
        for name in sorted(imports(path))
        if name.partition(".")[0] in above
    ]
    assert not wrong, "\n".join(wrong)


def test_the_runtimes_layers_import_in_one_direction() -> None:
    """Values and decisions know nothing of processes, and processes nothing of the command line."""
    rank = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    wrong = []
    for path in files("elastic3d"):
        own = path.relative_to(ROOT / "elastic3d").parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        assert own in rank, f"elastic3d/{own} has no place among the layers; give it one here"
        for name in sorted(imports(path)):
            top, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            if top == "elastic3d" and rank.get(other, -1) > rank[own]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_checkpointing_library_imports_no_cluster_code() -> None:
    """It has no collective, no etcd and no torchrun in it; one package knows torch and DCP."""
    strange = ("torch.distributed", "grpc", "etcd")
    wrong = []
    for path in files("checkpointing"):
        room = path.relative_to(ROOT / "checkpointing").parts[0]
        for name in sorted(imports(path)):
            if room == "interchange":
                refused = name.startswith(strange) and not f"{name}.".startswith("torch.distributed.checkpoint.")
            else:
                refused = name.startswith((*strange, "torch", "checkpointing.interchange"))
            if refused:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_a_nodes_packages_import_in_one_direction() -> None:
    """A slot's processes know nothing of checkpoints in the store, and neither knows the keeper, which uses both."""
    order = ("processes", "checkpoints", "keeper")
    wrong = []
    for path in files("elastic3d/worker"):
        own = path.relative_to(ROOT / "elastic3d" / "worker").parts[0]
        if own not in order:
            continue
        above = tuple(f"elastic3d.worker.{other}." for other in order[order.index(own) + 1 :])
        wrong += [
            f"{path.relative_to(ROOT)} imports {name}" for name in sorted(imports(path)) if name.startswith(above)
        ]
    assert not wrong, "\n".join(wrong)
