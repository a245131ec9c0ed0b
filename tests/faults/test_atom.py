"""An owner of one ATOM lane on a fake card that fails: what is lost, what is told, what comes back.

The source is a process; what is right is decoded by headrace's decoder on a CPU from its cells.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.backends import cpu
from headrace.backends.atom import AtomDecoder, Options, decoder_on
from headrace.backends.base import SlotView
from headrace.engine.atom.record import Verified
from headrace.ids import AttemptId
from headrace.plan import compile_plan
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.requests import Request
from headrace.testing.fake_rebellions import FakeRebellions, compile_fake
from headrace.testing.sinks import MemorySink, ask
from tests.e2e.families import directory_of, greedy
from tests.faults.decodable_source import (
    ENGINE,
    FORGETFUL,
    DecodableEngine,
    options_for,
    prompt_of,
)
from tests.faults.lab import CONTEXT, Lab

NUM_TOKENS = 21
MAX_TOKENS = 6
GEOMETRY: dict[str, Any] = {"layers": 4, "heads": 2, "head_dim": 16, "vocab_size": 128}

pytestmark = pytest.mark.usefixtures("one_thread")


class AtomLab(Lab):
    """An owner of an ATOM decoder on a fake card, and a source behind a gate that stands open."""

    card: AtomDecoder

    def __init__(
        self,
        directory: Path,
        *,
        clears: bool = False,
        read_back: bool = False,
        engine: str = ENGINE,
        sent: str = "float32",
    ) -> None:
        model = directory_of("llama")
        compiled = directory / "compiled"
        compile_fake(model, compiled, max_seq_len=CONTEXT, attn_impl="flash_attn", partition_len=8)
        self.directory, self.restart, self.num_slots = directory, None, 2
        self._engine, self._options = engine, options_for(model, dtype=sent, **GEOMETRY)
        self.handles, self.gates = [], []
        self.fake = FakeRebellions()
        found = Verified("declared", sub_blocks=False, clears=clears, warms_up=False)
        options = Options(str(model), str(compiled), dtype=sent, read_back=read_back)
        self.card = decoder_on(self.fake.sdk(), found, options)
        self.owner = DecoderOwner(self.card, context=CONTEXT)
        self.attach()
        self.gate.open()

    def ask(self, seed: int, **options: Any) -> Request:
        """A streamed request of `MAX_TOKENS` tokens."""
        return self.submit(prompt_of(seed, NUM_TOKENS), **{"max_tokens": MAX_TOKENS, **options})

    def assert_serves(self, seed: int) -> None:
        """The next request gives the right tokens, and leaves nothing behind."""
        request = self.ask(seed)
        self.until_done(request)
        assert (request.outcome, request.reason) == ("finished", "")
        assert list(request.tokens) == right(seed)
        self.until(lambda: self.owner.idle, "the owner is idle")
        self.owner.check_integrity()
        assert self.counts("lanes") == {"free": 1, "quarantined": 0, "held": 0}
        assert self.card.statistics()["lanes_free"] == 1
        assert not self.fake.card.faults

    def assert_comes_back(self, failed: Request, others: list[Request]) -> None:
        """The lane is apart with a reason, and others end with one, until it is reinstated."""
        assert (failed.outcome, failed.cause) == ("failed", "device")
        attempt = AttemptId(*failed.request, 1)
        apart = self.owner.quarantined()
        assert list(apart) == [attempt]
        assert apart[attempt].reason == failed.reason
        assert self.counts("lanes") == {"free": 0, "quarantined": 1, "held": 0}
        self.until_done(*others)
        for other in others:
            assert other.outcome == "failed"
            assert "no decoder storage is left" in other.reason
        self.owner.reinstate(attempt)
        assert self.owner.quarantined() == {}
        for seed in (7, 8):
            self.assert_serves(seed)


@contextmanager
def lab_of(directory: Path, **options: Any) -> Iterator[AtomLab]:
    with AtomLab(directory, **options) as lab:
        assert isinstance(lab, AtomLab)
        lab.assert_serves(1)
        yield lab


@cache
def right(seed: int) -> list[int]:
    """The tokens of a prompt: the source's choice, and those of a decoder on a CPU."""
    engine = DecodableEngine(options_for(directory_of("llama"), **GEOMETRY))
    decoder = cpu.open({"model": str(directory_of("llama")), "lanes": 1, "context": CONTEXT})
    plan = compile_plan(decoder.manifest(), "head_major", NUM_TOKENS, CONTEXT)
    sink = MemorySink(plan, ask(NUM_TOKENS))
    engine.prefill_stream(prompt_of(seed, NUM_TOKENS), sink)
    reservation = decoder.reserve(NUM_TOKENS)
    address = np.frombuffer(sink.buffer, np.uint8).ctypes.data
    slot = SlotView(sink.buffer, address, "head_major")
    decoder.begin_import(reservation, slot, plan.copies(plan.whole()))
    entry = decoder.publish(reservation)
    assert sink.logits is not None
    tokens = [greedy(sink.logits)]
    while len(tokens) < MAX_TOKENS:
        tokens.append(greedy(decoder.decode_step([(entry, tokens[-1])])[0]))
    decoder.close()
    return tokens


def test_prompts_differ_and_so_do_tokens() -> None:
    """Or nothing here shows anything."""
    assert len({tuple(right(seed)) for seed in (1, 2, 7, 8)}) == 4
    assert all(len(set(right(seed))) > 2 for seed in (1, 2, 7, 8))


@pytest.mark.parametrize("after", [0, 5, 23])
def test_a_failed_flush_costs_its_request_and_the_lane(tmp_path: Path, after: int) -> None:
    """Whichever of 24 it is. What waits ends with a reason, and so does what is parked."""
    with lab_of(tmp_path) as lab:
        lab.fake.card.fail_update(after)
        failed = lab.ask(2)
        waiting = [lab.ask(3), lab.ask(4)]
        lab.until_done(failed)
        assert "_update" not in failed.reason
        assert "of past_key_values_" in failed.reason
        assert not failed.tokens
        lab.assert_comes_back(failed, waiting)


@pytest.mark.parametrize("after", [0, 2])
def test_a_failed_step_costs_its_request_and_the_lane(tmp_path: Path, after: int) -> None:
    """The tokens that were given before stay right."""
    with lab_of(tmp_path) as lab:
        lab.fake.card.fail_decode(after)
        failed = lab.ask(2)
        parked = [lab.ask(3)]
        lab.until_done(failed)
        assert failed.reason.startswith(f"a decode step at position {NUM_TOKENS + after} failed")
        assert list(failed.tokens) == right(2)[: 1 + after]
        lab.assert_comes_back(failed, parked)


def test_a_failed_clear_costs_its_request_and_the_lane(tmp_path: Path) -> None:
    with lab_of(tmp_path, clears=True) as lab:
        lab.fake.card.fail_update(after=3)
        failed = lab.ask(2)
        lab.until_done(failed)
        assert failed.reason.startswith("the lane was not cleared: update of block 3 of")
        assert lab.card.statistics()["lanes_reserved"] == 1
        lab.assert_comes_back(failed, [])


@pytest.mark.parametrize("after", [0, 1, 23])
def test_a_stale_card_is_found_by_digests(tmp_path: Path, after: int) -> None:
    """It says that it did what it was told, and has the last prompt's cells."""
    with lab_of(tmp_path) as lab:
        lab.fake.card.go_stale(after)
        request = lab.ask(2, digest=True)
        lab.until_done(request)
        assert (request.outcome, request.cause) == ("failed", "corrupt")
        assert not request.tokens
        assert lab.card.statistics()["lanes_published"] == 0


def test_a_stale_card_is_found_by_reading_back(tmp_path: Path) -> None:
    """At once, without digests."""
    with lab_of(tmp_path, read_back=True) as lab:
        lab.fake.card.go_stale()
        request = lab.ask(2)
        lab.until_done(request)
        assert (request.outcome, request.cause) == ("failed", "device")
        assert "does not hold what was flushed" in request.reason
        assert lab.card.statistics()["lanes_published"] == 0


@pytest.mark.parametrize("options", [{"digest": True}, {"poison": True}, {"on_failure": "retry"}])
def test_a_healthy_card_passes_every_check(tmp_path: Path, options: dict[str, Any]) -> None:
    """Digests and poison look at what is on the card, and change nothing of what is decoded."""
    with lab_of(tmp_path) as lab:
        for route in ("streamed", "chunked", "whole"):
            request = lab.ask(2, route=route, **options)
            lab.until_done(request)
            assert (request.outcome, request.reason) == ("finished", "")
            assert list(request.tokens) == right(2)


@pytest.mark.parametrize("sent", ["float32", "float16", "bfloat16"])
def test_poison_is_found_on_the_card(tmp_path: Path, sent: str) -> None:
    """Also where it went there by way of a wider dtype, and comes back so."""
    with AtomLab(tmp_path, engine=FORGETFUL, sent=sent) as lab:
        request = lab.ask(2, poison=True)
        lab.until_done(request)
        assert (request.outcome, request.cause) == ("failed", "corrupt")
        assert "layer 2 part v positions [0, 21)" in request.reason
        assert "never written" in request.reason
        assert lab.card.statistics()["lanes_published"] == 0
