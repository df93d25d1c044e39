"""Messages between trainer and keeper, however their bytes are fragmented."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic3d.port import Flags, Go, StateRestored, StepRecord
from elastic3d.values import ModelProfile
from elastic3d.worker.processes import channel
from elastic3d.worker.processes.channel import Decoder, KeeperEnd, TrainerEnd, encode
from elastic3d.worker.processes.events import EventSaid, RaisedException

MESSAGES = (
    channel.MainReady(),
    channel.Profiled(profile=ModelProfile(blocks=1, parameters=2, micro_batches=3, micro_batch=4, digest="d")),
    StateRestored(source="memory", step=3, generation=2),
    channel.SnapshotWritten(
        buffer=1, step=2, checkpoint=True, facts={"ledger": [1, {"a": None}], "words": "über"}, digests=("ab", "")
    ),
    channel.StepTaken(
        record=StepRecord(
            generation=1,
            step=2,
            loss=0.1,
            gradient_norm=None,
            seconds=0.2,
            safe_step=-1,
            etcd_away_everywhere=False,
            samples=(0, 4),
            sample_sum=1 << 70,
        )
    ),
    EventSaid(slot=1, name="cache.unfit", at=1.5, fields={"error": "full", "rank": 3}),
    channel.MainLeft(step=4),
    channel.MainReturned(digest=None),
    channel.MainRaised(peer=True, exception=RaisedException(kind="E", message="m", traceback="t\n" * 1000)),
    channel.Start(go=Go(servers=("a:1", "b:2"))),
    channel.Raised(flags=Flags(leave=True, etcd_away=False)),
    channel.Granted(buffer=2),
    channel.SnapshotSafe(step=9),
)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=40))
def test_messages_survive_any_fragmentation(sizes: list[int]) -> None:
    """They arrive as sent, in order, whatever the pieces."""
    data = b"".join(map(encode, MESSAGES))
    decoder, messages, at = Decoder(), [], 0
    for number in range(len(data)):
        if at >= len(data):
            break
        size = sizes[number % len(sizes)]
        messages += decoder.feed(data[at : at + size])
        at += size
    assert tuple(messages) == MESSAGES


def test_an_unfinished_frame_is_never_a_message() -> None:
    """A message cut off by the trainer's death was not sent."""
    decoder = Decoder()
    assert list(decoder.feed(encode(channel.MainLeft(step=1))[:-1])) == []


def test_garbage_is_an_error() -> None:
    """User code that writes to the descriptor is detected."""
    with pytest.raises(ValueError, match="not a trainer's channel"):
        list(Decoder().feed(b"hello, world"))


def test_the_keeper_never_blocks_on_a_trainer_that_does_not_read() -> None:
    """Data that the socket does not take is kept, and arrives in order when it does."""
    ours, theirs = channel.pair()
    keeper, trainer = KeeperEnd(ours), TrainerEnd(theirs)
    count = 200_000
    for step in range(count):
        keeper.send(channel.SnapshotSafe(step=step))
    assert keeper.wants_write
    steps: list[int] = []
    while len(steps) < count:
        steps += [message.step for message in trainer.receive() if isinstance(message, channel.SnapshotSafe)]
        keeper.flush()
    assert steps == list(range(count))
    keeper.close()
    assert trainer.receive() == []
    theirs.close()


def test_an_event_that_is_none_is_refused() -> None:
    """As any other message that makes no sense."""
    frame = encode(EventSaid(slot=0, name="cache.unfit", at=1.0, fields={"error": "full"}))
    with pytest.raises(ValueError, match="not an event"):
        list(Decoder().feed(frame.replace(b"cache.unfit", b"cache.unfix")))
