"""What this machine lacks, found before anything of elastic3d is imported: a bare machine has no package index."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PACKAGES = {
    "torch": "torch",
    "numpy": "numpy",
    "grpc": "grpcio",
    "google.protobuf": "protobuf",
    "fsspec": "fsspec",
    "tenacity": "tenacity",
    "structlog": "structlog",
    "blake3": "blake3",
    "zstandard": "zstandard",
    "typer": "typer",
    "rich": "rich",
}
"""Distributions by the module that is imported: elastic3d's own requirements."""

PROBE = """\
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "torch": torch.__version__, "cuda": cuda,
    "name": torch.cuda.get_device_name(0) if cuda else "",
    "devices": torch.cuda.device_count() if cuda else 0,
}))
"""
PROBE_LIMIT = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """What torch says of itself. name: of the device that figures are of."""

    torch: str = ""
    cuda: bool = False
    name: str = ""
    error: str = ""


def missing_packages() -> list[str]:
    """Return the distributions that cannot be imported."""
    return [name for module, name in PACKAGES.items() if not _there(module)]


def advice(missing: list[str]) -> str:
    """Return what to do about them."""
    names = " ".join(missing)
    version = ".".join(platform.python_version_tuple()[:2])
    return (
        f"missing here: {names}. Trying again does not help. With an index: pip install {names}. Without one: on a "
        f"machine that has one, pip download --only-binary=:all: --python-version {version} --dest wheels {names}; "
        "carry the folder here; pip install --no-index --find-links wheels --target site " + names + "; "
        "export PYTHONPATH=site"
    )


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def probe() -> TorchFacts:
    """Ask torch what it sees, in a process that ends with whatever it opened."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=PROBE_LIMIT, check=False
        )
        said = json.loads(done.stdout.strip().splitlines()[-1])
        return TorchFacts(torch=said["torch"], cuda=said["cuda"], name=said["name"])
    except subprocess.TimeoutExpired:
        return TorchFacts(error=f"torch did not say within {PROBE_LIMIT:g} s what devices there are")
    except (IndexError, ValueError, KeyError):
        return TorchFacts(error=f"torch cannot be imported: {done.stderr.strip()[-500:]}")


def registered() -> bool:
    """Return whether torchrun finds elastic3d: it looks in the entry points of what is installed."""
    return any(point.name == "etcd-v3" for point in importlib.metadata.entry_points(group="torchrun.handlers"))


def register_in(folder: Path) -> None:
    """Write what makes torchrun find an elastic3d that is not installed, for processes with `folder` on their path."""
    info = folder / "elastic3d-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elastic3d\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[torchrun.handlers]\netcd-v3 = elastic3d.rendezvous.registration:register\n"
    )


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of the stages: they import this checkout from any folder. folder: for what they need."""
    paths = [str(Path(__file__).parents[2])]
    if not registered():
        register_in(folder)
        paths.append(str(folder))
    before = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *([before] if before else [])])}
