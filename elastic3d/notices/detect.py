"""Find out which cloud this machine is in.

Its firmware says so: the strings of the DMI tables, which the kernel shows to everybody. A machine whose strings name
no cloud sends no request. If they leave it open (EC2's old Xen machines, a Hyper-V machine that may be Azure's), the
three ways of asking are tried side by side for half a second. If the user named a server but not its kind, they are for
five: it is there, and a node that has just started may be too busy to ask and be answered sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from elastic3d import threads
from elastic3d.clock import SYSTEM, Clock
from elastic3d.notices import aws, azure, gcp
from elastic3d.notices.metadata import ADDRESS, Metadata, Unheard
from elastic3d.notices.notice import NoticeKind

DMI = Path("/sys/class/dmi/id")
PROBE_SECONDS, GIVEN_SECONDS = 0.5, 5.0
"""How long an answer may take: of an address at which there may be nobody, and of a server that the user named."""

_STRINGS = ("sys_vendor", "product_name", "board_vendor", "bios_vendor", "bios_version", "chassis_asset_tag")
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"
"""The chassis of every Azure VM: "MSFT AZURE VM" in decimal ASCII."""

_PROBES: Mapping[NoticeKind, Callable[[Metadata], bool]] = {
    NoticeKind.AWS: aws.answers,
    NoticeKind.GCP: gcp.answers,
    NoticeKind.AZURE: azure.answers,
}


def detect(url: str = "", *, dmi: Path = DMI, clock: Clock = SYSTEM) -> NoticeKind | None:
    """Return the cloud this machine is in, or whose server answers at `url` if given; None if it is none of the three.

    Takes no more than half a second, or five where `url` is given.
    """
    if url:
        return probe(url, GIVEN_SECONDS, clock=clock)
    cloud, doubtful = by_firmware(dmi)
    return probe(ADDRESS, PROBE_SECONDS, clock=clock) if doubtful else cloud


def by_firmware(dmi: Path) -> tuple[NoticeKind | None, bool]:
    """Return the cloud that the firmware's strings name, and whether that leaves a doubt."""
    strings = {name: _string(dmi / name) for name in _STRINGS}
    if any("amazon" in text.lower() for text in strings.values()):
        return NoticeKind.AWS, False
    if strings["product_name"] in ("Google Compute Engine", "Google"):
        return NoticeKind.GCP, False
    if strings["chassis_asset_tag"] == _AZURE_TAG:
        return NoticeKind.AZURE, False
    hyper_v = strings["sys_vendor"] == "Microsoft Corporation" and strings["product_name"] == "Virtual Machine"
    return None, hyper_v or strings["sys_vendor"] == "Xen"


def probe(base: str, seconds: float, *, clock: Clock = SYSTEM) -> NoticeKind | None:
    """Return the cloud whose metadata server answers at `base` within so many seconds, None if none does."""
    answering: set[NoticeKind] = set()
    metadata = Metadata(base)

    def ask(kind: NoticeKind) -> None:
        try:
            if _PROBES[kind](metadata):
                answering.add(kind)
        except Unheard:
            pass

    until = clock.monotonic() + seconds
    probes = [
        threads.start(ask, kind, name=f"elastic3d-probe-{kind.value}", edge=threads.Edge.ALONE) for kind in _PROBES
    ]
    for thread in probes:
        thread.join(timeout=max(0.0, until - clock.monotonic()))
    metadata.close()
    return next((kind for kind in _PROBES if kind in answering), None)


def _string(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
