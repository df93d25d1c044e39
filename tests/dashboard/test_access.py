"""Who may see the page."""

from __future__ import annotations

import pytest

from elastic3d.dashboard.access import PageAccess, checked_name, is_loopback, new_token, parse_listen, same_origin
from elastic3d.errors import UsageError

ACCESS = PageAccess(token="secret", names={"node-17"})


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("[::1]:8080", ("::1", 8080)),
        ("jobs.example.org:80", ("jobs.example.org", 80)),
    ],
)
def test_a_place_to_listen_is_a_host_and_a_port(text: str, place: tuple[str, int]) -> None:
    """An IPv6 address in brackets."""
    assert parse_listen(text) == place


@pytest.mark.parametrize(
    "text", ["", "8080", ":8080", "localhost", "localhost:", "localhost:70000", "::1:80", "a b:1", "x:-1", "x:\u0661"]
)
def test_any_other_place_is_refused(text: str) -> None:
    """With the ways to write one."""
    with pytest.raises(UsageError, match=r"127\.0\.0\.1:8080|is no address"):
        parse_listen(text)


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1:8080", True),
        ("[::1]:8080", True),
        ("10.0.0.7", True),
        ("localhost:1", True),
        ("LOCALHOST", True),
        ("node-17:8080", True),
        ("evil.example.org", False),
        ("127.0.0.1.evil.example.org:8080", False),
        ("node-17.evil.example.org", False),
        ("", False),
        ("localhost:8080@evil.example.org", False),
        ("localhost, evil.example.org", False),
    ],
)
def test_a_name_that_somebody_made_point_here_is_refused(host: str, allowed: bool) -> None:
    """Addresses cannot be rebound; names can, so that they have to be known."""
    assert ACCESS.host_allowed(host) is allowed


def test_the_token_is_needed() -> None:
    """In a cookie, or as a bearer's; without a token everybody may see the page."""
    assert not ACCESS.may_see(cookie="", authorization="")
    assert not ACCESS.may_see(cookie="secre", authorization="Basic secret")
    assert not ACCESS.may_see(cookie="\ud800", authorization="Bearer \u00e9")
    assert ACCESS.may_see(cookie="secret", authorization="")
    assert ACCESS.may_see(cookie="", authorization="bearer secret")
    assert PageAccess(token="").may_see(cookie="", authorization="")
    assert not PageAccess(token="").token_right("")
    assert "secret" not in repr(ACCESS)
    assert len({new_token() for _ in range(50)}) == 50


@pytest.mark.parametrize(
    ("origin", "same"),
    [
        ("http://127.0.0.1:8080", True),
        ("https://127.0.0.1:8080", True),
        ("http://127.0.0.1:9090", False),
        ("http://evil.example.org", False),
        ("null", False),
        ("", False),
        ("http://[", False),
    ],
)
def test_an_order_comes_from_the_page_itself(origin: str, same: bool) -> None:
    """Another port is another site; a proxy may have another scheme."""
    assert same_origin(origin, "127.0.0.1:8080") is same


def test_what_only_this_machine_reaches() -> None:
    """Anything else is warned of."""
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::", "10.0.0.1", "a")] == [
        *(True, True, True),
        *(False, False, False, False),
    ]
    assert checked_name("Jobs.Example.org") == "jobs.example.org"
    with pytest.raises(UsageError, match="without a port"):
        checked_name("jobs:80")
