"""One lane and random arrivals: with and without prefetch every request gets what it gets alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from headrace.backends.base import Decoder, Fence, Reservation, SlotView
from headrace.backends.load import open_decoder
from headrace.backends.null import NullDecoder, decoder_like
from headrace.backends.replay import open as open_replay
from headrace.plan import Copy
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.worker import SourceHandle
from headrace.testing.arrivals import FACTORY, Inexact, Make, Subject, run_patterns
from tests.e2e.families import directory_of, make_prompt
from tests.faults.lab import CONTEXT, GEOMETRY, prompt

NUM_PATTERNS = 200
CPU_CONTEXT = 48


def made(
    engine: str, options: Mapping[str, Any], decoder: Decoder, context: int, depth: int
) -> Any:
    @contextmanager
    def make() -> Iterator[Subject]:
        with ExitStack() as stack:
            owner = DecoderOwner(decoder, context=context, prefetch_depth=depth)
            stack.callback(owner.close)
            asked = {"engine": engine, "options": dict(options)}
            handle = SourceHandle(FACTORY, asked, num_slots=3, start_timeout_s=60.0)
            stack.callback(handle.close)
            handle.start()
            owner.attach(handle)
            yield Subject(owner, decoder)

    return make()


def null(decoder_type: type[NullDecoder] = NullDecoder) -> Make:
    def make(depth: int) -> Any:
        manifest = decoder_like(open_replay(GEOMETRY).manifest())
        decoder = decoder_type(manifest, context=CONTEXT, lanes=1)
        return made("replay", GEOMETRY, decoder, CONTEXT, depth)

    return make


def cpu(family: str) -> Make:
    def make(depth: int) -> Any:
        model = {"model": str(directory_of(family))}
        decoder = open_decoder("cpu", {**model, "lanes": 1, "context": CPU_CONTEXT})
        return made("torch", model, decoder, CPU_CONTEXT, depth)

    return make


REPLAYED = [prompt(seed, 8 + 7 * seed) for seed in range(1, 5)]
ENDS = ("finished", "cancelled", "deadline", "source-failed")


def check_seen(seen: Mapping[int, Counter[str]], num_patterns: int) -> None:
    """Enough were parked, none without prefetch, and each kind of disturbance came about."""
    assert seen[0]["parked"] == 0
    for depth, counts in seen.items():
        assert not depth or counts["parked"] > num_patterns // 4
        assert all(counts[end] > 5 for end in ENDS), (depth, counts)
        assert set(counts) - {"parked"} == set(ENDS)


def test_patterns_on_a_decoder_of_memory() -> None:
    check_seen(run_patterns(null(), REPLAYED, range(NUM_PATTERNS), (0, 1)), NUM_PATTERNS)


@pytest.mark.parametrize("num_patterns", [90, pytest.param(200, marks=pytest.mark.full_matrix)])
def test_patterns_on_a_model(num_patterns: int) -> None:
    prompts = [make_prompt(n, seed) for seed, n in enumerate((5, 12, 21, 30))]
    check_seen(run_patterns(cpu("gemma3"), prompts, range(num_patterns), (0, 1)), num_patterns)


class Hasty(NullDecoder):
    """Writes what is next into the lane of the entry that is there already."""

    def begin_import(
        self, reservation: Reservation, slot: SlotView, copies: Sequence[Copy]
    ) -> Fence:
        fence = super().begin_import(reservation, slot, copies)
        if reservation.serial > 40:
            self._lanes[reservation.lane].view[:1] = b"!"
        return fence


def test_a_lane_that_another_wrote_is_inexact() -> None:
    with pytest.raises(Inexact, match=r"and .* alone"):
        run_patterns(null(Hasty), REPLAYED, range(NUM_PATTERNS), (1,))
