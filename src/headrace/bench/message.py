"""What messages cost: a span at both ends, the way between them, and recording a trace.

span_cost: the owner decodes a progress message of one layer group, validates and applies it, and
takes the import commands out of its machine. announce: the source is handed the places of such a
group, and commits, encodes and sends it; nothing is written into them. one_way: half of a round
trip of such a message between two processes over the real channel, encoded, decoded and validated
on both legs, each side sleeping in poll. recording: whole hand-offs of small spans without and with
a trace, A/B/B/A; they move next to nothing, so that what a trace costs is not hidden by copies.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from headrace.backends.null import NullDecoder, decoder_like
from headrace.backends.replay import ReplayEngine, ReplayOptions
from headrace.bench.cpu import first_thread_ns
from headrace.bench.faults.table import Figure
from headrace.bench.rows import RowFile, percentile, spread
from headrace.bench.stand import Stand
from headrace.channel import Channel, socket_pair
from headrace.errors import PeerDied, WouldBlock
from headrace.geometry import Manifest, agree
from headrace.ids import AttemptId, SourceId, Span
from headrace.messages import (
    Prefill,
    Progress,
    Released,
    SourceFinal,
    decode_from_source,
    decode_to_source,
    encode,
)
from headrace.plan import Plan, compile_plan
from headrace.process import ChildProcess, die_with_parent
from headrace.protocol.books import Limits
from headrace.protocol.commands import Publish, StartImport, StartPrefill
from headrace.protocol.owner import Owner
from headrace.protocol.source import SourceAttempt
from headrace.runtime.requests import RequestOptions
from headrace.runtime.sink import SlotSink
from headrace.runtime.worker import MESSAGES_PER_ATTEMPT, SourceHandle, worst_progress_nbytes

KEY = ("measure",)
NUM_TOKENS = 2048
LAYERS = 30
ROW = Progress(AttemptId(2**60, 7, 1), 0, 3, (Span(4, 5, 0, NUM_TOKENS),), (), 2**50, 2**50, 2**50)

RECORDED = {"layers": 32, "heads": 8, "head_dim": 128, "dtype": "float16"}
RECORDED_TOKENS = 16  # 64 KiB a span
WARM_UP = 10  # hand-offs, dropped

SPAN_GOAL_US, ONE_WAY_GOAL_US = 25.0, 50.0  # of the medians
RECORDING_GOAL = 0.01


class Counts(NamedTuple):
    """How many samples each measure takes: hand-offs, round trips, and A/B/B/A rounds."""

    requests: int
    round_trips: int
    rounds: int


def run(counts: Counts, file: RowFile, say: Callable[[str], None]) -> None:
    """Measure what `file` does not hold yet: one row for each measure, with all its samples."""
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "span_cost": lambda: {"ns": span_costs_ns(counts.requests)},
        "announce": lambda: {"ns": announce_costs_ns(counts.requests)},
        "one_way": lambda: {"ns": [rtt / 2 for rtt in round_trips_ns(counts.round_trips)]},
        "recording": lambda: recording_rounds(counts.rounds),
    }
    for measure, take in measures.items():
        if {"measure": measure} not in file:
            say(f"measuring {measure}")
            load = os.getloadavg()[0]
            file.append({"measure": measure, "load_1min": load, **take()})


def span_costs_ns(requests: int) -> list[int]:
    """What each told span costs the owner, in ns: decode, validate, apply, commands."""
    owner = Owner(1, Limits(num_lanes=1, context=NUM_TOKENS))
    owner.add_source(SourceId(0), 1, _plan_for, 0)
    costs: list[int] = []
    for _ in range(requests):
        request = owner.submit(NUM_TOKENS, 0)
        (grant,) = (c for c in owner.commands() if isinstance(c, StartPrefill))
        lease = (grant.attempt, grant.slot, grant.generation)
        for layer in range(LAYERS):
            payload = encode(
                Progress(*lease, (Span(layer, layer + 1, 0, NUM_TOKENS),), (), 1, 1, 2)
            )
            begun_ns = time.perf_counter_ns()
            message = decode_from_source(payload)
            if isinstance(message, Progress):
                owner.message(SourceId(0), message, 0)
            owner.begin_imports(1 << 30, 0)
            commands = owner.commands()
            costs.append(time.perf_counter_ns() - begun_ns)
            for command in commands:
                if isinstance(command, StartImport):
                    owner.import_done(command.import_id, 0)
        owner.message(SourceId(0), SourceFinal(*lease, "logits", 0, 1, 2), 0)
        owner.message(SourceId(0), Released(*lease), 0)
        if not any(isinstance(command, Publish) for command in owner.commands()):
            raise PeerDied("the hand-off was not published; the figures would be of something else")
        owner.published(grant.attempt, 0)
        owner.retire(request, 0)
        owner.commands()
    return costs


def announce_costs_ns(requests: int) -> list[int]:
    """What each announced span costs its source, in ns: places, commit, encode, send."""
    plan = _plan_for(NUM_TOKENS)
    slot = memoryview(bytearray(plan.slot.nbytes))
    granted = Prefill(
        AttemptId(2**60, 7, 1), 0, 3, NUM_TOKENS, "streamed", 1, 0, 0, "layers", False
    )
    ours, theirs = socket_pair(MESSAGES_PER_ATTEMPT, worst_progress_nbytes())
    costs: list[int] = []
    with (
        Channel(ours, encode, decode_to_source) as channel,
        Channel(theirs, encode, decode_from_source) as owner,
    ):
        for _ in range(requests):
            attempt = SourceAttempt(granted, plan)
            attempt.start(time.monotonic_ns())
            sink = SlotSink(attempt, slot, channel.send, lambda: _nothing_came(channel))
            for layer in range(LAYERS):
                begun_ns = time.perf_counter_ns()
                with sink.write(Span(layer, layer + 1, 0, NUM_TOKENS)) as writer:
                    writer.cells(layer)
                costs.append(time.perf_counter_ns() - begun_ns)
            for _ in range(LAYERS):
                _receive(owner)
    return costs


def recording_rounds(rounds: int) -> dict[str, Any]:
    """Wall and CPU ns of hand-offs without, with, with and without a trace, round by round.

    Wall: from request to published. CPU: of the owner and its source, until both are at rest.
    """
    source = SourceHandle("replay", RECORDED, num_slots=1)
    source.start()
    decoder = NullDecoder(decoder_like(source.manifest), context=RECORDED_TOKENS, lanes=1)
    wall: list[list[int]] = []
    cpu: list[list[int]] = []
    with Stand(source, decoder, context=RECORDED_TOKENS) as stand:
        for _ in range(WARM_UP):
            _recorded(stand, traced=True)
        for _ in range(rounds):
            taken = [_recorded(stand, traced=traced) for traced in (False, True, True, False)]
            wall.append([wall_ns for wall_ns, _ in taken])
            cpu.append([cpu_ns for _, cpu_ns in taken])
    return {"layers": RECORDED["layers"], "wall_ns": wall, "cpu_ns": cpu}


def round_trips_ns(count: int) -> list[int]:
    """Round trips of a one-span progress message to an echoing process, the first 100 dropped."""
    ours, theirs = socket_pair(8, 1024)
    child = ChildProcess.spawn(
        "headrace.bench.message", [f"--echo={theirs.fileno()}"], inherit=[theirs.fileno()]
    )
    theirs.close()
    times: list[int] = []
    with child, Channel(ours, encode, decode_from_source) as channel:
        for _ in range(count + 100):
            begun_ns = time.perf_counter_ns()
            channel.send(ROW)
            _receive(channel)
            times.append(time.perf_counter_ns() - begun_ns)
    return times[100:]


class Interval(NamedTuple):
    """A median, and the interval that holds the true one in 19 of 20 runs, by ranks."""

    median: float
    low: float
    high: float


def median_interval(samples: Sequence[float]) -> Interval:
    """The median with its 95 % interval, which needs no shape of the distribution."""
    ordered = sorted(samples)
    reach = 0.98 * math.sqrt(len(ordered))
    low = max(0, math.floor(len(ordered) / 2 - reach))
    high = min(len(ordered) - 1, math.ceil(len(ordered) / 2 + reach))
    return Interval(spread(ordered).median, ordered[low], ordered[high])


def slow_downs(rounds: Sequence[Sequence[int]]) -> list[float]:
    """What recording adds, as a share, of each A/B/B/A round."""
    return [(b + c) / (a + d) - 1 for a, b, c, d in rounds]


def figures(rows: Sequence[dict[str, Any]]) -> Iterator[Figure]:
    """The costs against their goals, from rows alone."""
    for row in rows:
        if row["measure"] == "recording":
            yield from _recording(row)
            continue
        micros = [ns / 1e3 for ns in row["ns"]]
        goal = {"span_cost": SPAN_GOAL_US, "one_way": ONE_WAY_GOAL_US}.get(row["measure"])
        median = percentile(micros, 50)
        result = f"p50 {median:.1f}, p99 {percentile(micros, 99):.1f}, n={len(micros)}"
        text = "stated" if goal is None else f"p50 <= {goal:g}"
        yield Figure(
            f"{row['measure']}, us", text, result, None if goal is None else median <= goal
        )


def _recording(row: dict[str, Any]) -> Iterator[Figure]:
    for name, rounds in (("wall", row["wall_ns"]), ("CPU", row["cpu_ns"])):
        median, low, high = median_interval(slow_downs(rounds))
        yield Figure(
            f"recording a trace, added {name}",
            f"< {RECORDING_GOAL:.0%}",
            f"{median:+.2%}, 95 % interval [{low:+.2%}, {high:+.2%}], {len(rounds)} rounds",
            median < RECORDING_GOAL,
        )


def _recorded(stand: Stand, *, traced: bool) -> tuple[int, int]:
    options = RequestOptions(route="streamed", max_tokens=0, trace=traced)
    pid = stand.handle.pid
    begun = time.process_time_ns(), first_thread_ns(pid)
    request = stand.serve([1] * RECORDED_TOKENS, options)
    cpu_ns = time.process_time_ns() - begun[0] + first_thread_ns(pid) - begun[1]
    measured = request.measured
    if measured is None:
        raise PeerDied("a hand-off was published and not measured")
    return measured.published_ns - measured.submitted_ns, cpu_ns


@lru_cache
def _manifests() -> tuple[Manifest, Manifest]:
    """A source of 30 small layers, and a decoder that takes them."""
    source = ReplayEngine(ReplayOptions(layers=LAYERS, heads=3, head_dim=64, dtype="float32"))
    return source.manifest(), decoder_like(source.manifest())


@lru_cache
def _plan_for(num_tokens: int, start: int = 0) -> Plan:
    source, decoder = _manifests()
    return compile_plan(decoder, agree(source, decoder), num_tokens, NUM_TOKENS)


def _nothing_came(channel: Channel[Any, Any]) -> None:
    """What a source looks for before it hands out cells, and when it commits them."""
    try:
        channel.receive()
    except WouldBlock:
        return


def _receive(channel: Channel[Any, Any]) -> Any:
    while True:
        try:
            return channel.receive()[0]
        except WouldBlock:
            channel.wait_readable(10.0)


def _echo(fd: int) -> None:
    os.set_inheritable(fd, False)
    with Channel(socket.socket(fileno=fd), encode, decode_from_source) as channel:
        while True:
            try:
                channel.send(_receive(channel))
            except PeerDied:
                return


if __name__ == "__main__":
    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--echo", type=int, required=True)
    _echo(parser.parse_args(sys.argv[1:]).echo)
