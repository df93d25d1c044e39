"""The tests on each version of torch that elastic3d says it supports: `make matrix`.

Each version gets a virtual environment of its own below a cache, which later runs use again. Builds for CUDA bring
gigabytes of libraries that these tests do not use; where an index offers no build for CPUs, a version is left out, and
the table says so. pip's own configuration says where builds come from: with
`PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu` there is one of every version.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table

from elastic3d.torch_support import BEYOND, OLDEST

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".cache" / "matrix"
ROOM = 4 << 30
"""Bytes that must be free for another environment: torch for CPUs takes two, unpacked and as a download."""

FAST = "(not slow and not long) or (gloo and not slow)"
"""The fast tests, and all of several ranks but the slowest."""

LIMIT = 3 * 3600.0
CPU = "+cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """One version to test. skipped: why it is not, "" if it is."""

    minor: str
    version: str = ""
    skipped: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a version. failed: tests, or with no test run the reason in `detail`."""

    minor: str
    version: str
    passed: int = 0
    failed: tuple[str, ...] = ()
    skipped: int = 0
    seconds: float = 0.0
    detail: str = ""

    @property
    def verdict(self) -> str:
        """Return one word."""
        if self.failed:
            return "failed"
        if self.passed:
            return "passed"
        return "left out" if not self.version else "broken"


def offered(listing: str) -> list[str]:
    """Return the versions that `pip index versions` lists."""
    match = re.search(r"^Available versions: (.*)$", listing, re.MULTILINE)
    return [version.strip() for version in match[1].split(",")] if match else []


def builds(versions: Iterable[str], *, linux: bool, any_build: bool = False) -> list[Build]:
    """Return the newest build of each supported version, and why there is none of the others.

    linux: plain versions are builds for CUDA there. any_build: take them all the same.
    """
    listed = list(versions)
    made = []
    for number in range(OLDEST[1], BEYOND[1]):
        minor = f"{OLDEST[0]}.{number}"
        of_minor = [version for version in listed if re.fullmatch(rf"{re.escape(minor)}\.\d+(\+\w+)?", version)]
        fit = [version for version in of_minor if any_build or version.endswith(CPU) or not linux]
        if fit:
            made.append(Build(minor=minor, version=max(fit, key=_order)))
        elif of_minor:
            newest = max(of_minor, key=_order)
            made.append(Build(minor=minor, skipped=f"{newest} is a build for CUDA, of gigabytes; none is for CPUs"))
        else:
            made.append(Build(minor=minor, skipped="no index offers it"))
    return made


def _order(version: str) -> tuple[int, bool]:
    """Return what newer versions have more of, and of one version the build for CPUs."""
    number, _, local = version.partition("+")
    return int(number.rpartition(".")[2]), local == "cpu"


def read(build: Build, report: str, seconds: float) -> Result:
    """Return what a JUnit report says."""
    passed, skipped, failed = 0, 0, []
    for case in ElementTree.fromstring(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return Result(
        minor=build.minor,
        version=build.version,
        passed=passed,
        failed=tuple(failed),
        skipped=skipped,
        seconds=seconds,
        detail="" if passed or failed else "no test ran",
    )


def install(build: Build, cache: Path) -> Path:
    """Return the interpreter of a version's environment, made if it is not there; OSError, CalledProcessError."""
    folder = cache / f"torch-{build.version}"
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.exists():
        return python
    cache.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache).free
    if free < ROOM:
        raise OSError(f"{free >> 30} GiB are free below {cache}, and an environment needs {ROOM >> 30}")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [*pip, f"torch=={build.version}"],
        # Without torch, which is not in the lock; what torch brought is replaced by what the tests run with.
        [*pip, "--require-hashes", "--no-deps", "-r", "requirements/dev.txt"],
        [*pip, "--no-deps", "--no-build-isolation", "-e", "."],
    ):
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    ready.touch()
    return python


def result_of(build: Build, cache: Path, chosen: Sequence[str], say: Console) -> Result:
    """Install a version, run the tests under it, and return what came of it."""
    if build.skipped:
        return Result(minor=build.minor, version="", detail=build.skipped)
    say.print(f"torch {build.version}: installing and testing below {cache}")
    report = cache / f"torch-{build.version}.xml"
    began = os.times().elapsed
    try:
        report.unlink(missing_ok=True)
        python = install(build, cache)
        command = [str(python), "-m", "pytest", f"--junitxml={report}", "-m", FAST, "--dist=loadfile"]
        command += [f"--numprocesses={(os.cpu_count() or 1) + 1}", *chosen]
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
        subprocess.run(command, cwd=ROOT, check=False, stdout=sys.stderr, timeout=LIMIT, env=environment)
        return read(build, report.read_text(), os.times().elapsed - began)
    except subprocess.CalledProcessError as error:
        detail = f"cannot be installed: {(error.stderr or error.stdout or str(error)).strip()[-300:]}"
    except (OSError, subprocess.TimeoutExpired, ElementTree.ParseError) as error:
        detail = str(error)
    return Result(minor=build.minor, version=build.version, detail=detail, seconds=os.times().elapsed - began)


def table(results: Iterable[Result]) -> Table:
    """Return the results for people."""
    shown = Table("torch", "build", "verdict", "passed", "failed", "skipped", "minutes", "")
    for one in results:
        more = f" and {len(one.failed) - 4} more" if len(one.failed) > 4 else ""
        detail = ", ".join(one.failed[:4]) + more or one.detail
        figures = (str(number) if one.version else "" for number in (one.passed, len(one.failed), one.skipped))
        minutes = f"{one.seconds / 60:.1f}" if one.version else ""
        shown.add_row(one.minor, one.version, one.verdict, *figures, minutes, detail)
    return shown


def main() -> int:
    """Test every version; 1 if a test failed, or no version could be tested."""
    parser = argparse.ArgumentParser(prog="make matrix", description=__doc__)
    parser.add_argument("tests", nargs="*", help="files or node ids; all by default")
    parser.add_argument("--only", default="", help="versions such as 2.11,2.13; all that are supported by default")
    parser.add_argument("--any-build", action="store_true", help="take builds for CUDA where there is none for CPUs")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of the environments")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    given = parser.parse_args()
    say = Console(stderr=given.json)
    lister = given.cache / "pip"
    if not (lister / "bin" / "pip").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(lister)], check=True)
    listing = subprocess.run(
        [str(lister / "bin" / "pip"), "index", "versions", "torch"], capture_output=True, text=True, check=False
    )
    wanted = [part for part in given.only.split(",") if part]
    chosen = builds(offered(listing.stdout), linux=sys.platform == "linux", any_build=given.any_build)
    results = [result_of(one, given.cache, given.tests, say) for one in chosen if not wanted or one.minor in wanted]
    if given.json:
        print(json.dumps([asdict(one) | {"verdict": one.verdict} for one in results]))
    else:
        say.print(table(results))
    if listing.returncode:
        say.print(f"the versions on offer could not be listed: {listing.stderr.strip()[-300:]}")
    verdicts = {one.verdict for one in results}
    return int(bool(verdicts & {"failed", "broken"}) or "passed" not in verdicts)


if __name__ == "__main__":
    sys.exit(main())
