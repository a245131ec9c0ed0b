"""One lane: while A holds it, B is prefilled into its slot, and imported once A is released."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from headrace.errors import Refused
from headrace.telemetry.clocks import align
from headrace.telemetry.recording import Run
from headrace.telemetry.report import report_of
from tests.faults.lab import LAYERS, NUM_TOKENS, Lab, prompt

PER_ATTEMPT = LAYERS + 2  # steps of the gate


@pytest.mark.parametrize("spans", [0, 2, LAYERS])
def test_b_is_parked_while_a_holds_the_lane(tmp_path: Path, spans: int) -> None:
    """B is there partly or wholly when A goes; the rest is streamed live."""
    with Lab(tmp_path, lanes=1) as lab:
        lab.gate.allow(PER_ATTEMPT)
        a = lab.submit(prompt(1), hold=True)
        lab.until_done(a)
        lane = bytes(lab.decoder._lanes[0].view)
        b = lab.submit(prompt(2), hold=True)
        lab.until_count("handoffs", "parked", 1)
        lab.gate.allow(spans)
        if spans:
            lab.until_told(b, spans)
        assert lab.counts("handoffs") == {"published": 1, "parked": 1}
        assert bytes(lab.decoder._lanes[0].view) == lane
        lab.assert_exact(a, prompt(1))
        lab.owner.release(a)
        assert lab.counts("handoffs") == {"streaming": 1}
        assert not b.done
        lab.gate.open()
        lab.until_done(b)
        lab.assert_exact(b, prompt(2))
        lab.owner.release(b)
        lab.settle()


def test_a_decodes_while_b_is_prefilled(tmp_path: Path) -> None:
    """A's tokens are those it gets alone, and B is imported after A's last step only."""
    with Lab(tmp_path, lanes=1) as lab:
        lab.gate.open()
        alone = lab.submit(prompt(1), max_tokens=20)
        lab.until_done(alone)
        a = lab.submit(prompt(1), max_tokens=20)
        b = lab.submit(prompt(2), hold=True)
        lab.until(lambda: bool(a.tokens), "A decodes")
        lab.until(lambda: a.done or lab.counts("handoffs").get("parked") == 1, "B is parked")
        lab.until_done(a)
        assert not b.done
        assert (a.tokens, a.kv_digests) == (alone.tokens, alone.kv_digests)
        lab.until_done(b)
        lab.assert_exact(b, prompt(2))
        lab.owner.release(b)
        lab.settle()


def test_waiting_for_the_lane_is_measured_apart_from_the_tail(tmp_path: Path) -> None:
    """B is all there long before A goes; its tail is what was left to do from then on."""
    with Lab(tmp_path, lanes=1) as lab:
        lab.gate.open()
        a = lab.submit(prompt(1), hold=True)
        lab.until_done(a)
        b = lab.submit(prompt(2), trace=True)
        lab.until(lambda: lab.counts("slots").get("ready") == 1, "B is all there")
        before_ns = time.monotonic_ns()
        lab.owner.release(a)
        lab.until_done(b)
        measured = b.measured
        assert measured is not None
        assert measured.source_final_ns < before_ns < measured.storage_ns == measured.tail_begun_ns
        (parked,) = [each for each in b.owner_intervals if each.kind == "parked"]
        assert measured.parked_ns == parked.ended_ns - parked.begun_ns
        assert measured.storage_ns == parked.ended_ns
        assert all(each.begun_ns >= parked.ended_ns for each in b.imports)
        run = Run(
            name="b",
            route="streamed",
            num_tokens=NUM_TOKENS,
            outcome=b.outcome,
            source=tuple(b.source_intervals),
            owner=tuple(b.owner_intervals),
            measured=measured,
        )
        told = report_of(align(run))
        assert (told.tail_ns, told.parked_ns) == (measured.tail_ns, measured.parked_ns)
        assert told.tail_from_last_group_ns == measured.tail_from_last_group_ns
        lab.settle()


def test_who_is_cancelled_while_parked_was_parked_until_then(tmp_path: Path) -> None:
    with Lab(tmp_path, lanes=1) as lab:
        lab.gate.open()
        a = lab.submit(prompt(1), hold=True)
        lab.until_done(a)
        b = lab.submit(prompt(2), trace=True)
        lab.until_count("handoffs", "parked", 1)
        lab.owner.cancel(b)
        parked, ended = (
            next(each for each in b.owner_intervals if each.kind == kind)
            for kind in ("parked", "ended")
        )
        assert parked.begun_ns < parked.ended_ns == ended.begun_ns
        assert (parked.name, b.measured) == ("no storage", None)
        lab.owner.release(a)
        lab.settle()


def test_depth_0_turns_prefetch_off(tmp_path: Path) -> None:
    """With slots to spare nobody is parked, and each request is what it is with prefetch."""
    came = []
    for depth in (0, 2):
        directory = tmp_path / str(depth)
        directory.mkdir()
        with Lab(directory, lanes=1, slots=3, prefetch_depth=depth) as lab:
            lab.gate.open()
            requests = [lab.submit(prompt(seed), max_tokens=3) for seed in range(6)]
            parked = 0
            while not all(request.done for request in requests):
                lab.owner.turn(0.05)
                parked += lab.counts("handoffs").get("parked", 0)
            assert bool(parked) == bool(depth)
            lab.settle()
            came.append([(each.tokens, each.kv_digests) for each in requests])
    assert came[0] == came[1]


def test_a_prefetch_depth_below_0_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="prefetch_depth is -1; it is a number of requests"):
        Lab(tmp_path, lanes=1, prefetch_depth=-1)


def test_one_slot_means_no_prefetch(tmp_path: Path) -> None:
    with Lab(tmp_path, lanes=1, slots=1) as lab:
        lab.gate.open()
        a = lab.submit(prompt(1), hold=True)
        lab.until_done(a)
        lab.until_count("slots", "free", 1)
        b = lab.submit(prompt(2), hold=True)
        assert lab.counts("handoffs") == {"published": 1, "waiting": 1}
        lab.owner.release(a)
        lab.until_done(b)
        lab.assert_exact(b, prompt(2))
        lab.owner.release(b)
        lab.settle()


def test_the_oldest_parked_gets_the_lane(tmp_path: Path) -> None:
    """First come, first served, through one lane and three slots."""
    with Lab(tmp_path, lanes=1, slots=3, prefetch_depth=2) as lab:
        lab.gate.open()
        ended: list[int] = []
        requests = [lab.submit(prompt(seed), max_tokens=3) for seed in range(8)]
        while len(ended) < len(requests):
            lab.owner.turn(0.05)
            ended += [at for at, r in enumerate(requests) if r.done and at not in ended]
        assert ended == list(range(8))
        assert {request.outcome for request in requests} == {"finished"}
        lab.settle()


def test_a_deadline_passes(tmp_path: Path) -> None:
    """Streaming, parked, waiting: each ends in time though its source never moves."""
    with Lab(tmp_path, lanes=1) as lab:
        lab.fill_canaries()
        streaming = lab.submit(prompt(1), deadline_s=0.2)
        waiting = lab.submit(prompt(2), deadline_s=0.1)
        lab.gate.allow(1)
        lab.until_done(streaming, waiting)
        for request in (streaming, waiting):
            assert (request.outcome, request.reason) == ("failed", "its deadline passed")
        assert lab.counts("slots")["draining"] == 1
        lab.gate.open()
        lab.settle()
        lab.assert_rest_of_lane(0)
        holder = lab.submit(prompt(3), hold=True)
        lab.until_done(holder)
        parked = lab.submit(prompt(4), deadline_s=0.1)
        lab.until_done(parked)
        assert parked.reason == "its deadline passed"
        lab.assert_exact(holder, prompt(3))
        lab.owner.release(holder)
        lab.settle()
        lab.serve_exact(5)


def test_a_deadline_ends_with_publishing(tmp_path: Path) -> None:
    """Decoding is not the hand-off: it may take longer."""
    with Lab(tmp_path) as lab:
        lab.gate.open()
        held = lab.submit(prompt(1), hold=True, deadline_s=0.3)
        lab.until_done(held)
        quick = lab.submit(prompt(2), deadline_s=1e-9)
        lab.until_done(quick)
        assert quick.reason == "its deadline passed"
        lab.assert_exact(held, prompt(1))
        lab.owner.release(held)
        lab.settle()


@pytest.mark.parametrize("good", [0, 1, LAYERS - 1])
def test_a_failed_import_sets_storage_and_slot_apart(tmp_path: Path, good: int) -> None:
    """Nobody knows whether the device still writes: neither is used again."""
    with Lab(tmp_path, lanes=2, slots=2, drain_timeout_s=0.5) as lab:
        lab.gate.open()
        lab.decoder.fail_imports = good
        request = lab.submit(prompt(1))
        lab.until_done(request)
        assert (request.outcome, request.reason) == ("failed", "the copy engine is on fire")
        lab.decoder.fail_imports = None
        lab.until_count("slots", "quarantined", 1)
        lab.owner.check_integrity()
        assert lab.counts("lanes") == {"free": 1, "quarantined": 1, "held": 0}
        after = lab.submit(prompt(2), hold=True)
        lab.until_done(after)
        lab.assert_exact(after, prompt(2))
        assert after.entry is not None
        assert after.entry.lane == 1
        lab.owner.release(after)
        lab.owner.check_integrity()
        lab.until_count("slots", "free", 1)


def test_a_late_copy_reads_what_was_told(tmp_path: Path) -> None:
    """A device that reads the slot long after the order still gets this attempt's bytes: the slot
    is not reused before its fences.
    """
    with Lab(tmp_path, lanes=2, slots=2) as lab:
        lab.gate.open()
        lab.decoder.hold_fences = True
        first = lab.submit(prompt(1), hold=True)
        lab.until(lambda: lab.counts("handoffs").get("sealed") == 1, "all told, nothing fenced")
        second = lab.submit(prompt(2), hold=True)
        lab.until(lambda: lab.counts("handoffs").get("sealed") == 2, "the second as well")
        lab.decoder.hold_fences = False
        lab.until_done(first, second)
        lab.assert_exact(first, prompt(1))
        lab.assert_exact(second, prompt(2))
        lab.owner.release(first)
        lab.owner.release(second)
        lab.settle()


def test_many_cancelled_at_random_stages(tmp_path: Path) -> None:
    """Free counts return to the start, and descriptors do not grow."""
    rng = random.Random(7)
    with Lab(tmp_path, lanes=2, slots=3, prefetch_depth=2) as lab:
        lab.gate.open()
        running = []
        for _ in range(400):
            running.append(
                lab.submit(
                    prompt(rng.randrange(20), rng.randrange(1, NUM_TOKENS)),
                    max_tokens=rng.randrange(4),
                    chunk=rng.choice([0, 7]),
                    deadline_s=rng.choice([None, None, 0.002]),
                )
            )
            for _ in range(rng.randrange(6)):
                lab.owner.turn(0.0)
            if rng.random() < 0.6:
                lab.owner.cancel(rng.choice(running))
            lab.owner.check_integrity()
        lab.until_done(*running)
        outcomes = {request.outcome for request in running}
        assert outcomes == {"finished", "failed", "cancelled"}
        lab.settle()
        lab.serve_exact(3)
