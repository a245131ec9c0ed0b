"""What the vendor raises becomes an error of ours, a native panic too, and nothing else does."""

from __future__ import annotations

import pytest

from headrace.engine.faults import line_of, raised_as
from headrace.errors import Cancelled, DeviceError


class PanicException(BaseException):
    """Named as the class that the vendor's native part makes for a panic."""


@pytest.mark.parametrize(
    "raised", [RuntimeError("no\nsecond line"), PanicException("no"), KeyError("no")]
)
def test_what_the_vendor_raises_is_told_in_one_line(raised: BaseException) -> None:
    with pytest.raises(DeviceError) as caught, raised_as(DeviceError):
        raise raised
    assert caught.value.__cause__ is raised
    assert str(caught.value) == line_of(raised)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(type(raised).__name__)


@pytest.mark.parametrize("raised", [Cancelled("x"), KeyboardInterrupt(), SystemExit(3)])
def test_what_is_not_the_vendors_passes(raised: BaseException) -> None:
    with pytest.raises(type(raised)) as caught, raised_as(DeviceError):
        raise raised
    assert caught.value is raised


def test_an_error_without_a_text_is_told_by_its_class() -> None:
    assert line_of(RuntimeError()) == "RuntimeError: no reason given"
    assert len(line_of(RuntimeError("x" * 1000))) < 500
