"""A straight line through measurements of a link: the fixed cost of a message, and the cost of each byte."""

from __future__ import annotations

from collections.abc import Sequence

from elastic3d.calibration.record import Sample

SLOWEST = 1.0
"""Bytes per second of a link whose samples show no growth at all."""


def fit(samples: Sequence[Sample]) -> tuple[float, float, float]:
    """Return latency in seconds, bandwidth in bytes per second, and the largest relative error of the line.

    By least squares over relative errors, so that small messages count as much as large ones; neither is ever negative.
    Needs at least two sizes.
    """
    assert len({sample.bytes for sample in samples}) > 1
    # Minimises the sum of ((latency + bytes * slope) / seconds - 1)^2.
    ones = [1.0 / sample.seconds for sample in samples]
    sizes = [sample.bytes / sample.seconds for sample in samples]
    a, b, c = (_dot(ones, ones), _dot(ones, sizes), _dot(sizes, sizes))
    p, q = sum(ones), sum(sizes)
    determinant = a * c - b * b
    latency, slope = (p * c - q * b) / determinant, (q * a - p * b) / determinant
    if latency < 0:
        latency, slope = 0.0, q / c
    elif slope <= 0:
        latency, slope = p / a, 0.0
    largest = max(sample.bytes for sample in samples)
    bandwidth = 1.0 / slope if slope > 0 else largest / min(sample.seconds for sample in samples)
    error = max(abs((latency + sample.bytes * slope) / sample.seconds - 1.0) for sample in samples)
    return latency, max(bandwidth, SLOWEST), error


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(one, other, strict=True))
