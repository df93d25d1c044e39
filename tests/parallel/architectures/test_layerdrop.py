"""Models of transformers that leave layers out by chance: they ask whether FSDP has them, and then leave none out."""

from __future__ import annotations

from functools import partial

import pytest

from elastic3d.values import Layout
from tests.parallel.architectures import speech
from tests.parallel.worlds import Orders, run_world

pytestmark = [pytest.mark.gloo, pytest.mark.long]


@pytest.mark.parametrize("blocks", [None, "wav2vec2.encoder.layers"])
def test_a_model_that_asks_for_fsdp_is_one_model_in_every_layout(blocks: str | None) -> None:
    """On one rank, where there is no FSDP, the same layers run as on several: all of them in each micro-batch."""
    digests = set()
    for layout in (Layout(pp=1, dp=1), Layout(pp=1, dp=2, zero=2)):
        for report in run_world(partial(speech.train, blocks=blocks), Orders(layout=layout)):
            assert report.ended == "done", report.error
            digest, ran, passes = report.result
            assert ran == [passes] * speech.LAYERS
            digests.add(digest)
    assert len(digests) == 1
