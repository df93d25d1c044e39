"""The reference matches the code: generated pages are current, and hand-written tables are complete."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

import checkpointing
import elastic3d
from elastic3d.health import deadlines
from elastic3d.membership.policy import Policy
from elastic3d.rendezvous import settings, torch_options
from elastic3d.rendezvous.settings import Settings
from tests.paths import ROOT
from tools.reference import FOLDER, PAGES


def rows(page: str) -> list[list[str]]:
    """Return the cells of every row of a page's tables, without the backquotes."""
    text = (ROOT / page).read_text()
    lines = re.findall(r"^\| (.*) \|$", text, re.MULTILINE)
    return [[cell.strip().strip("`") for cell in re.split(r"(?<!\\)\|", row)] for row in lines]


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_current(name: str) -> None:
    """`make reference` has nothing to change."""
    assert (FOLDER / name).read_text() == PAGES[name](), f"docs/reference/{name} is not current; run: make reference"


def test_every_setting_of_a_node_has_a_row() -> None:
    """The table of --rdzv-conf has all keys, in any order, with the defaults of the code."""
    table = [row[0] for row in rows("docs/reference/rdzv-conf.md") if len(row) == 3]
    assert sorted(table[1:]) == sorted(settings.KNOWN)


def test_the_defaults_in_the_table_match_the_code() -> None:
    """Numbers are plain seconds and counts there."""
    table = {row[0]: row[1] for row in rows("docs/reference/rdzv-conf.md") if len(row) == 3}
    policy = Policy()
    for key, field in settings._TIMES.items():
        assert float(table[key]) == getattr(policy, field), key
    for key in settings._COUNTS:
        assert int(table[key]) == getattr(policy, key), key
    assert float(table["drain"]) == Settings.__dataclass_fields__["drain"].default
    assert f"{torch_options.LAST_CALL}, as in torch" in (ROOT / "docs/reference/rdzv-conf.md").read_text()


def test_the_guide_has_how_long_a_rank_may_be_idle_in_each_phase() -> None:
    """The second column of its table, for phases that have more than the others."""
    idle = " ".join(row[1] for row in rows("docs/guides/stuck-ranks.md") if len(row) == 3)
    for phase, least in deadlines.LONGER.items():
        said = f"{least / 60:.0f} min" if least > 60 else f"{least:.0f} s"
        assert re.search(rf"\b{said}\b", idle), phase


def test_the_guide_says_from_which_factor_on_a_slow_node_raises_an_alert() -> None:
    """It is another one than that from which on a node counts as slow."""
    alert = re.search(r"node_slowness_ratio\) > ([\d.]+)", (ROOT / "deploy/prometheus/alerts.yml").read_text())
    section = (ROOT / "docs/guides/metrics.md").read_text().partition("### Elastic3dNodeSlow")[2].partition("###")[0]
    assert alert is not None
    assert f"more than {alert[1]} times" in section
    assert f" {elastic3d.Health().slow} " in section


def test_every_key_of_torchs_own_backends_has_a_row() -> None:
    """Both the translated and the ignored ones."""
    text = (ROOT / "docs/reference/rdzv-conf.md").read_text()
    assert [key for key in torch_options.KEYS if f"`{key}`" not in text] == []


def test_every_environment_variable_has_a_row() -> None:
    """All that the code names, and no others."""
    named = set()
    for package in ("checkpointing", "elastic3d", "chaos"):
        for path in (ROOT / package).rglob("*.py"):
            named |= set(re.findall(r"ELASTIC3D_[A-Z_]*[A-Z]", path.read_text()))
    assert named == {row[0] for row in rows("docs/reference/environment.md") if row[0].startswith("ELASTIC3D_")}


@pytest.mark.parametrize("package", [checkpointing, elastic3d])
def test_every_public_name_is_on_its_packages_page(package: ModuleType) -> None:
    """The reference shows all that users may rely on."""
    name = package.__name__
    page = (FOLDER / f"{name}.md").read_text() + (FOLDER / "errors.md").read_text()
    # Errors are there as whole modules.
    names = [public for public in package.__all__ if not public.endswith("Error")]
    assert [public for public in names if f"::: {name}.{public}\n" not in page] == []


def test_the_failures_of_the_readme_are_rows_of_the_reference() -> None:
    """The README has some of the rows, the reference all."""
    some = [row for row in rows("README.md") if len(row) == 3]
    start = next(i for i, row in enumerate(some) if row[0] == "failure")
    stop = next(i for i, row in enumerate(some) if "torchrun" in row[2])
    every = rows("docs/reference/failures.md")
    assert [row for row in some[start:stop] if row not in every] == []


def test_the_limits_of_the_readme_are_the_page_of_limits() -> None:
    """One list, so that neither of the two becomes out of date."""
    section = re.search(r"## Limits\n\n(.*?)\n\n## ", (ROOT / "README.md").read_text(), re.DOTALL)
    assert section is not None
    assert (FOLDER / "limits.md").read_text() == f"# Limits\n\n{section[1]}\n"


def test_every_page_is_in_the_navigation_and_on_the_first_page() -> None:
    """A page that no list names is found by nobody."""
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert [page for page in sorted(pages) if f'"{page}"' not in (ROOT / "zensical.toml").read_text()] == []
    apart = {"index.md", "changelog.md", "contributing.md"}
    assert [page for page in sorted(pages - apart) if f"({page})" not in (ROOT / "docs/index.md").read_text()] == []


def test_the_readme_is_short() -> None:
    """At most 150 lines; everything else is in docs/."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
