"""A cancel at every numbered step; its neighbours are exact and no other byte is touched.

1 waiting for storage and slot     4 streaming, before the first span    7 decoding
2 holding storage, no slot         5 streaming, after k spans            8 after its end
3 parked, partly or wholly there   6 sealed, imports in flight
"""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.runtime.requests import Request
from tests.faults.lab import LAYERS, Lab, prompt

LANES = 3


def cancel(lab: Lab, request: Request) -> None:
    """The caller hears of it at once, once, and keeps the tokens that it has."""
    tokens = list(request.tokens)
    lab.owner.cancel(request)
    assert (request.outcome, request.reason) == ("cancelled", "cancelled by the caller")
    assert request.tokens == tokens
    lab.owner.check_integrity()
    lab.owner.cancel(request)  # once more is harmless
    assert request.outcome == "cancelled"


def finish(lab: Lab, *neighbours: tuple[Request, int]) -> None:
    """The neighbours are done and exact; the next request, too; all is free."""
    lab.gate.open()
    for request, seed in neighbours:
        lab.until_done(request)
        lab.assert_exact(request, prompt(seed))
        lab.owner.release(request)
    lab.settle()
    lab.serve_exact(9)


def test_1_waiting(tmp_path: Path) -> None:
    with Lab(tmp_path, lanes=1, slots=1) as lab:
        running = lab.submit(prompt(1), hold=True)
        victim = lab.submit(prompt(2))
        waiting = lab.submit(prompt(3), hold=True)
        assert lab.counts("handoffs") == {"streaming": 1, "waiting": 2}
        cancel(lab, victim)
        finish(lab, (running, 1), (waiting, 3))


def test_1_waiting_while_nothing_was_turned(tmp_path: Path) -> None:
    """Submitted and cancelled before the owner has had a turn."""
    with Lab(tmp_path) as lab:
        victim = lab.submit(prompt(2))
        cancel(lab, victim)
        finish(lab)


def test_2_storage_without_a_slot(tmp_path: Path) -> None:
    with Lab(tmp_path, lanes=LANES, slots=1) as lab:
        running = lab.submit(prompt(1), hold=True)
        victim = lab.submit(prompt(2))
        assert lab.counts("handoffs") == {"streaming": 1, "reserved": 1}
        cancel(lab, victim)
        assert lab.counts("lanes")["free"] == LANES - 1
        finish(lab, (running, 1))


@pytest.mark.parametrize("spans", [0, 2, LAYERS])
def test_3_parked(tmp_path: Path, spans: int) -> None:
    """The lane's holder is untouched, the slot comes back once the source has stopped."""
    with Lab(tmp_path, lanes=1) as lab:
        lab.gate.allow(LAYERS + 2)
        holder = lab.submit(prompt(1), hold=True)
        lab.until_done(holder)
        lab.until_count("slots", "free", 2)
        victim = lab.submit(prompt(2))
        lab.gate.allow(spans)
        if spans:
            lab.until_told(victim, spans)
        assert lab.counts("handoffs")["parked"] == 1
        lab.assert_exact(holder, prompt(1))
        cancel(lab, victim)
        assert lab.counts("slots")["draining"] == 1  # its source may still write
        finish(lab, (holder, 1))


def test_3_parked_and_wholly_there(tmp_path: Path) -> None:
    """Its source has returned: the slot is free at once."""
    with Lab(tmp_path, lanes=1) as lab:
        lab.gate.open()
        holder = lab.submit(prompt(1), hold=True)
        lab.until_done(holder)
        victim = lab.submit(prompt(2))
        lab.until_count("slots", "ready", 1)
        cancel(lab, victim)
        assert lab.counts("slots")["free"] == 2
        finish(lab, (holder, 1))


@pytest.mark.parametrize("spans", [0, 1, 3, LAYERS])
def test_4_and_5_streaming(tmp_path: Path, spans: int) -> None:
    """Nothing but the victim's own cells was written; the slot is free when its source stopped."""
    with Lab(tmp_path, lanes=LANES, slots=3) as lab:
        lab.fill_canaries()
        victim = lab.submit(prompt(1))
        waiting = lab.submit(prompt(2), hold=True)
        lab.gate.allow(spans)
        if spans:
            lab.until_told(victim, spans)
        assert lab.counts("handoffs")["streaming"] == 1
        cancel(lab, victim)
        assert victim.kv_digests == ()
        assert lab.counts("slots")["draining"] == 1
        lab.assert_canaries(slots=[1, 2], lanes=[1, 2])
        lab.assert_rest_of_lane(0)
        lab.gate.open()
        lab.until_done(waiting)
        lab.assert_canaries(slots=[2], lanes=[2])
        lab.assert_rest_of_lane(1)
        finish(lab, (waiting, 2))


def test_the_slot_of_a_cancelled_attempt_is_reused_with_a_new_generation(tmp_path: Path) -> None:
    with Lab(tmp_path, slots=1) as lab:
        (slot,) = lab.owner._machine._sources[next(iter(lab.owner._handles))].slots
        victim = lab.submit(prompt(1))
        lab.gate.allow(2)
        lab.until_told(victim, 2)
        assert slot.generation == 0
        cancel(lab, victim)
        after = lab.submit(prompt(2), hold=True)
        lab.gate.open()
        lab.until_done(after)
        assert slot.generation >= 1
        lab.assert_exact(after, prompt(2))
        lab.owner.release(after)
        lab.settle()
        assert slot.generation == 2


def test_6_sealed_with_imports_in_flight(tmp_path: Path) -> None:
    """The caller hears at once; storage and slot wait for the fences."""
    with Lab(tmp_path, lanes=LANES) as lab:
        lab.gate.open()
        lab.decoder.hold_fences = True
        victim = lab.submit(prompt(1))
        lab.until(lambda: lab.counts("handoffs").get("sealed") == 1, "sealed")
        lab.until_count("slots", "reading", 1)
        cancel(lab, victim)
        assert lab.counts("lanes")["held"] == 1
        assert lab.counts("slots")["draining"] == 1
        waiting = lab.submit(prompt(2), hold=True)
        lab.until(lambda: lab.counts("handoffs").get("sealed") == 1, "the neighbour is sealed")
        assert not waiting.done
        lab.decoder.hold_fences = False
        finish(lab, (waiting, 2))


def test_7_decoding(tmp_path: Path) -> None:
    """A neighbour that decodes by turns with it gets the tokens that it gets alone."""
    with Lab(tmp_path, lanes=LANES) as lab:
        lab.gate.open()
        alone = lab.submit(prompt(2), max_tokens=24)
        lab.until_done(alone)
        victim = lab.submit(prompt(1), max_tokens=24)
        lab.until(lambda: len(victim.tokens) == 3, "three tokens")
        neighbour = lab.submit(prompt(2), max_tokens=24)

        def one_message_a_step() -> None:
            """So that the victim does not end before it; its imports need not wait for a share."""
            lab.owner._importing._share.clear()
            if not (neighbour.tokens or lab.owner._machine.has_pieces):
                lab.wait_for_message()

        lab.decoder.before_step = one_message_a_step
        lab.until(lambda: len(neighbour.tokens) == 2, "two tokens")
        cancel(lab, victim)
        lab.until_done(neighbour)
        assert len(victim.tokens) < 24
        assert victim.measured is not None
        assert neighbour.tokens == alone.tokens
        assert neighbour.kv_digests == alone.kv_digests
        finish(lab)


def test_8_after_its_end(tmp_path: Path) -> None:
    with Lab(tmp_path) as lab:
        lab.gate.open()
        finished = lab.submit(prompt(1), max_tokens=1)
        held = lab.submit(prompt(2), hold=True)
        lab.until_done(finished, held)
        lab.owner.cancel(finished)
        lab.owner.cancel(held)
        assert (finished.outcome, held.outcome) == ("finished", "finished")
        finish(lab, (held, 2))


def test_cancels_of_all_at_once(tmp_path: Path) -> None:
    """Whoever is where: all end, all is free."""
    with Lab(tmp_path, lanes=2, slots=3, prefetch_depth=2) as lab:
        requests = [lab.submit(prompt(seed), max_tokens=1 + seed % 3) for seed in range(12)]
        lab.gate.allow(3 * (LAYERS + 2) + 2)
        lab.until_done(requests[0], requests[1])
        for request in requests[2:]:
            cancel(lab, request)
        finish(lab)


def test_every_moment_of_one_attempt(tmp_path: Path) -> None:
    """Cancelled after each single turn of the owner, from none to the last."""
    with Lab(tmp_path, lanes=LANES) as lab:
        lab.gate.open()
        for turns in range(40):
            victim = lab.submit(prompt(1), max_tokens=3)
            for _ in range(turns):
                if victim.done:
                    break
                lab.owner.turn(0.0)
            lab.owner.cancel(victim)
            assert victim.outcome in ("cancelled", "finished")
            lab.settle()
        lab.serve_exact(3)
