"""The page of a thousand nodes, served to a browser that follows it: what an update costs, and the first look."""

from __future__ import annotations

import json
from dataclasses import replace

from elastic3d.clock import processor_seconds
from elastic3d.dashboard.view import view
from tests.dashboard.serving import Stream, serving
from tests.dashboard.test_page import thousand

UPDATES = 8
SHARE = 0.2
"""Of a core, with an update a second."""

FIRST_PAINT = 1.0
"""Seconds of a core."""


def test_an_update_a_second_takes_less_than_a_fifth_of_a_core() -> None:
    """A tenth of the nodes change, and there is a step. What reads the stream is counted; what reads etcd is not."""
    document = thousand()
    with serving() as served:
        served.feed.publish(view(document), 1000.0)
        stream = Stream(served.port, compressed=True)
        stream.next()
        spent = []
        for number in range(1, UPDATES + 1):
            nodes = tuple(
                replace(node, detail=f"silent for {number} s" if place % 10 == number else "")
                for place, node in enumerate(document.status.nodes)
            )
            status = replace(document.status, nodes=nodes, step=20_000 + number)
            begun = processor_seconds()
            assert served.feed.publish(view(replace(document, status=status)), 1000.0 + number)
            kind, _ = stream.next()
            spent.append(processor_seconds() - begun)
            assert kind == "change"
        assert sorted(spent)[UPDATES // 2] < SHARE, spent
        begun = processor_seconds()
        response, body = served.get("/")
        assert response.status == 200
        assert b"gpu-0999" in body
        assert processor_seconds() - begun < FIRST_PAINT
        assert len(json.dumps(stream.state)) > 300_000
