"""Every fault test leaves nothing behind: no child, no descriptor, no name in /dev/shm."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _checked(nothing_left: None) -> None:
    """Applies to all tests of this directory."""
