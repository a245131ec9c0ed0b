"""The connector on top of each vLLM that it was made for, where none is installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import children, open_fds
from tests.unit.vllm.stand_in import VERSIONS, connector_of


@pytest.fixture(params=VERSIONS)
def module(request: pytest.FixtureRequest) -> Iterator[Any]:
    """`headrace.vllm.connector`, a copy for each version."""
    with connector_of(request.param) as connector:
        yield connector


@pytest.fixture
def newest() -> Iterator[Any]:
    """The same for the newest version only, where a source process is run for what all share."""
    with connector_of(VERSIONS[-1]) as connector:
        yield connector


@pytest.fixture
def no_source_left() -> Iterator[None]:
    """No child and no descriptor is left behind."""
    before = children(), open_fds()
    yield
    assert (children(), open_fds()) == before
