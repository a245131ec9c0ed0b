"""From a cancel to the caller's terminal, to the lane, and to the slot.

A cancel is asked for by another thread at any moment of a turn, as a router's message comes, and
read in the owner's next turn. A neighbour decodes and imports are in flight. The source has just
told half of its layers and computes the next ones: it hears of the cancel only when it next calls
its sink, and stamps that call with the host's clock.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from headrace.bench.faults.deaths import streaming
from headrace.bench.faults.engines import EMULATED, LEGACY, STAMP, TELLING
from headrace.bench.faults.pair import LANES, SLOTS, CycleFailed, Pair, Setting
from headrace.runtime.config import OwnerConfig, SourceConfig
from headrace.runtime.requests import Request, RequestOptions
from headrace.runtime.router import OwnerClient

SLAB_NBYTES = 128 << 20
LAYER_MS = 40.0
PACE = {"layers": 8, "heads": 8, "head_dim": 128, "layer_ms": LAYER_MS}
HALF = 4
LEGACY_PACE = {"layers": 4, "heads": 8, "head_dim": 128, "layer_ms": 25.0}
STUCK_PACE = {**LEGACY_PACE, "layer_ms": 60_000.0}
DRAIN_S = 0.2
LATEST_S = 0.01  # after the victim's first import was begun
MOST_LEGACY = 40


def run(setting: Setting, cycles: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """A row for each cancel."""
    rng = random.Random(seed)
    with Pair(setting, SLAB_NBYTES, pace=PACE) as pair, _Asker(pair) as asker:
        for cycle in range(cycles):
            for decoding in (True, False) if cycle % 2 else (False, True):
                row = _streaming(pair, asker, rng, decoding=decoding)
                yield {"measure": "cancel", "cycle": cycle, "decoding": decoding, **row}
    if setting.source == "replay":
        yield from _legacy(setting, min(cycles, MOST_LEGACY), rng)
    yield from _over_router(setting, cycles, rng)


class _Asker:
    """Another thread that asks for a cancel, through a pipe that the owner watches."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._victim: Request | None = None
        self.asked_ns = 0
        self.told_ns = 0
        self.num_in_flight = 0
        pair.owner.watch(self._read, self._cancel)

    def ask(self, victim: Request, delay_s: float) -> None:
        """Have `victim` cancelled in a turn that begins after `delay_s`."""
        self._victim, self.told_ns = victim, 0
        threading.Thread(target=self._wait_and_ask, args=(delay_s,)).start()

    def _wait_and_ask(self, delay_s: float) -> None:
        time.sleep(delay_s)
        os.write(self._write, STAMP.pack(time.monotonic_ns()))

    def _cancel(self) -> None:
        (self.asked_ns,) = STAMP.unpack(os.read(self._read, STAMP.size))
        if self._victim is None:
            return
        self.num_in_flight = self._pair.num_in_flight
        self._pair.owner.cancel(self._victim)
        self.told_ns = time.monotonic_ns()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pair.owner.unwatch(self._read)
        os.close(self._read)
        os.close(self._write)


def _streaming(pair: Pair, asker: _Asker, rng: random.Random, *, decoding: bool) -> dict[str, Any]:
    neighbour = pair.start_neighbour() if decoding else None
    lanes = pair.lanes_free
    pair.calls_ns()
    pair.turns.clear()
    pair.timed.steps_ns.clear()
    victim = streaming(pair, group_layers=HALF, trace=True)
    asker.ask(victim, rng.uniform(0, LATEST_S))
    pair.turn_until(lambda: bool(asker.told_ns), "the cancel was read")
    lane_ns = pair.turn_until(lambda: pair.lanes_free == lanes, "the lane is free")
    held = pair.slots("free") < SLOTS
    slot_ns = pair.turn_until(lambda: pair.slots("free") == SLOTS, "the slot is free")
    pair.owner.check_integrity()
    decoded = neighbour is not None and not neighbour.done
    steps_ns, calls = list(pair.timed.steps_ns), pair.calls_ns()
    return {
        "outcome": victim.outcome,
        "terminal_ns": asker.told_ns - asker.asked_ns,
        "lane_ns": lane_ns - asker.asked_ns,
        "slot_ns": slot_ns - asker.asked_ns,
        "slot_after_sink_call_ns": slot_ns - calls[-1] if calls else None,
        "slot_held_when_lane_was_free": held,
        "imports_in_flight": asker.num_in_flight,
        "decoded_all_along": decoded,
        "chunk_ns": pair.copies_ns(victim),
        "turn_ns": pair.turn_at(asker.asked_ns, asker.told_ns),
        "steps_ns": steps_ns,
        "neighbours": 1 + decoding,
        "neighbours_changed": pair.compare(neighbour),
        "load_1min": os.getloadavg()[0],
    }


# A legacy engine hears nothing: its slot is free when its prefill ended, or when it was killed.


def _legacy(setting: Setting, cycles: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    with Pair(setting, 16 << 20, pace=LEGACY_PACE, engine=LEGACY) as pair:
        prefill_s = LEGACY_PACE["layers"] * LEGACY_PACE["layer_ms"] / 1000
        for cycle in range(cycles):
            pair.calls_ns()
            asked_ns, slot_ns = _cancel_whole(pair, rng.uniform(0, prefill_s * 0.8))
            calls = pair.calls_ns()
            after = slot_ns - calls[-1] if calls else None
            yield {
                "measure": "cancel legacy",
                "cycle": cycle,
                "slot_ns": slot_ns - asked_ns,
                "slot_after_prefill_ns": after,
            }
    with Pair(setting, 16 << 20, pace=LEGACY_PACE, engine=LEGACY, drain_timeout_s=DRAIN_S) as pair:
        pair.set_pace(STUCK_PACE)
        logging.getLogger("headrace.owner").setLevel(logging.ERROR)  # it warns of each that it ends
        for cycle in range(min(cycles, 10)):
            _replace(pair)
            asked_ns, slot_ns = _cancel_whole(pair, rng.uniform(0, 0.02))
            since_ns = asked_ns + int(DRAIN_S * 1e9)
            yield {
                "measure": "cancel stuck",
                "cycle": cycle,
                "slot_ns": slot_ns - asked_ns,
                "slot_after_deadline_ns": slot_ns - since_ns,
            }


def _replace(pair: Pair) -> None:
    if not pair.handle.died():
        pair.handle.kill()
    pair.turn_until(lambda: not sum(pair.owner.statistics()["slots"].values()), "no source")
    pair.new_source()


def _cancel_whole(pair: Pair, delay_s: float) -> tuple[int, int]:
    """Cancel a whole prefill after a while; when it was asked, and when no slot was held."""
    asked = RequestOptions(route="whole", max_tokens=0)
    victim = pair.owner.submit([1] * pair.victim_tokens, asked)
    ask_ns = time.monotonic_ns() + int(delay_s * 1e9)
    pair.turn_until(lambda: time.monotonic_ns() >= ask_ns, "it computes")
    asked_ns = time.monotonic_ns()
    pair.owner.cancel(victim)
    if pair.slots("draining") != 1:
        raise CycleFailed("the prefill was over before its cancel")
    held = ("draining", "quarantined")
    slot_ns = pair.turn_until(lambda: not any(map(pair.slots, held)), "the slot is free")
    return asked_ns, slot_ns


# Over a router: from its withdrawal to its `Ended`.


def _over_router(setting: Setting, cycles: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    context = 2048
    engine = setting.engine(**PACE)
    emulated = setting.decoder == "null" and setting.source == "replay"
    geometry = {key: value for key, value in engine.items() if key != "layer_ms"}
    client = OwnerClient(
        OwnerConfig(
            decoder=EMULATED if emulated else setting.decoder,
            decoder_options={
                **({"geometry": geometry} if emulated else setting.decoder_options),
                "context": context,
                "lanes": LANES,
            },
            sources=(
                SourceConfig(
                    TELLING, {"engine": setting.source, "options": engine}, num_slots=SLOTS
                ),
            ),
            context=context,
        )
    )
    tokens = [1] * min(context, setting.max_prompt)
    try:
        client.start()
        for cycle in range(cycles):
            label = client.submit(tokens, RequestOptions(route="streamed", max_tokens=0))
            time.sleep(rng.uniform(0.2, 1.5) * LAYER_MS / 1000)
            asked_ns = time.monotonic_ns()
            client.withdraw(label)
            ended = client.result(label).ended
            yield {
                "measure": "cancel over router",
                "cycle": cycle,
                "terminal_ns": time.monotonic_ns() - asked_ns,
                "outcome": ended.outcome,
            }
    finally:
        client.close()
