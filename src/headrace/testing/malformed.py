"""Everything wrong that a source can say of an attempt, by name, and what must become of it.

`cases` yields each case for one plan and one grant, as the raw packets to put on the channel. They
suppose that nothing was told of the attempt before. An owner must refuse each before it changes
anything, and whatever else it holds must come out as if the case had not been.

To bring a case from a real source: grant the attempt, send all payloads while the owner is not
turning (else it may publish between two of them), and let the engine return. In cases of the kind
`corrupt` let it first wait to be cancelled; in those that complete the attempt let it fill its slot
before, in silence, and return at once; in all others that do not end the attempt (`verdict` is not
"fails") let it prefill as ever. A source that was not cancelled has last words of its own, which
may be counted beside those of the case as `late` or `stale`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import msgspec

from headrace.geometry import MAX_EXTENT
from headrace.ids import Span
from headrace.messages import Cancel, Down, Message, Prefill, Shutdown, Token, Withdraw, encode
from headrace.plan import Plan
from headrace.protocol.commands import Cause
from headrace.testing import malformed_speech as speech
from headrace.testing.malformed_bytes import integers, may_be_negative, replaced, to_array
from headrace.testing.malformed_bytes import undecodable as undecodable_payloads
from headrace.testing.malformed_speech import AttemptMessage, Identity, Told, Voice

Verdict: TypeAlias = Literal["fails", "dropped", "taken"]

LARGE: Final = {
    "2^31 - 1": (1 << 31) - 1,
    "2^31": 1 << 31,
    "2^32 - 1": (1 << 32) - 1,
    "2^32": 1 << 32,
    "2^63 - 1": (1 << 63) - 1,
    "2^63": 1 << 63,
    "2^64 - 1": (1 << 64) - 1,
}
NEGATIVE: Final = {"-1": -1, "-2^31": -(1 << 31), "-2^32": -(1 << 32), "-2^63": -(1 << 63)}

_ATTEMPT_AT, _SLOT_AT, _GENERATION_AT = 1, 2, 3  # in a message's array
_SPANS_AT = 4  # in a progress message
_TOKEN_AT = 5  # in a final


@dataclass(frozen=True, slots=True)
class Case:
    """Packets of a source, in order, and what must become of them.

    verdict: "fails" = the attempt fails, once; "dropped" = nothing changes; "taken" = odd and
    legal, the attempt goes on. counted: the counters of dropped messages that go up by one each, in
    order; one that is named twice goes up by two. completes: the packets before the last tell the
    whole attempt, its return included.
    """

    name: str
    payloads: tuple[bytes, ...]
    verdict: Verdict
    counted: tuple[str, ...]
    completes: bool = False

    @property
    def cause(self) -> Cause | None:
        """Why the attempt fails, if it does."""
        if self.verdict != "fails":
            return None
        if self.kind == "corrupt":
            return Cause.CORRUPT
        wrong = {"malformed", "undecodable"}.intersection(self.counted)
        return Cause.MALFORMED if wrong else Cause.SOURCE_FAILED

    @property
    def kind(self) -> str:
        """What is wrong, in one word; names begin with it."""
        return self.name.partition(":")[0]


def cases(
    plan: Plan,
    prefill: Prefill,
    *,
    others: Sequence[Identity] = (),
    first: Literal["logits", "token"] = "logits",
) -> Iterator[Case]:
    """All cases for an attempt of which nothing was told yet.

    `prefill`: its grant. `others`: what other sources hold. `first`: what the source's manifest
    says. Some cases need sliding layers or many cells and are left out where the plan has none.
    """
    voice = Voice(plan, prefill, first)
    samples = (
        voice.progress(voice.whole, digests=(0,)),
        voice.computing(),
        voice.final(),
        voice.failed(),
        voice.released(),
    )
    strays: tuple[Message, ...] = (
        *(prefill, Cancel(prefill.attempt), Shutdown(), Token(0, 0), Withdraw(0)),
        Down(False, "down"),
    )
    for name, payload in undecodable_payloads(samples, strays):
        yield Case(name, (payload,), "fails", ("undecodable",))
    yield from _cases(speech.geometry(voice), "fails", "malformed")
    yield from _cases(speech.order(voice), "fails", "malformed")
    yield from _completed(voice)
    yield from _cases(speech.bounds(voice), "fails", "malformed")
    yield from _cases(speech.ended(voice), "fails")
    yield from _cases(speech.corrupt(voice), "fails")
    yield from _cases(speech.ended_then_late(voice), "fails", "late")
    yield from _cases(speech.ended_then_stale(voice), "fails", "stale")
    yield from _cases(speech.not_its_lease(voice, samples, others), "fails", "malformed")
    yield from _cases(speech.not_its_attempt(voice, samples, others), "dropped", "stale")
    yield from _cases(speech.handshake(voice), "dropped", "unexpected")
    yield from _sizes(voice, samples)
    yield from _cases(speech.legal(voice), "taken")
    yield from _encodings(voice)


def _cases(told: Told, verdict: Verdict, *counted: str) -> Iterator[Case]:
    for name, messages in told:
        yield Case(name, tuple(map(encode, messages)), verdict, counted)


def _completed(voice: Voice) -> Iterator[Case]:
    """What is said once the lease was given back: dropped, whatever it is."""
    for told, counter in (
        (speech.completed_then_late(voice), "late"),
        (speech.completed_then_stale(voice), "stale"),
    ):
        for name, messages in told:
            yield Case(name, tuple(map(encode, messages)), "dropped", (counter,), completes=True)
    payloads = (*map(encode, speech.completed(voice)), b"\xc1")
    name = "order: no message after the release"
    yield Case(name, payloads, "dropped", ("undecodable",), completes=True)


def _sizes(voice: Voice, samples: Sequence[AttemptMessage]) -> Iterator[Case]:
    """Integers of legal messages made very large, or negative where the wire has room for it."""
    whole = encode(samples[0])
    for sample in samples:
        array = to_array(sample)
        for path in integers(array):
            sizes = LARGE | NEGATIVE if may_be_negative(array, path) else LARGE
            for name, size in sizes.items():
                case = f"size: {array[0]} with {name} at {'.'.join(map(str, path))}"
                changed = replaced(array, path, size)
                payload = msgspec.msgpack.encode(changed)
                lies = path[0] in (_SLOT_AT, _GENERATION_AT)
                lies |= array[0] == "progress" and path[0] == _SPANS_AT
                if changed == array or _fits(voice.plan, changed):
                    continue
                if path[0] == _ATTEMPT_AT:
                    yield Case(case, (payload,), "dropped", ("stale",))
                elif lies:
                    yield Case(case, (payload,), "fails", ("malformed",))
                elif array[0] == "final" and path[0] == _TOKEN_AT and size >= MAX_EXTENT:
                    yield Case(case, (whole, payload), "fails", ("malformed",))


def _fits(plan: Plan, array: list[Any]) -> bool:
    """Whether a span made large is still one of a very long prompt."""
    if array[0] != "progress":
        return False
    span, whole = Span(*array[_SPANS_AT][0]), plan.whole()
    return span != whole and (
        0 <= span.layer_start < span.layer_stop <= whole.layer_stop
        and 0 <= span.start < span.stop <= whole.stop
    )


def _encodings(voice: Voice) -> Iterator[Case]:
    """A legal message in longer words than it needs."""
    attempt, slot, generation = voice.identity

    def wide(value: int) -> msgspec.Raw:
        return msgspec.Raw(b"\xcf" + value.to_bytes(8, "big"))

    array = ["computing", list(map(wide, attempt)), wide(slot), wide(generation)]
    payload = msgspec.msgpack.encode(array)
    yield Case("legal: all numbers in 64 bits", (payload,), "taken", ())
    longer = b"\xdd\x00\x00\x00\x04" + payload[1:]
    yield Case("legal: a length in 32 bits", (longer,), "taken", ())
