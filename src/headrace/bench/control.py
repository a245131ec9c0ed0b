"""The control cost of a span at the owner, and the one-way time of a message.

Cost: decode a progress message of one layer group, validate and apply it, and take the import
commands out of the machine. Time: half of a round trip of such a message between two processes
over the real channel, encoded, decoded and validated on both legs, each side sleeping in poll.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from headrace.backends.null import decoder_like
from headrace.backends.replay import ReplayEngine, ReplayOptions
from headrace.channel import Channel, socket_pair
from headrace.errors import PeerDied, WouldBlock
from headrace.geometry import agree
from headrace.ids import AttemptId, SourceId, Span
from headrace.messages import (
    Progress,
    Released,
    SourceFinal,
    decode_from_source,
    encode,
)
from headrace.plan import Plan, compile_plan
from headrace.process import ChildProcess, die_with_parent
from headrace.protocol.books import Limits
from headrace.protocol.commands import Publish, StartImport, StartPrefill
from headrace.protocol.owner import Owner

NUM_TOKENS = 2048
ROW = Progress(AttemptId(2**60, 7, 1), 0, 3, (Span(4, 5, 0, NUM_TOKENS),), (), 2**50, 2**50, 2**50)


def run(requests: int, round_trips: int) -> Iterator[dict[str, Any]]:
    """Two rows, each with all its samples in ns: of every span of `requests` hand-offs of 30
    layers, and of every round trip's half.
    """
    yield {"measure": "span_cost", "load_1min": os.getloadavg()[0], "ns": span_costs_ns(requests)}
    halves = [rtt_ns / 2 for rtt_ns in round_trips_ns(round_trips)]
    yield {"measure": "one_way", "load_1min": os.getloadavg()[0], "ns": halves}


def span_costs_ns(requests: int) -> list[int]:
    """What each told span costs the owner, in ns: decode, validate, apply, commands."""
    source = ReplayEngine(ReplayOptions(layers=30, heads=3, head_dim=64, dtype="float32"))
    manifest = source.manifest()
    decoder = decoder_like(manifest)
    layout = agree(manifest, decoder)
    owner = Owner(1, Limits(num_lanes=1, context=NUM_TOKENS))

    @lru_cache
    def plan_for(num_tokens: int) -> Plan:
        return compile_plan(decoder, layout, num_tokens, NUM_TOKENS)

    owner.add_source(SourceId(0), 1, plan_for, 0)
    costs: list[int] = []
    for _ in range(requests):
        request = owner.submit(NUM_TOKENS, 0)
        (grant,) = (c for c in owner.commands() if isinstance(c, StartPrefill))
        lease = (grant.attempt, grant.slot, grant.generation)
        for layer in range(30):
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


def round_trips_ns(count: int) -> list[int]:
    """Round trips of a one-span progress message to an echoing process, the first 100 dropped."""
    ours, theirs = socket_pair(8, 1024)
    child = ChildProcess.spawn(
        "headrace.bench.control", [f"--echo={theirs.fileno()}"], inherit=[theirs.fileno()]
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
