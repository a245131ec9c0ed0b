"""A lab whose sources stand still at any place of an attempt, with neighbours that must not notice.

One neighbour holds its entry all the time, another decodes while the victim is dealt with, and all
lanes and slots that are free are filled with canaries before each cycle.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from headrace.backends.replay import open as open_replay
from headrace.engine.sampling import Sampler
from headrace.messages import Route, Sampling
from headrace.plan import compile_plan
from headrace.runtime.requests import Request
from headrace.runtime.worker import SourceHandle
from headrace.testing.sinks import MemorySink, ask
from tests.faults import census
from tests.faults.lab import CANARY, CONTEXT, NUM_TOKENS, WITHIN_S, Lab, prompt
from tests.faults.stations import DECODER, GEOMETRY, LAYERS, SOURCE, VARIABLE, Stations

SEED_VARIABLE = "HEADRACE_CYCLES_SEED"
ROUTES: dict[Route, int] = {"whole": 1, "chunked": 3, "streamed": LAYERS}
"""Messages that tell cells, for a prompt of the usual length."""

CHUNK = 16
LANES, SLOTS = 4, 3
HOLDER, TALKER = 101, 102
TALKER_TOKENS = 8
STEP_S = 0.0003  # the neighbour's decode steps take a while, so that it decodes at the fault
PATIENCE_S = 0.5  # progress deadline
MAX_TOKENS = 4

Deed = str


@dataclass(frozen=True)
class Cycle:
    """What is done to a process, on which route, at which place."""

    deed: Deed
    route: Route
    place: str

    def __str__(self) -> str:
        return f"{self.deed} at `{self.place}`, {self.route}"


def seed() -> int:
    """The seed of this run's order: from the environment, or a new one."""
    return int(os.environ.get(SEED_VARIABLE) or random.SystemRandom().getrandbits(32))


def in_random_order(cycles: list[Cycle]) -> Iterator[Cycle]:
    """Each cycle once; a failure says which one and how to run the same order again."""
    number = seed()
    print(f"{SEED_VARIABLE}={number}: {len(cycles)} cycles")
    for at, cycle in enumerate(random.Random(number).sample(cycles, len(cycles))):
        try:
            yield cycle
        except BaseException:
            print(f"cycle {at}: {cycle}; run again with {SEED_VARIABLE}={number}")
            raise


@cache
def expected_tokens(seed: int, num_tokens: int, count: int) -> list[int]:
    """What `count` tokens a prompt gets: the first from the source's logits, then one more each."""
    tokens = prompt(seed, num_tokens)
    engine = open_replay(GEOMETRY)
    manifest = engine.manifest()
    plan = compile_plan(manifest, manifest.layouts[0], len(tokens), CONTEXT)
    sink = MemorySink(plan, ask(len(tokens)))
    engine.prefill_stream(tokens, sink)
    assert sink.logits is not None
    row = list(memoryview(sink.logits).cast("f"))
    return [(row.index(max(row)) + at) % len(row) for at in range(count)]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll what no descriptor tells, such as that a process stands still."""
    deadline_s = time.monotonic() + WITHIN_S
    while not condition():
        if time.monotonic() > deadline_s:
            pytest.fail(f"not within {WITHIN_S} s: {what}")
        time.sleep(0.001)


class Stage(Lab):
    """An owner in this process, and one source after another."""

    def __init__(self, directory: Path, stations: Stations) -> None:
        self.stations = stations
        self._filled: set[int] = set()
        super().__init__(
            directory,
            lanes=LANES,
            slots=SLOTS,
            engine=SOURCE,
            options=GEOMETRY,
            progress_timeout_s=PATIENCE_S,
        )
        self.decoder.before_step = lambda: time.sleep(STEP_S)
        self.holder = self.submit(prompt(HOLDER), hold=True)
        self.until_done(self.holder)
        self.until_count("slots", "free", SLOTS)
        self.ledger = self.counted()
        self.descriptors = census.descriptors_of(os.getpid())

    def new_handle(self, start_timeout_s: float = WITHIN_S) -> SourceHandle:
        """A source that is not started."""
        return SourceHandle(SOURCE, GEOMETRY, num_slots=SLOTS, start_timeout_s=start_timeout_s)

    def attach(self) -> SourceHandle:
        handle = self.new_handle()
        self.handles.append(handle)
        handle.start()
        self.owner.attach(handle)
        return handle

    def counted(self) -> dict[str, dict[str, int]]:
        """What is held, by all who hold it."""
        counts = self.owner.statistics()
        return {name: counts[name] for name in ("lanes", "slots", "handoffs", "decoder")}

    def settle(self) -> None:
        """Back to the start: the same is free, nothing is open, and it adds up."""
        self.until(lambda: self.counted() == self.ledger, f"the ledger is {self.ledger}")
        self.owner.check_integrity()
        self.assert_exact(self.holder, prompt(HOLDER))
        assert census.descriptors_of(os.getpid()) == self.descriptors

    def stand(self, place: str, manner: str = "", **options: object) -> Request:
        """Submit a victim and turn until its source stands still at `place`."""
        self.stations.name(f"source {place}", manner)
        victim = self.submit(prompt(1), hold=True, **options)
        deadline_s = time.monotonic() + WITHIN_S
        while not census.is_stopped(self.handle.pid):
            assert time.monotonic() < deadline_s, f"the source never came to {place}"
            self.owner.turn(0.001)
        self.stations.clear()
        if place in ("final", "return"):
            self.until_done(victim)
        return victim

    def go_on(self) -> None:
        """Let the source run again."""
        os.kill(self.handle.pid, signal.SIGCONT)

    @contextmanager
    def neighbours(self) -> Iterator[None]:
        """A neighbour decodes meanwhile, and every byte that is nobody's keeps its canary."""
        talker = self.submit(prompt(TALKER, TALKER_TOKENS), max_tokens=CONTEXT - TALKER_TOKENS)
        self.until(lambda: bool(talker.tokens), "the neighbour decodes")
        self.until_count("slots", "free", SLOTS)
        for index in range(SLOTS):
            slot = self.handle.slot(index)
            slot[:] = bytes([CANARY]) * len(slot)
        self._filled = set(range(LANES)) - set(self.decoder._held)
        for lane in self._filled:
            view = self.decoder._lanes[lane].view
            view[:] = bytes([CANARY]) * len(view)
        yield
        self.until_done(talker)
        assert talker.outcome == "finished", talker.reason
        assert talker.tokens == expected_tokens(TALKER, TALKER_TOKENS, CONTEXT - TALKER_TOKENS)

    def assert_untouched(self) -> None:
        """The victim had the lowest free lane and slot; of its lane, only its cells were touched.

        While its source lives: a slab is let go of once its source is dead.
        """
        lane = min(self._filled)
        self.assert_rest_of_lane(lane)
        self.assert_canaries(slots=[], lanes=sorted(self._filled - {lane}))
        if not self.handle.died():
            self.assert_canaries(slots=range(1, SLOTS), lanes=[])

    def finish(self, victim: Request) -> None:
        """Give back what a victim that was served holds; it is exact."""
        if victim.entry is not None:
            self.assert_exact(victim, prompt(1))
            self.owner.release(victim)

    def close(self) -> None:
        self.owner.close()
        for handle in self.handles:
            handle.close()


@contextmanager
def marked(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stations]:
    """Stations for one test; afterwards the machine holds what it held before."""
    stations = Stations(directory / "station")
    monkeypatch.setenv(VARIABLE, str(directory / "station"))
    Sampler(Sampling())  # what it imports is mapped from here on
    before = census.take(stations.marker)
    yield stations
    census.assert_same(before, census.take(stations.marker))


def standing(stations: Stations) -> int:
    """The process that stands still, once one does."""
    found: list[int] = []

    def one_stands() -> bool:
        found.extend(pid for pid in census.marked(stations.marker) if census.is_stopped(pid))
        return bool(found)

    wait_until(one_stands, "a process stands still")
    stations.clear()
    return found[0]


@contextmanager
def run(*more: str) -> Iterator[subprocess.Popen[str]]:
    """`headrace run` in a session of its own, on the stations' source and decoder."""
    asked = ["--source", SOURCE, "--source-options", json.dumps(GEOMETRY), "--decoder", DECODER]
    asked += ["--route", "streamed", "--prompt", "a" * NUM_TOKENS, "--max-tokens", str(MAX_TOKENS)]
    with subprocess.Popen(
        [sys.executable, "-m", "headrace", "run", *asked, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        yield process
