"""What an owner process is started with."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from headrace.errors import Refused
from headrace.runtime.supervisor import RestartPolicy

MAX_SOURCES: Final = 16  # of one owner, so that what it holds of each fits a message
_NAME: Final = re.compile(r"[\w.:-]{1,64}")


class SourceConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """One source of an owner.

    source: what it is (torch, replay, module:factory). python: the interpreter of another
    environment, or None for the owner's own, which is up to whoever starts the owner. num_slots:
    how many requests it may hold at once. name: what logs, reasons and reports call it; by default
    what it is, with its number where there are several of that.
    """

    source: str
    options: dict[str, Any] = {}
    python: str | None = None
    num_slots: int = 2
    name: str = ""


class OwnerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """One decoder and its sources, as JSON on the owner's command line.

    sources: one at least. context: positions of a lane and of a slot. prefetch_depth: requests that
    are prefilled while no lane is free, 0 for none. restart: how a source that dies is started
    again, or None for not at all. local: whether the owner may prefill by itself, for requests that
    ask for it. control: the path of a socket for operators, or None for none. tune_copies: whether
    a probe is run first and this process and its sources are started so that copies bypass the
    cache, if that is faster.
    """

    decoder: str
    decoder_options: dict[str, Any]
    sources: tuple[SourceConfig, ...]
    context: int
    prefetch_depth: int = 1
    start_timeout_s: float = 600.0
    progress_timeout_s: float = 600.0
    drain_timeout_s: float = 120.0
    restart: RestartPolicy | None = None
    local: bool = False
    control: str | None = None
    tune_copies: bool = False
    log_level: str = "WARNING"
    log_json: bool = False

    def with_source_python(self, python: str) -> OwnerConfig:
        """The same, with `python` for each source that names no interpreter."""
        named = (each if each.python else replace(each, python=python) for each in self.sources)
        return replace(self, sources=tuple(named))


def names_of(sources: tuple[SourceConfig, ...]) -> tuple[str, ...]:
    """What each source is called.

    Raises:
        Refused: there is none or too many, a name is none, or two have the same.
    """
    if not 1 <= len(sources) <= MAX_SOURCES:
        raise Refused(
            f"an owner with {len(sources)} sources; give it from 1 to {MAX_SOURCES}",
            field="sources",
        )
    several, seen = Counter(each.source for each in sources), Counter[str]()
    names = []
    for each in sources:
        seen[each.source] += 1
        number = f"-{seen[each.source]}" if several[each.source] > 1 else ""
        names.append(each.name or f"{each.source}{number}")
        if each.name and not _NAME.fullmatch(each.name):
            raise Refused(
                f"the source name {each.name!r} is none; use up to 64 letters, digits and ._:-",
                field="name",
            )
    name, times = Counter(names).most_common(1)[0]
    if times > 1:
        raise Refused(f"two sources are named {name}; name them apart", field="name")
    return tuple(names)
