"""Scrapes as Prometheus makes them, parsed by its own client."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_plain

OPEN = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


@dataclass(frozen=True, slots=True)
class Scrape:
    """What one document says."""

    text: str
    families: tuple[Metric, ...]

    def value(self, name: str, **labels: str) -> float | None:
        """Return the sample of this name whose labels include these, None for none; there is one at most."""
        fits = [value for got, value in self.all(name) if labels.items() <= got.items()]
        assert len(fits) <= 1, (name, labels, fits)
        return fits[0] if fits else None

    def all(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Return all samples of this name, with their labels."""
        samples = [sample for family in self.families for sample in family.samples if sample.name == name]
        return [(sample.labels, sample.value) for sample in samples]


def parsed(text: str, *, is_open: bool = False) -> Scrape:
    """Return a document, parsed."""
    families: Iterable[Metric] = parse_open(text) if is_open else parse_plain(text)
    return Scrape(text, tuple(families))


def scrape(address: str, *, is_open: bool = False, timeout: float = 10.0) -> Scrape:
    """Return what is served at host:port; OSError where nothing is."""
    request = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": OPEN if is_open else "text/plain"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=timeout) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text" if is_open else "text/plain")
        return parsed(answer.read().decode(), is_open=is_open)
