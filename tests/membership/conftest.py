"""Options of the membership tests."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-stories", action="store_true", help="write what the stories do now")
