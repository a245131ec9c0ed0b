"""Logging as a command configures it, in whatever process it runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from headrace.runtime.log import configure


@pytest.fixture
def _as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.mark.usefixtures("_as_it_was", "nothing_left")
def test_configuring_closes_no_descriptor_of_whoever_else_logs() -> None:
    """Whichever test is the first: this one may run alone."""
    assert not [each for each in logging.getLogger().handlers if hasattr(each, "baseFilename")]
    configure("error")
