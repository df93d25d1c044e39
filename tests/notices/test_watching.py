"""Which cloud is watched, from --rdzv-conf, the firmware, or a server's answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.servers.metadata import Aws, Azure, Cloud, Gcp, Reply, Request
from elastic3d.clock import SYSTEM
from elastic3d.errors import ConfigurationError
from elastic3d.notices import Choice, NoticeKind, NoticeOptions, watch
from elastic3d.notices.detect import by_firmware, detect, probe
from elastic3d.notices.options import from_conf
from tests.logs import recorded
from tests.notices.ear import Ear

AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"


def firmware(path: Path, **strings: str) -> Path:
    """Write the strings of a machine's DMI tables."""
    for name, value in strings.items():
        (path / name).write_text(value + "\n")
    return path


@pytest.mark.parametrize(
    ("strings", "cloud", "doubtful"),
    [
        (
            {"sys_vendor": "Amazon EC2", "product_name": "p5.48xlarge", "bios_vendor": "Amazon EC2"},
            NoticeKind.AWS,
            False,
        ),
        ({"sys_vendor": "Xen", "product_name": "HVM domU", "bios_version": "4.11.amazon"}, NoticeKind.AWS, False),
        ({"sys_vendor": "Xen", "product_name": "HVM domU", "bios_version": "4.11"}, None, True),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, NoticeKind.GCP, False),
        ({"sys_vendor": "Google", "product_name": "Eve"}, None, False),
        (
            {
                "sys_vendor": "Microsoft Corporation",
                "product_name": "Virtual Machine",
                "chassis_asset_tag": AZURE_TAG,
            },
            NoticeKind.AZURE,
            False,
        ),
        ({"sys_vendor": "Microsoft Corporation", "product_name": "Virtual Machine"}, None, True),
        ({"sys_vendor": "Microsoft Corporation", "product_name": "Surface Laptop"}, None, False),
        ({"sys_vendor": "Supermicro", "product_name": "SYS-821GE-TNHR"}, None, False),
        ({}, None, False),
    ],
)
def test_firmware_strings_identify_the_cloud(
    strings: dict[str, str], cloud: NoticeKind | None, doubtful: bool, tmp_path: Path
) -> None:
    """Or leave a doubt, or name none."""
    assert by_firmware(firmware(tmp_path, **strings)) == (cloud, doubtful)
    if not doubtful:
        assert detect(dmi=tmp_path) is cloud


def test_missing_firmware_tables_identify_no_cloud(tmp_path: Path) -> None:
    """If the kernel shows no DMI tables nothing is known and nothing asked."""
    assert by_firmware(tmp_path / "absent") == (None, False)


@pytest.mark.parametrize(("cloud", "kind"), [(Aws, NoticeKind.AWS), (Gcp, NoticeKind.GCP), (Azure, NoticeKind.AZURE)])
def test_a_given_server_is_identified_by_its_answers(cloud: type[Cloud], kind: NoticeKind) -> None:
    """Each of the three answers one of the three ways of asking, and refuses the other two."""
    with cloud() as server:
        assert detect(server.url) is kind
        assert len(server.refused) == 2


def test_an_unknown_or_slow_server_is_no_cloud() -> None:
    """Nobody there, somebody else there, or a late answer: no cloud, and no long wait. Who is named is waited for."""

    class Slow(Aws):
        def reply(self, request: Request) -> Reply:
            SYSTEM.sleep(1.0)
            return super().reply(request)

    class Other(Aws):
        def reply(self, request: Request) -> Reply:
            return Reply(200, b"hello")

    with Aws() as gone:
        pass
    assert detect(gone.url) is None
    with Slow() as slow:
        assert probe(slow.url, 0.5) is None
        assert detect(slow.url) is NoticeKind.AWS
    with Other() as other:
        assert detect(other.url) is None


def test_the_options_choose_what_is_watched() -> None:
    """From options to a notice, with the cloud named and with the cloud detected."""
    with Azure() as cloud:
        cloud.schedule("A", "Preempt", "")
        for choice in (Choice.AZURE, Choice.AUTO):
            ear = Ear()
            watcher = watch(NoticeOptions(choice=choice, url=cloud.url), ear.tell)
            assert watcher is not None
            assert ear.hears()
            watcher.close()


def test_no_cloud_means_no_watcher() -> None:
    """none asks nobody; auto with an unknown server says so and goes on without."""
    with Aws() as cloud:
        assert watch(NoticeOptions(choice=Choice.NONE, url=cloud.url), Ear().tell) is None
        assert cloud.requests == []
    with recorded() as entries:
        assert watch(NoticeOptions(url=cloud.url), Ear().tell) is None
    assert [entry["event"] for entry in entries] == ["notices.unknown"]


def test_options_are_read_from_rdzv_conf() -> None:
    """Defaults, and each key."""
    assert from_conf({}) == NoticeOptions(choice=Choice.AUTO, url="", rebalance=False)
    conf = {"notices": "aws", "notices_url": "http://[::1]:1338/", "notices_rebalance": "drain"}
    assert from_conf(conf) == NoticeOptions(choice=Choice.AWS, url="http://[::1]:1338", rebalance=True)
    assert from_conf({"notices_url": "https://metadata.google.internal"}).url == "https://metadata.google.internal"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("notices", "ibm"),
        ("notices", ""),
        ("notices", "AWS"),
        ("notices_rebalance", "yes"),
        ("notices_url", "127.0.0.1:80"),
        ("notices_url", "ftp://host"),
        ("notices_url", "http://"),
        ("notices_url", "http://:80"),
        ("notices_url", "http://host:port"),
        ("notices_url", "http://host:0"),
        ("notices_url", "http://host:99999"),
        ("notices_url", "http://[::1"),
        ("notices_url", "http://a b"),
        ("notices_url", "http://a..b"),
        ("notices_url", "http://user:secret@host"),
        ("notices_url", "http://host/path"),
        ("notices_url", "http://host?x"),
        ("notices_url", "http://host\r\nX: y"),
    ],
)
def test_wrong_options_are_refused(key: str, value: str) -> None:
    """The error repeats key and value."""
    with pytest.raises(ConfigurationError) as caught:
        from_conf({key: value})
    assert f"--rdzv-conf={key}={value}: " in str(caught.value)
