"""Options of the tests of displays."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-displays", action="store_true", help="write what the displays show now")
