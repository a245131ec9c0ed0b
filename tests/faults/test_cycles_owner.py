"""Owners and those above them: killed, stopped or cancelled at every place.

An owner runs in its own process under an `OwnerClient`, which is this process, a script, or
`headrace run`. Whoever is killed, all below it die; nobody else is left, and nothing of theirs.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import msgspec
import pytest

from headrace.errors import PeerDied
from headrace.messages import Route
from headrace.runtime.config import OwnerConfig, SourceConfig
from headrace.runtime.requests import RequestOptions
from headrace.runtime.router import OwnerClient, RouteResult
from tests.faults import census, test_cycles
from tests.faults.lab import CONTEXT, NUM_TOKENS, WITHIN_S, expected_cells, prompt
from tests.faults.stage import (
    CHUNK,
    MAX_TOKENS,
    ROUTES,
    Cycle,
    expected_tokens,
    in_random_order,
    marked,
    run,
    standing,
    wait_until,
)
from tests.faults.stations import DECODER, GEOMETRY, LAYERS, SOURCE, Stations

CONFIG = OwnerConfig(
    DECODER,
    {"context": CONTEXT, "lanes": 2},
    (SourceConfig(SOURCE, GEOMETRY),),
    CONTEXT,
    start_timeout_s=WITHIN_S,
)
LOADING = ("load", "slab")
BEFORE_PUBLISH = (
    "prompt",
    "reserve 0 before",
    "reserve 0 after",
    "begin_import 0 before",
    "begin_import 0 after",
    "fence 0",
    "publish 0 before",
)
AFTER = (
    "publish 0 after",
    "read 0 before",
    "decode_step 0 before",
    "decode_step 1 after",
    "free 0 before",
    "free 0 after",
)
IN_A_REQUEST = BEFORE_PUBLISH + AFTER

OWNERS = [
    *(Cycle(deed, "streamed", place) for deed in ("kill", "stop") for place in (*LOADING, "close")),
    *(
        Cycle(deed, route, place)
        for deed in ("kill", "stop", "cancel")
        for route in ROUTES
        for place in IN_A_REQUEST
    ),
]
"""A place that an owner comes to, by what is done to it there."""
PARENT_PLACES = (
    "spawned",
    "waits 0",
    "up",
    "prompt",
    "submitted",
    "token 0",
    "ended",
    "shutdown 0",
)
PARENTS = [
    *(Cycle("kill", "streamed", f"parent {place}") for place in PARENT_PLACES),
    *(Cycle("kill all", "streamed", f"parent {place}") for place in PARENT_PLACES),
    *(Cycle("stop", "chunked", f"parent {place}") for place in PARENT_PLACES),
    Cycle("cancel", "whole", "source written 0"),
    Cycle("cancel", "chunked", "source told 1"),
    Cycle("cancel", "streamed", "owner decode_step 1 before"),
]
RUN_PLACES = (
    "source load",
    "owner load",
    "source written 2",
    "owner fence 0",
    "owner decode_step 1 before",
)
RUNS = [Cycle(deed, "streamed", place) for deed in ("kill", "kill all") for place in RUN_PLACES]


def options(route: Route) -> RequestOptions:
    chunk = CHUNK if route == "chunked" else 0
    return RequestOptions(route=route, chunk=chunk, max_tokens=MAX_TOKENS, audit=True)


@cache
def expected_digests(seed: int) -> tuple[str, ...]:
    cells = expected_cells(prompt(seed))
    return tuple(
        hashlib.blake2b(cells[layer, 0] + cells[layer, 1], digest_size=16).hexdigest()
        for layer in range(LAYERS)
    )


def assert_exact(result: RouteResult, seed: int) -> None:
    assert result.ended.reason == ""
    assert result.ended.outcome == "finished"
    assert result.tokens == expected_tokens(seed, NUM_TOKENS, MAX_TOKENS)
    assert result.ended.kv_digests == expected_digests(seed)


@contextmanager
def running(stations: Stations) -> Iterator[OwnerClient]:
    """An owner that can serve; when it ends in good order, all its lanes are free."""
    client = OwnerClient(CONFIG)
    client.start()
    try:
        yield client
    finally:
        client.close()
    assert stations.left_by_decoder() == "lanes 2, free 2, reserved 0, published 0"


def ledger_of(client: OwnerClient) -> set[tuple[str, str, int]]:
    """What the owner holds by its own books, and the decoder by its."""
    held = ("lanes", "slots", "handoffs", "decoder", "quarantined", "sources")
    return {line for line in client.inspect().statistics if line[0] in held}


def serve_exact(client: OwnerClient) -> None:
    """More requests than there are lanes or slots, on all routes: each is exact."""
    asked = [(client.submit(prompt(n), options(route)), n) for n, route in enumerate(ROUTES)]
    for label, n in asked:
        assert_exact(client.result(label), n)


# Owners.


def test_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are killed are started anew; one lives on through all the rest."""
    with marked(tmp_path, monkeypatch) as stations, running(stations) as client:
        serve_exact(client)
        held, ledger = census.descriptors_of(client.pid), ledger_of(client)
        for cycle in in_random_order(OWNERS):
            if cycle.place in LOADING:
                while_loading(stations, cycle)
            elif cycle.place == "close":
                at_close(stations, cycle)
            elif cycle.deed == "kill":
                with_its_own(stations, cycle)
            else:
                in_a_request(client, stations, cycle)
                wait_until(lambda: ledger_of(client) == ledger, f"the ledger is {ledger}")
                assert census.descriptors_of(client.pid) == held
        serve_exact(client)


def while_loading(stations: Stations, cycle: Cycle) -> None:
    """Killed: its parent hears of it once. Stopped: it serves once it goes on."""
    stations.name(f"owner {cycle.place}")
    number = signal.SIGKILL if cycle.deed == "kill" else signal.SIGCONT
    threading.Thread(target=lambda: os.kill(standing(stations), number)).start()
    client = OwnerClient(CONFIG)
    try:
        if cycle.deed == "kill":
            with pytest.raises(PeerDied, match=r"died \(status -9\)"):
                client.start()
        else:
            client.start()
            serve_exact(client)
    finally:
        client.close()


def at_close(stations: Stations, cycle: Cycle) -> None:
    """An owner that does not end when it is told to is ended, and its source with it."""
    client = OwnerClient(CONFIG)
    client.start()
    serve_exact(client)
    stations.name("owner close")
    if cycle.deed == "kill":
        threading.Thread(target=lambda: os.kill(standing(stations), signal.SIGKILL)).start()
    client.close(WITHIN_S if cycle.deed == "kill" else 0.2)
    stations.clear()


def with_its_own(stations: Stations, cycle: Cycle) -> None:
    """One error for its parent, and its source dies with it; a new owner is exact."""
    client = OwnerClient(CONFIG)
    client.start()
    try:
        stations.name(f"owner {cycle.place}")
        label = client.submit(prompt(1), options(cycle.route))
        owner = standing(stations)
        (source,) = census.children_of(owner)
        watch = os.pidfd_open(source)
        os.kill(owner, signal.SIGKILL)
        with pytest.raises(PeerDied, match=r"the owner process died \(status -9\)"):
            client.result(label)
        assert census.dies_within(watch, WITHIN_S)
        os.close(watch)
    finally:
        client.close()


def in_a_request(client: OwnerClient, stations: Stations, cycle: Cycle) -> None:
    """A neighbour, a victim whose owner stands still in the middle, and the next request."""
    neighbour = client.submit(prompt(2), options(cycle.route))
    assert_exact(client.result(neighbour), 2)
    stations.name(f"owner {cycle.place}")
    victim = client.submit(prompt(1), options(cycle.route))
    owner = standing(stations)
    waiting = client.submit(prompt(3), options(cycle.route))
    if cycle.deed == "cancel":
        client.withdraw(victim)
    os.kill(owner, signal.SIGCONT)
    result = client.result(victim)
    if cycle.deed == "cancel" and not cycle.place.startswith("free"):
        assert (result.ended.outcome, result.ended.cause) == ("cancelled", "cancelled")
    else:
        assert_exact(result, 1)
    assert_exact(client.result(waiting), 3)


# Parents.


@contextmanager
def script(cycle: Cycle) -> Iterator[subprocess.Popen[str]]:
    """A parent in a session of its own, which prints one JSON object if it comes so far."""
    config = msgspec.json.encode(CONFIG).decode()
    asked = msgspec.json.encode(options(cycle.route)).decode()
    command = [sys.executable, "-m", "tests.faults.parent", config, json.dumps(prompt(1)), asked]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        yield process


def test_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with marked(tmp_path, monkeypatch) as stations:
        for cycle in in_random_order(PARENTS):
            stations.name(cycle.place)
            with script(cycle) as process:
                pid = standing(stations)
                assert (pid == process.pid) == cycle.place.startswith("parent")
                if cycle.deed.startswith("kill"):
                    assert_all_die(stations, process, cycle)
                    continue
                if cycle.deed == "cancel":
                    interrupt(stations, process)
                os.kill(pid, signal.SIGCONT)
                said, complaint = process.communicate(timeout=WITHIN_S)
            assert (process.returncode, complaint) == (0, "")
            result = json.loads(said)
            if cycle.deed == "cancel":
                assert result["outcome"] == "cancelled"
            else:
                assert result["tokens"] == expected_tokens(1, NUM_TOKENS, MAX_TOKENS)
                assert tuple(result["kv"]) == expected_digests(1)
            assert census.marked(stations.marker) == set()


def interrupt(stations: Stations, process: subprocess.Popen[str]) -> None:
    """Ctrl-C for a parent that waits; returns when it has withdrawn its request."""
    stations.name("parent withdrawn")
    process.send_signal(signal.SIGINT)
    wait_until(lambda: census.is_stopped(process.pid), "the parent has withdrawn its request")
    stations.clear()
    process.send_signal(signal.SIGCONT)


def test_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`headrace run` is killed while a process below it stands still."""
    with marked(tmp_path, monkeypatch) as stations:
        for cycle in in_random_order(RUNS):
            stations.name(cycle.place)
            with run() as process:
                standing(stations)
                assert_all_die(stations, process, cycle)


def assert_all_die(stations: Stations, process: subprocess.Popen[str], cycle: Cycle) -> None:
    """Nobody outlives a parent that is killed, alone or with all of its group."""
    watched = [os.pidfd_open(pid) for pid in census.marked(stations.marker)]
    before = census.names_in_shm()
    if cycle.deed == "kill all":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    for pidfd in watched:
        assert census.dies_within(pidfd, WITHIN_S)
        os.close(pidfd)
    process.wait()
    wait_until(lambda: not census.marked(stations.marker), "nobody is left")
    assert not census.left_in_shm(before)


def test_two_hundred() -> None:
    """All cycles of these files are run by default, and there are enough of them."""
    sources = test_cycles.IN_AN_ATTEMPT + test_cycles.LOADING
    assert len(sources + OWNERS + PARENTS + RUNS) >= 200
