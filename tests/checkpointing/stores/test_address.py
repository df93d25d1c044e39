"""What is shown of the addresses of stores and servers."""

from __future__ import annotations

import pytest

from checkpointing.stores.address import redacted_within


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no host answers at http://127.0.0.1:9/api", "no host answers at http://127.0.0.1:9/api"),
        ("http://alice:secret@h:9/api: refused", "http://***@h:9/api: refused"),
        ("'https://s@cr:secret@h', then s3://secret@b", "'https://***@h', then s3://***@b"),
        ("cannot parse http://alice:se/cr?secret@h:9", "cannot parse http://***@h:9"),
        ("url: /v1/traces?api_key=secret&b=secret (Caused by x)", "url: /v1/traces?... (Caused by x)"),
        ("http://secret@h/x?y=secret", "http://***@h/x?..."),
        ("why not? nobody knows: a@b", "why not? nobody knows: a@b"),
    ],
)
def test_no_secret_of_an_address_is_in_a_text(text: str, shown: str) -> None:
    """Neither a user's name and password nor a query, of however many addresses."""
    assert redacted_within(text) == shown
