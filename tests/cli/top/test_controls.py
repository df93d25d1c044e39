"""Keys of `elastic3d top`: what terminals send for them, and what they change."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic3d.cli.top.controls import Controls, Key, KeyReader


def keys(*sent: bytes) -> list[Key]:
    reader = KeyReader()
    return [key for part in sent for key in reader.read(part)]


def test_keys_are_found_in_what_terminals_send() -> None:
    """Letters, arrows of both modes, paging keys; what is none is passed over."""
    assert keys(b"sSrq") == [Key.NEXT_COLUMN, Key.LAST_COLUMN, Key.REVERSE, Key.QUIT]
    assert keys(b"\x1b[C\x1bOD\x1b[5~\x1b[6~\x1b[H\x1b[4~") == [
        *(Key.NEXT_PAGE, Key.LAST_PAGE, Key.LAST_PAGE, Key.NEXT_PAGE),
        *(Key.FIRST, Key.LAST),
    ]
    assert keys(b"\x1b[1;5Cxyz\x00\xff\x1b[200~\r\n") == []


def test_a_sequence_may_come_in_pieces() -> None:
    """As over a slow line; one that never ends is forgotten."""
    assert keys(b"\x1b", b"[", b"C", b"q") == [Key.NEXT_PAGE, Key.QUIT]
    assert keys(b"\x1b[" + b"1" * 99, b"q") == [Key.QUIT]
    assert keys(b"\x1bq") == [Key.QUIT]


@given(st.lists(st.binary(max_size=9)))
def test_no_bytes_confuse_it(sent: list[bytes]) -> None:
    """Whatever comes, q ends it."""
    assert keys(*sent, b"~~q")[-1:] == [Key.QUIT]


@given(st.lists(st.tuples(st.sampled_from(Key), st.integers(1, 9))))
def test_pages_and_columns_stay_within_what_there_is(pressed: list[tuple[Key, int]]) -> None:
    """Also when nodes go and there are fewer pages than before."""
    controls = Controls()
    for key, pages in pressed:
        controls = controls.pressed(key, columns=10, pages=pages)
        assert 0 <= controls.sort < 10
        if key in (Key.NEXT_PAGE, Key.LAST_PAGE, Key.FIRST, Key.LAST):
            assert 0 <= controls.page < pages


def test_what_keys_do() -> None:
    """Another order begins with its first page."""
    controls = Controls(page=3).pressed(Key.NEXT_PAGE, columns=10, pages=9)
    assert controls == Controls(page=4)
    assert controls.pressed(Key.LAST, columns=10, pages=9).page == 8
    assert controls.pressed(Key.LAST_COLUMN, columns=10, pages=9) == Controls(sort=9)
    assert controls.pressed(Key.REVERSE, columns=10, pages=9) == Controls(reverse=True)
