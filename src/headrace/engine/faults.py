"""What the vendor's libraries raise: any Exception, and a panic of their native part, which is
none.

A panic is a BaseException of its own, which would end a process that could say what failed and live
on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace.errors import HeadraceError

PANIC = "PanicException"
"""The name of a panic's class, which the native part makes itself."""


@contextmanager
def raised_as(make: Callable[[str], HeadraceError]) -> Iterator[None]:
    """Turn what a vendor's call raises into an error of ours, made from a line that tells it."""
    try:
        yield
    except HeadraceError:
        raise
    except BaseException as exc:
        if not isinstance(exc, Exception) and type(exc).__name__ != PANIC:
            raise
        raise make(line_of(exc)) from exc


def line_of(exc: BaseException) -> str:
    """The first line of what an error says, with its class."""
    lines = str(exc).strip().splitlines() or ["no reason given"]
    return f"{type(exc).__name__}: {lines[0][:400]}"
