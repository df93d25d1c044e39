"""Shapes that stages pass on, which follow from those of the micro-batches' inputs."""

from __future__ import annotations

import pytest

from elastic3d.errors import ModelError, UsageError
from elastic3d.parallel.pipeline.shapes import PassedShapes, varying

TEXTS = PassedShapes(entering=(4, 9), leaving=(4, 9, 16), varying=2)


@pytest.mark.parametrize(
    ("entering", "leaving", "shared"),
    [
        ((4, 9), (4, 9, 16), 2),
        ((4, 9), (4, 9), 2),
        ((36,), (36, 16), 1),
        ((4, 9, 80), (4, 9, 16), 2),
        ((4, 9, 16), (4, 9, 16), 3),
    ],
)
def test_first_dims_in_common_may_vary(entering: tuple[int, ...], leaving: tuple[int, ...], shared: int) -> None:
    """Samples and their length; of texts that are laid end to end there is one such dim."""
    assert varying(entering, leaving) == shared


@pytest.mark.parametrize("leaving", [(9, 4, 16), (4, 5, 16), (36, 16)])
def test_activations_that_do_not_follow_are_refused(leaving: tuple[int, ...]) -> None:
    """Lengths come first, or are halved, or both dims are one."""
    with pytest.raises(ModelError, match=r"the first dims of both, \(samples, length\), are the same"):
        varying((4, 9), leaving)


def test_each_micro_batch_has_its_own_shape() -> None:
    """The dims after the common ones are those of the first micro-batch; a rank may pass on a part."""
    assert TEXTS.of((4, 9), "") == (4, 9, 16)
    assert TEXTS.of((7, 3), "") == (7, 3, 16)
    halves = PassedShapes(entering=(4, 8), leaving=(4, 8, 16), varying=2, part=lambda s: (s[0], s[1] // 2, *s[2:]))
    assert halves.of((7, 4), "") == (7, 2, 16)


def test_a_micro_batch_that_cannot_be_passed_on_is_named() -> None:
    """With another number of dims, or another size where there was one."""
    with pytest.raises(UsageError, match=r"micro-batch 3 is of shape \[4, 9, 2\]"):
        TEXTS.of((4, 9, 2), "micro-batch 3")
    with pytest.raises(UsageError, match="differ in their first 2 dims alone"):
        PassedShapes(entering=(4, 9, 80), leaving=(4, 9, 16), varying=2).of((4, 9, 40), "micro-batch 3")
    with pytest.raises(UsageError, match="leave one_shape=True out"):
        PassedShapes(entering=(4, 9), leaving=(4, 9, 16)).of((4, 8), "micro-batch 3")


def test_what_a_stage_made_is_compared() -> None:
    """Before it is sent to a stage that has no room for it."""
    TEXTS.check((7, 3, 16), (7, 3, 16), "blocks")
    with pytest.raises(ModelError, match=r"stage 1 made an activation of shape \[7, 4, 16\], and the next stage"):
        TEXTS.check((7, 4, 16), (7, 3, 16), "stage 1")
