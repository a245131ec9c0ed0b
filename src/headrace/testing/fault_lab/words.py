"""Events in plain words, and as numbers that tell one schedule from another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from zlib import crc32

from headrace.messages import Computing, Failed, Progress, Released, SourceFinal
from headrace.testing import events
from headrace.testing.events import Answer, Garble, Outrun, Tell
from headrace.testing.explorer import describe
from headrace.testing.ledger import AttemptMessage

if TYPE_CHECKING:
    from headrace.testing.fault_lab.watched import LabEvent

_KINDS: Final = {
    name: at
    for at, name in enumerate(
        sorted(name for name, value in vars(events).items() if isinstance(value, type))
    )
}
_TOLD: Final = {
    kind: at for at, kind in enumerate((Computing, Progress, SourceFinal, Failed, Released))
}
_HOW: Final = {"done": 0, "failed": 1, "refused": 2}


def seconds(time_ns: int) -> str:
    """A virtual time."""
    return f"{time_ns / 10**9:9.3f} s"


def describe_event(event: LabEvent) -> str:
    """What is brought to the owner, in words."""
    match event:
        case Outrun(first=first, cancel=cancel):
            return f"{describe_event(first)}; outrun by {describe(cancel)}"
        case Garble(source=source):
            return f"source {source} sends what is no message"
        case Tell(fault=True):
            return f"{describe(event)}, not as its manifest has it"
        case Answer(command=command, how=how):
            return f"the device answers {type(command).__name__} of {command.attempt}: {how}"
        case _:
            return describe(event)  # type: ignore[arg-type]  # an `Attach` has fields as others do


def facts_of(event: LabEvent) -> tuple[int, ...]:
    """The event as numbers, without its times: the same in every process."""
    kind = _KINDS.get(type(event).__name__, -1)
    match event:
        case Tell(source=source, message=message):
            return (kind, source, *_facts_of_message(message))
        case Outrun(first=first):
            return (kind, *facts_of(first))
        case Answer(command=command, how=how):
            return (kind, len(type(command).__name__), *command.attempt, _HOW[how])
        case _:
            return (kind, *(_number(field) for field in event))


def _number(fact: object) -> int:
    return crc32(fact.encode()) if isinstance(fact, str) else hash(fact)


def _facts_of_message(message: AttemptMessage) -> tuple[int, ...]:
    facts = (_TOLD[type(message)], *message.attempt, message.slot, message.generation)
    if isinstance(message, Progress):
        return (*facts, hash(message.spans), hash(message.digests))
    if isinstance(message, SourceFinal):
        return (*facts, message.token)
    return facts
