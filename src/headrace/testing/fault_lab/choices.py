"""Every random decision of a schedule, recorded as it is made, and replayed from a text.

Decisions are kept in streams, one for each thing that decides (the setting, a caller, a source, a
link, the device, the owner), so that leaving one out does not shift what the others decide. In each
stream 0 is the tamest decision; a stream that runs out decides 0 from there on.

The text of a schedule names its streams with their decisions: `s=1.0*3.2;c0=4;...`, where `0*3`
stands for three zeros in a row and trailing zeros are left out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Final, TypeVar

from headrace.errors import Refused

T = TypeVar("T")
Recorded = dict[str, tuple[int, ...]]

_LONGEST: Final = 1 << 16  # decisions in one stream of a text


class Stream:
    """The decisions of one thing, in the order in which it makes them."""

    __slots__ = ("_given", "_random", "values")

    def __init__(self, given: Sequence[int] | None, source: random.Random) -> None:
        self.values: list[int] = []
        self._given = given
        self._random = source

    def below(self, bound: int) -> int:
        """A number from 0 to `bound` - 1."""
        if bound <= 1:
            return 0
        if self._given is None:
            value = int(self._random.random() * bound)
        elif len(self.values) < len(self._given):
            value = min(self._given[len(self.values)], bound - 1)
        else:
            value = 0
        self.values.append(value)
        return value

    def odds(self, share: float) -> bool:
        """True in a `share` of all cases; False is the tame one."""
        if share <= 0:
            return False
        if self._given is None:
            value = int(self._random.random() < share)
        elif len(self.values) < len(self._given):
            value = min(self._given[len(self.values)], 1)
        else:
            value = 0
        self.values.append(value)
        return bool(value)

    def pick(self, options: Sequence[T], among: Callable[[T], bool] | None = None) -> T:
        """One of `options`, of which the first is the tamest.

        `among`: what is drawn is one of those for which this holds. What is replayed may be any, so
        that a text says by itself what was decided.
        """
        if among is None or self._given is not None:
            return options[self.below(len(options))]
        able = [at for at, option in enumerate(options) if among(option)]
        value = able[int(self._random.random() * len(able))]
        self.values.append(value)
        return options[value]


class Choices:
    """All streams of one schedule: drawn from a seed, or replayed."""

    def __init__(self, seed: int = 0, recorded: Mapping[str, Sequence[int]] | None = None) -> None:
        self._recorded = recorded
        self._random = random.Random(seed)
        self._streams: dict[str, Stream] = {}

    def stream(self, name: str) -> Stream:
        """The stream of this name; the same one each time."""
        stream = self._streams.get(name)
        if stream is None:
            given = None if self._recorded is None else self._recorded.get(name, ())
            stream = self._streams[name] = Stream(given, self._random)
        return stream

    def recorded(self) -> Recorded:
        """What was decided so far, without trailing zeros and empty streams."""
        return trimmed({name: stream.values for name, stream in self._streams.items()})


def trimmed(recorded: Mapping[str, Sequence[int]]) -> Recorded:
    """`recorded` without trailing zeros and empty streams, which decide nothing."""
    out: Recorded = {}
    for name, values in recorded.items():
        count = len(values)
        while count and not values[count - 1]:
            count -= 1
        if count:
            out[name] = tuple(values[:count])
    return out


def to_text(recorded: Mapping[str, Sequence[int]]) -> str:
    """The compact text of a schedule."""
    return ";".join(
        f"{name}={'.'.join(_runs(values))}" for name, values in trimmed(recorded).items()
    )


def from_text(text: str) -> Recorded:
    """The decisions of a text.

    Raises:
        Refused: it is no such text.
    """
    recorded: dict[str, list[int]] = {}
    for field in filter(None, text.strip().split(";")):
        name, equals, values = field.partition("=")
        if not (equals and name.isalnum()) or name in recorded:
            raise Refused(f"{field!r} is not a stream of decisions, NAME=1.0*3.2", field="replay")
        stream = recorded[name] = []
        for run in values.split("."):
            value, _, times = run.partition("*")
            count = int(times) if times.isdecimal() else 0 if times else 1
            if not value.isdecimal() or len(value) > 9 or not 1 <= count <= _LONGEST - len(stream):
                raise Refused(f"{run!r} in stream {name} is no decision", field="replay")
            stream += [int(value)] * count
    return trimmed(recorded)


def _runs(values: Sequence[int]) -> list[str]:
    runs = []
    for value, run in groupby(values):
        count = len(list(run))
        runs += [f"{value}*{count}"] if count > 2 else [str(value)] * count
    return runs
