"""SIGTERM and SIGINT before there is a loop that drains: what is under way is left at once.

Whatever was started meanwhile is ended on the way out, as by any error.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class ToldToStop(BaseException):
    """A signal asked the server to end before it served anything."""


@contextmanager
def stoppable() -> Iterator[None]:
    """Both signals raise `ToldToStop` in the block, until a loop takes them over.

    Main thread only.
    """

    def stop(number: int, frame: object) -> None:
        raise ToldToStop(signal.Signals(number).name)

    before = {each: signal.signal(each, stop) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
