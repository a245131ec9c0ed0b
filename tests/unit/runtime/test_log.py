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


@pytest.mark.usefixtures("_as_it_was")
@pytest.mark.parametrize("sign", ["\n", "\r", "\x1b", "\x7f", "\x85", "\u2028", "\x00"])
def test_what_others_wrote_makes_no_line_of_its_own(
    sign: str, capfd: pytest.CaptureFixture[str]
) -> None:
    configure("info")
    logging.getLogger("headrace.test").info("path /a%sERROR of nobody", sign)
    said = capfd.readouterr().err
    assert len(said.splitlines()) == 1
    assert sign not in said.removesuffix("\n")
    assert "ERROR of nobody" in said
