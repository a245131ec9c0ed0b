"""Messages that no correct source sends: what a bug may put on the channel of a running attempt.

Each stray is made from the attempt that it comes out of and goes to the owner as it is. `HARMFUL`
ones must fail their attempt, `HARMLESS` ones are dropped and counted, and neither may touch
another. Needs msgspec only, since it runs in the source's own environment.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from headrace.ids import AttemptId, Span
from headrace.messages import (
    MAX_SPANS,
    Attached,
    Failed,
    Incompatible,
    Message,
    Prefill,
    Progress,
    Released,
    SourceFinal,
    Token,
    encode,
)
from headrace.plan import Plan

NUM_RANDOM = 20
MAX_RANDOM_NBYTES = 200
TOO_LONG_NBYTES = 66_000


class Scene(NamedTuple):
    """The attempt that a stray comes out of; `told` are the spans that it announced so far.

    first: the form of final that the engine's manifest has. previous: the grant before this one, if
    the source had any.
    """

    prefill: Prefill
    plan: Plan
    first: str
    told: tuple[Span, ...]
    seed: int
    previous: Prefill | None = None

    def progress(self, *spans: tuple[Any, ...], **changes: Any) -> bytes:
        """A progress message of this attempt with these spans, of any numbers."""
        fields: dict[str, Any] = {
            **self._identity,
            "spans": spans or ((0, 1, 0, 1),),
            "digests": (),
            "begun_ns": 0,
            "write_ns": 0,
            "ready_ns": time.monotonic_ns(),
        }
        return encode(Progress(**fields | changes))

    def final(self, **changes: Any) -> bytes:
        """A source-final of this attempt."""
        fields: dict[str, Any] = {
            **self._identity,
            "first": self.first,
            "token": 0,
            "begun_ns": 0,
            "ready_ns": time.monotonic_ns(),
        }
        return encode(SourceFinal(**fields | changes))

    def of(self, attempt: AttemptId, *, slot: int, generation: int) -> list[bytes]:
        """All that a source can tell of an attempt, in the name of another."""
        named = {"attempt": attempt, "slot": slot, "generation": generation}
        return [
            self.progress(**named),
            self.final(**named),
            encode(Failed(attempt, slot, generation, "not this one")),
            encode(Released(attempt, slot, generation)),
        ]

    @property
    def num_layers(self) -> int:
        return len(self.plan.layers)

    @property
    def num_tokens(self) -> int:
        return self.plan.num_tokens

    @property
    def everything(self) -> Span:
        return self.plan.whole()

    @property
    def _identity(self) -> dict[str, Any]:
        prefill = self.prefill
        return {
            "attempt": prefill.attempt,
            "slot": prefill.slot,
            "generation": prefill.generation,
        }


class WithDescriptors(NamedTuple):
    """A packet that carries descriptors, which no source may send."""

    payload: bytes


Packet = bytes | WithDescriptors
Stray = Callable[[Scene], list[Packet]]


def _span(*span: Any) -> Stray:
    return lambda scene: [scene.progress(span)]


def _identity(**changes: Any) -> Stray:
    return lambda scene: [scene.progress(**changes)]


def _twice(scene: Scene) -> list[Packet]:
    if scene.told:
        return [scene.progress(scene.told[-1])]
    return [scene.progress(scene.everything), scene.progress(scene.everything)]


def _truncated(scene: Scene) -> list[Packet]:
    whole = scene.progress(scene.everything)
    return [whole[:length] for length in (1, len(whole) // 2, len(whole) - 1)]


def _random(scene: Scene) -> list[Packet]:
    rng = random.Random(scene.seed)
    return [rng.randbytes(rng.randrange(1, MAX_RANDOM_NBYTES)) for _ in range(NUM_RANDOM)]


def _fields(message: Message, change: Callable[[list[Any]], object]) -> bytes:
    """The packet of a message whose fields `change` has bent, tag included."""
    fields = list(msgspec.to_builtins(message))
    change(fields)
    return msgspec.msgpack.encode(fields)


def _released(scene: Scene) -> Released:
    return Released(scene.prefill.attempt, scene.prefill.slot, scene.prefill.generation)


def _other_form(scene: Scene) -> list[Packet]:
    return [scene.final(first="token" if scene.first == "logits" else "logits")]


_WRONG_SPANS: Final[Mapping[str, Stray]] = {
    "a layer outside the model": lambda s: [s.progress((0, s.num_layers + 1, 0, s.num_tokens))],
    "layers far outside": _span(2**62, 2**63 - 1, 0, 1),
    "layers reversed": _span(1, 0, 0, 1),
    "a negative layer": _span(-1, 1, 0, 1),
    "no layers": _span(0, 0, 0, 1),
    "a position beyond the prompt": lambda s: [s.progress((0, 1, 0, s.num_tokens + 1))],
    "a negative position": _span(0, 1, -5, 1),
    "positions reversed": lambda s: [s.progress((0, 1, s.num_tokens, 0))],
    "no positions": _span(0, 1, 0, 0),
    "a cell twice": _twice,
    "a cell twice in one message": lambda s: [s.progress(s.everything, s.everything)],
    "no spans": lambda s: [s.progress(spans=())],
    "too many spans": lambda s: [s.progress(*[(0, 1, 0, 1)] * (MAX_SPANS + 1))],
    "two digests of one span": _identity(digests=(1, 2)),
    "a negative digest": _identity(digests=(-1,)),
}

_WRONG_IDENTITIES: Final[Mapping[str, Stray]] = {
    "another slot": lambda s: [s.progress(slot=s.prefill.slot + 1)],
    "the next generation": lambda s: [s.progress(generation=s.prefill.generation + 1)],
    "a negative slot": _identity(slot=-1),
    "a negative generation": _identity(generation=-1),
    "a final of another slot": lambda s: [s.final(slot=s.prefill.slot + 1)],
}

_WRONG_ORDER: Final[Mapping[str, Stray]] = {
    "a final with cells missing": lambda s: [s.final()],
    "a final of the other form": _other_form,
    "a token outside the vocabulary": lambda s: [s.final(first="token", token=2**40)],
}


_SIZES: Final = {"2^31": 2**31, "2^32": 2**32, "2^63": 2**63, "2^64 - 1": 2**64 - 1}

_WRONG_SIZES: Final[Mapping[str, Stray]] = {
    **{f"positions up to {name}": _span(0, 1, 0, size) for name, size in _SIZES.items()},
    **{f"positions from {name}": _span(0, 1, size, 2**64 - 1) for name, size in _SIZES.items()},
    **{f"layers up to {name}": _span(0, size, 0, 1) for name, size in _SIZES.items()},
    **{f"a slot of {name}": _identity(slot=size) for name, size in _SIZES.items()},
    **{f"a generation of {name}": _identity(generation=size) for name, size in _SIZES.items()},
}

_WRONG_TYPES: Final[Mapping[str, Stray]] = {
    "a bool for a layer": _span(False, True, 0, 1),
    "a bool for a position": _span(0, 1, False, True),
    "a bool for a slot": _identity(slot=False),
    "half a position": _span(0, 1, 0, 0.5),
    "text for a position": _span(0, 1, "0", "1"),
    "nothing for a position": _span(0, 1, None, 1),
    "a span of three numbers": _span(0, 1, 0),
    "a span of five numbers": _span(0, 1, 0, 1, 1),
    "text for an attempt": _identity(attempt="this one"),
    "a field too many": lambda s: [_fields(_released(s), lambda fields: fields.append(0))],
    "a field too few": lambda s: [_fields(_released(s), lambda fields: fields.pop())],
    "an unknown tag": lambda s: [msgspec.msgpack.encode(["explode", 1])],
    "no array": lambda s: [msgspec.msgpack.encode({"t": "progress"})],
    "an owner's message": lambda s: [encode(Token(1, 2))],
}

_WRONG_BYTES: Final[Mapping[str, Stray]] = {
    "truncated bytes": _truncated,
    "random bytes": _random,
    "an empty packet": lambda s: [b""],
    "a packet too long": lambda s: [bytes(TOO_LONG_NBYTES)],
    "descriptors": lambda s: [WithDescriptors(s.progress())],
}

HARMFUL: Final[Mapping[str, Stray]] = {
    **_WRONG_SPANS,
    **_WRONG_IDENTITIES,
    **_WRONG_ORDER,
    **_WRONG_SIZES,
    **_WRONG_TYPES,
    **_WRONG_BYTES,
}
"""They fail the attempt that they come out of."""


UNQUIET: Final[Mapping[str, Stray]] = {
    "the lease given back before the final": lambda s: [encode(_released(s))],
    "the lease given back twice": lambda s: [encode(_released(s)), encode(_released(s))],
}
"""They fail their attempt as well, and what is granted next finds the engine still at work."""


def _of_another(bend: Callable[[AttemptId], AttemptId]) -> Stray:
    def make(scene: Scene) -> list[Packet]:
        prefill = scene.prefill
        named = {"slot": prefill.slot, "generation": prefill.generation}
        return list(scene.of(bend(prefill.attempt), **named))

    return make


def _of_the_previous(scene: Scene) -> list[Packet]:
    """Replayed under the lease that is over; nothing if the source had none before."""
    before = scene.previous
    if before is None:
        return []
    return list(scene.of(before.attempt, slot=before.slot, generation=before.generation))


HARMLESS: Final[Mapping[str, Stray]] = {
    "of the next attempt": _of_another(lambda a: a._replace(attempt=a.attempt + 1)),
    "of an unknown request": _of_another(lambda a: a._replace(counter=a.counter + 10**6)),
    "of another epoch": _of_another(lambda a: a._replace(epoch=a.epoch + 1)),
    "of a huge request": _of_another(lambda a: AttemptId(2**63, 2**63, 2**32)),
    "of the previous lease": _of_the_previous,
    "the handshake again": lambda s: [encode(Attached(0)), encode(Incompatible("field", "why"))],
}
"""They are dropped and counted, and the attempt that they come out of is none the worse."""

LATE: Final[Mapping[str, Stray]] = {
    "all of it again": lambda s: [
        s.progress(s.everything),
        s.final(),
        encode(Failed(s.prefill.attempt, s.prefill.slot, s.prefill.generation, "too late")),
    ],
}
"""What a source says once its attempt is decided: dropped and counted."""

STRAYS: Final[Mapping[str, Stray]] = {**HARMFUL, **UNQUIET, **HARMLESS, **LATE}
