"""Another S3 server for tests: Ceph's radosgw over one monitor and one store in memory.

Debian has all of it: `apt-get install ceph-mon ceph-osd radosgw`.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chaos.machine.processes import free_port, wait_until

PROGRAMS = ("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")


def missing() -> list[str]:
    """Return the programs that are not on PATH."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


@contextlib.contextmanager
def radosgw(at: Path) -> Iterator[dict[str, Any]]:
    """Run a cluster of one below `at`, with a bucket named `bucket`; yields the options a store is opened with."""
    monitor, gateway = free_port(), free_port()
    cluster, disk = str(uuid.uuid4()), str(uuid.uuid4())
    at.mkdir(parents=True)
    configuration = _configuration(at, cluster, monitor)
    (at / "conf").write_text(configuration)
    for part in ("mon", "osd"):
        (at / part).mkdir()
    running: list[subprocess.Popen[bytes]] = []

    def call(program: str, *arguments: str) -> None:
        subprocess.run([program, *arguments], cwd=at, check=True, capture_output=True, timeout=120)

    def start(*command: str) -> None:
        with open(at / f"{command[0]}.out", "wb") as out:
            running.append(subprocess.Popen([*command, "-c", "conf", "-f"], cwd=at, stdout=out, stderr=out))

    try:
        call("ceph-authtool", "--create-keyring", "keyring", "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        call("monmaptool", "--create", "--fsid", cluster, "--addv", "a", f"[v1:127.0.0.1:{monitor}]", "map")
        call("ceph-mon", "--mkfs", "-i", "a", "--monmap", "map", "--keyring", "keyring", "-c", "conf")
        start("ceph-mon", "-i", "a")
        call("ceph", "-c", "conf", "osd", "new", disk, "0")
        call("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk, "-c", "conf")
        start("ceph-osd", "-i", "0")
        start("radosgw", "-n", "client.gateway", f"--rgw_frontends=beast endpoint=127.0.0.1:{gateway}")
        if not wait_until(lambda: _listens(gateway), 120):
            raise TimeoutError("radosgw took no connections within 120 s")
        user = ("--uid", "u", "--display-name", "u", "--access-key", "k", "--secret-key", "s")
        call("radosgw-admin", "-c", "conf", "-n", "client.admin", "user", "create", *user)
        given = {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{gateway}"}
        _make_bucket(given)
        yield given
    finally:
        for process in reversed(running):
            process.kill()
            process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _make_bucket(options: dict[str, Any]) -> None:
    import s3fs

    for _ in range(30):
        try:
            s3fs.S3FileSystem(**options, skip_instance_cache=True).mkdir("bucket")
            return
        except OSError:
            time.sleep(1.0)
    raise TimeoutError("radosgw makes no bucket")


def _configuration(at: Path, cluster: str, monitor: int) -> str:
    # Beside the programs, so that an unpacked tree is enough.
    library = next((Path(shutil.which("ceph-osd") or "").parent.parent / "lib").glob("*/ceph")).parent
    lines = {
        "fsid": cluster,
        "mon_initial_members": "a",
        "mon_host": f"v1:127.0.0.1:{monitor}",
        "ms_bind_msgr2": "false",
        "public_addr": "127.0.0.1",
        "cluster_addr": "127.0.0.1",
        "auth_cluster_required": "none",
        "auth_service_required": "none",
        "auth_client_required": "none",
        "osd_pool_default_size": "1",
        "osd_pool_default_min_size": "1",
        "osd_pool_default_pg_num": "1",
        "osd_pool_default_pgp_num": "1",
        "osd_crush_chooseleaf_type": "0",
        "mon_allow_pool_size_one": "true",
        "mon_max_pg_per_osd": "1000",
        "osd_objectstore": "memstore",
        "memstore_device_bytes": str(1 << 30),
        "plugin_dir": f"{library}/ceph",
        "erasure_code_dir": f"{library}/ceph/erasure-code",
        "compressor_dir": f"{library}/ceph/compressor",
        "osd_class_dir": f"{library}/rados-classes",
        "run_dir": str(at),
        "admin_socket": "",
        "log_file": f"{at}/$name.log",
        "pid_file": "",
        "mon_data": f"{at}/mon",
        "osd_data": f"{at}/osd",
    }
    return "[global]\n" + "".join(f"{name} = {value}\n" for name, value in lines.items())
