"""The sink of a source: cells of the slot, announced on commit, in this process alone."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.backends.base import TimedWriter
from headrace.backends.null import decoder_like
from headrace.backends.replay import open as open_replay
from headrace.errors import Cancelled, LocalProtocolError, WouldBlock
from headrace.geometry import Layout
from headrace.ids import Span
from headrace.messages import Computing, DeviceTimes, FromSource, Progress, SourceFinal
from headrace.plan import compile_plan
from headrace.protocol.source import HEARTBEAT_NS, SourceAttempt
from headrace.runtime.digest import crc32
from headrace.runtime.sink import SlotSink
from headrace.testing.sinks import ask, region_bytes

NUM_TOKENS = 20
WINDOW = 8  # of layers 0 and 2; layer 1 is full
FILL = 0x55


class Rig:
    """One sink over a bytearray; what it sends and how often it polls."""

    def __init__(self, *, digest: bool = False, layout: Layout = "head_major") -> None:
        engine = open_replay(
            {"layers": 3, "heads": 2, "head_dim": 4, "window": WINDOW, "full_every": 2}
        )
        self.plan = compile_plan(decoder_like(engine.manifest()), layout, NUM_TOKENS, NUM_TOKENS)
        self.slot = memoryview(bytearray(bytes([FILL]) * self.plan.slot.nbytes))
        self.sent: list[FromSource] = []
        self.on_poll: Callable[[], None] = lambda: None
        self.attempt = SourceAttempt(replace(ask(NUM_TOKENS, "streamed"), digest=digest), self.plan)
        self.attempt.start(time.monotonic_ns())
        self.sink = SlotSink(self.attempt, self.slot, self.sent.append, lambda: self.on_poll())

    @property
    def logits(self) -> bytes:
        return bytes(self.plan.slot.logits_nbytes)

    def write_all(self) -> None:
        for layer in range(3):
            self.sink.write(Span(layer, layer + 1, 0, NUM_TOKENS)).commit()


def test_cells_are_the_plans_regions() -> None:
    rig = Rig()
    with rig.sink.write(Span(0, 2, 0, NUM_TOKENS)) as writer:
        sliding = writer.cells(0)
        full = writer.cells(1)
        assert writer.cells(2) == []
        assert [(c.layer, c.part, c.start, c.stop) for c in sliding] == [
            (0, 0, 12, 20),
            (0, 1, 12, 20),
        ]
        assert [(c.layer, c.part, c.start, c.stop) for c in full] == [(1, 0, 0, 20), (1, 1, 0, 20)]
        for cells in (*sliding, *full):
            assert cells.region == rig.plan.region(cells.layer, cells.part, cells.start, cells.stop)
            for number, row in enumerate(cells.rows()):
                row[:] = bytes([number + 1]) * len(row)
    (message,) = rig.sent
    assert isinstance(message, Progress)
    assert message.spans == (Span(0, 2, 0, NUM_TOKENS),)
    nbytes = NUM_TOKENS * 4 * 2
    assert region_bytes(rig.slot, full[0].region) == b"\1" * nbytes + b"\2" * nbytes
    written = sum(cells.region.rows * cells.region.row_nbytes for cells in (*sliding, *full))
    assert bytes(rig.slot).count(FILL) == len(rig.slot) - written


def test_a_span_without_cells_has_no_places() -> None:
    rig = Rig()
    with rig.sink.write(Span(0, 1, 0, 12)) as writer:
        assert writer.cells(0) == []
    assert len(rig.sent) == 1


def test_several_spans_are_announced_together() -> None:
    rig = Rig()
    spans = (Span(0, 1, 0, NUM_TOKENS), Span(2, 3, 0, NUM_TOKENS))
    with rig.sink.write(*spans) as writer:
        assert [len(writer.cells(layer)) for layer in range(3)] == [2, 0, 2]
    (message,) = rig.sent
    assert isinstance(message, Progress)
    assert message.spans == spans


def test_nothing_is_announced_when_the_block_is_left_by_an_exception() -> None:
    rig = Rig()
    with pytest.raises(KeyError), rig.sink.write(Span(0, 1, 0, NUM_TOKENS)):
        raise KeyError("engine")
    assert rig.sent == []


def test_a_writer_is_committed_once() -> None:
    rig = Rig()
    with rig.sink.write(Span(0, 1, 0, NUM_TOKENS)) as writer:
        writer.commit()
        with pytest.raises(LocalProtocolError, match="committed twice"):
            writer.commit()
        with pytest.raises(LocalProtocolError, match="after their commit"):
            writer.cells(0)
    assert len(rig.sent) == 1


def test_an_engines_bug_raises_where_it_is() -> None:
    rig = Rig()
    rig.sink.write(Span(0, 1, 0, NUM_TOKENS)).commit()
    with pytest.raises(LocalProtocolError, match=r"layers \[1, 2\).* is missing"):
        rig.sink.final(rig.logits)
    assert len(rig.sent) == 1


def test_a_writer_tells_when_a_device_did_it() -> None:
    rig = Rig()
    computed, copied = DeviceTimes(1, 5, 2), DeviceTimes(5, 9, 3)
    writer = rig.sink.write(Span(0, 1, 0, NUM_TOKENS))
    assert isinstance(writer, TimedWriter)
    writer.ran(computed, copied)
    writer.commit()
    rig.sink.write(Span(1, 2, 0, NUM_TOKENS)).commit()
    told, untold = rig.sent
    assert isinstance(told, Progress)
    assert isinstance(untold, Progress)
    assert (told.computed, told.copied) == (computed, copied)
    assert (untold.computed, untold.copied) == (None, None)
    with pytest.raises(LocalProtocolError, match="after their commit"):
        writer.ran(computed, copied)


@pytest.mark.parametrize(
    ("span", "text"),
    [
        (Span(0, 1, 19, 20), "would write .*told before"),
        (Span(0, 9, 0, 20), "outside the model's layers"),
        (Span(1, 2, 0, 21), "outside the prompt's positions"),
    ],
)
def test_cells_that_may_not_be_written_are_not_handed_out(span: Span, text: str) -> None:
    """After such a bug the attempt can only fail: each later call says the same."""
    rig = Rig()
    rig.sink.write(Span(0, 1, 0, NUM_TOKENS)).commit()
    with pytest.raises(LocalProtocolError, match=text):
        rig.sink.write(span)
    calls: list[Callable[[], object]] = [
        rig.sink.check,
        lambda: rig.sink.write(Span(1, 2, 0, NUM_TOKENS)),
        lambda: rig.sink.final(rig.logits),
    ]
    for call in calls:
        with pytest.raises(LocalProtocolError, match=text):
            call()
    assert len(rig.sent) == 1
    (failed,) = rig.attempt.fail("the engine's own words")
    assert failed.reason == "the engine's own words"


def test_a_cell_that_two_writers_hold_is_told_once() -> None:
    rig = Rig()
    first, second = (rig.sink.write(Span(0, 3, 0, NUM_TOKENS)) for _ in range(2))
    first.commit()
    with pytest.raises(LocalProtocolError, match=r"committed .*told before"):
        second.commit()
    with pytest.raises(LocalProtocolError, match="told before"):
        rig.sink.final(rig.logits)
    assert len(rig.sent) == 1


def test_a_check_sends_a_word_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more often than every HEARTBEAT_NS, counted from the last message of any kind."""
    rig = Rig()
    now_ns = time.monotonic_ns()
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
    rig.sink.write(Span(0, 1, 0, NUM_TOKENS)).commit()
    assert len(rig.sent) == 1
    for passed_ns, words in ((HEARTBEAT_NS - 1, 0), (1, 1), (HEARTBEAT_NS // 2, 0)):
        now_ns += passed_ns
        before = len(rig.sent)
        rig.sink.check()
        assert len(rig.sent) - before == words
    grant = rig.attempt.prefill
    assert rig.sent[-1] == Computing(grant.attempt, grant.slot, grant.generation)


def test_a_word_that_finds_no_room_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner has not read for long: what counts is that the engine is not stopped by it."""
    rig = Rig()
    later_ns = time.monotonic_ns() + 2 * HEARTBEAT_NS
    monkeypatch.setattr(time, "monotonic_ns", lambda: later_ns)

    def full(message: FromSource) -> None:
        raise WouldBlock("no room")

    rig.sink._send = full
    rig.sink.check()


@pytest.mark.parametrize("layout", ["head_major", "token_major"])
def test_a_digest_is_over_the_bytes_in_plan_order(layout: Layout) -> None:
    rig = Rig(digest=True, layout=layout)
    span = Span(0, 3, 0, NUM_TOKENS)
    with rig.sink.write(span) as writer:
        for layer in range(3):
            for cells in writer.cells(layer):
                for row in cells.rows():
                    row[:] = bytes(at * 7 % 256 for at in range(len(row)))
    (message,) = rig.sent
    assert isinstance(message, Progress)
    assert message.spans == tuple(Span(layer, layer + 1, 0, NUM_TOKENS) for layer in range(3))
    for told, digest in zip(message.spans, message.digests, strict=True):
        rows = (region_bytes(rig.slot, copy.source) for copy in rig.plan.copies(told))
        assert digest == zlib.crc32(b"".join(rows))


def test_a_final_puts_the_row_into_the_slot() -> None:
    rig = Rig()
    rig.write_all()
    row = bytes(at % 251 for at in range(rig.plan.slot.logits_nbytes))
    rig.sink.final(memoryview(row), ready_ns=77)
    offset = rig.plan.slot.logits_offset
    assert bytes(rig.slot[offset : offset + len(row)]) == row
    final = rig.sent[-1]
    assert isinstance(final, SourceFinal)
    assert (final.first, final.token, final.ready_ns) == ("logits", 0, 77)


def test_a_final_may_be_a_token() -> None:
    rig = Rig()
    rig.write_all()
    before = time.monotonic_ns()
    rig.sink.final(None, token=7)
    final = rig.sent[-1]
    assert isinstance(final, SourceFinal)
    assert (final.first, final.token) == ("token", 7)
    assert before <= final.ready_ns <= time.monotonic_ns()
    offset = rig.plan.slot.logits_offset
    assert bytes(rig.slot[offset : offset + 8]) == bytes([FILL]) * 8


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((None, None), "either a row of logits or a token id"),
        ((b"", 3), "either a row of logits or a token id"),
        ((b"1234", None), "a logits row of 4 bytes, expected 128"),
    ],
)
def test_a_final_of_another_shape_is_refused(given: tuple[Any, Any], text: str) -> None:
    rig = Rig()
    rig.write_all()
    with pytest.raises(LocalProtocolError, match=text):
        rig.sink.final(given[0], token=given[1])
    rig.sink.final(rig.logits)
    with pytest.raises(LocalProtocolError, match="final was given already"):
        rig.sink.final(rig.logits)
    with pytest.raises(LocalProtocolError, match="final was given already"):
        rig.sink.write(Span(0, 1, 0, 1))


@pytest.mark.parametrize("call", ["check", "write", "commit", "final"])
def test_a_cancel_that_has_come_is_raised_at_the_next_call(call: str) -> None:
    rig = Rig()
    if call == "final":
        rig.write_all()
    writer = rig.sink.write(Span(0, 1, 0, NUM_TOKENS)) if call == "commit" else None
    told = len(rig.sent)
    rig.on_poll = rig.attempt.cancel
    calls: dict[str, Callable[[], object]] = {
        "check": rig.sink.check,
        "write": lambda: rig.sink.write(Span(0, 1, 0, NUM_TOKENS)),
        "commit": rig.sink.write if writer is None else writer.commit,
        "final": lambda: rig.sink.final(rig.logits),
    }
    with pytest.raises(Cancelled):
        calls[call]()
    assert len(rig.sent) == told


def test_crc32_goes_on_from_row_to_row() -> None:
    assert crc32([b"ab", memoryview(b"cd"), b""]) == zlib.crc32(b"abcd")
    assert crc32([]) == 0
