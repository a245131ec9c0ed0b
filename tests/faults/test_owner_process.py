"""The owner process and its router: whoever dies, the other hears once and nobody is left over."""

from __future__ import annotations

import dataclasses
import inspect
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from headrace.bench import paced, paced_lane
from headrace.bench.geometries import GEOMETRIES
from headrace.errors import PeerDied, Refused
from headrace.messages import Sampling, Submit
from headrace.protocol.books import Limits
from headrace.runtime.config import OwnerConfig, SourceConfig
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.owner_link import OwnerFailed
from headrace.runtime.owner_main import _named
from headrace.runtime.requests import RequestOptions
from headrace.runtime.router import OwnerClient
from headrace.runtime.supervisor import RestartPolicy
from headrace.runtime.worker import SourceHandle
from tests.faults.lab import CONTEXT, GATED, GEOMETRY, LAYERS, Gate, prompt

STREAMED = RequestOptions(route="streamed", max_tokens=1, audit=True)
WITHIN_MS = 10_000


def config(gate: Gate, **changes: Any) -> OwnerConfig:
    """`changes`: of the owner, or of its one source."""
    source: dict[str, Any] = {"source": GATED, "options": {**GEOMETRY, "gate": str(gate.path)}}
    for name in SourceConfig.__struct_fields__:
        if name in changes:
            source[name] = changes.pop(name)
    facts: dict[str, Any] = {
        "decoder": "null",
        "decoder_options": {"context": CONTEXT, "lanes": 2},
        "sources": (SourceConfig(**source),),
        "context": CONTEXT,
        "start_timeout_s": 20.0,
    }
    return OwnerConfig(**facts | changes)


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def dead(pidfd: int) -> bool:
    """Whether a process is gone, within the bound."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(WITHIN_MS))


class Watched:
    """An owner client with the pidfd of its source, and the gate that the source waits at."""

    def __init__(self, directory: Path, **changes: Any) -> None:
        self.gate = Gate(directory / "gate")
        self.client = OwnerClient(config(self.gate, **changes))
        self.up = self.client.start()
        self.owner_pid = self.client.pid
        (self.source_pid,) = children_of(self.owner_pid)
        self.source = os.pidfd_open(self.source_pid)

    def close(self) -> None:
        self.gate.open()
        self.client.close()
        assert dead(self.source)
        os.close(self.source)


@contextmanager
def watched(directory: Path, **changes: Any) -> Iterator[Watched]:
    made = Watched(directory, **changes)
    try:
        yield made
    finally:
        made.close()


def test_serves_and_ends(tmp_path: Path) -> None:
    with watched(tmp_path) as w:
        assert (w.up.lanes, w.up.num_slots, w.up.context) == (2, 2, CONTEXT)
        w.gate.open()
        digests = set()
        for route in ("whole", "chunked", "streamed"):
            options = RequestOptions(route=route, max_tokens=1, audit=True, trace=True)
            result = w.client.result(w.client.submit(prompt(1), options))
            assert result.ended.outcome == "finished"
            assert result.source_intervals
            assert result.owner_intervals
            digests.add((tuple(result.tokens), result.ended.kv_digests))
        assert len(digests) == 1


def test_results_are_kept_for_whoever_asks_later(tmp_path: Path) -> None:
    """Two requests at once, asked for in the other order."""
    with watched(tmp_path) as w:
        w.gate.open()
        first = w.client.submit(prompt(1), STREAMED)
        second = w.client.submit(prompt(2), STREAMED)
        late = w.client.result(second)
        early = w.client.result(first)
        assert late.ended.label == second
        assert early.ended.label == first
        assert len(early.tokens) == len(late.tokens) == 1


@pytest.mark.parametrize("depth", [0, 1])
def test_the_prefetch_depth_is_that_of_the_config(depth: int) -> None:
    """0 turns prefetch off: the next request is not granted a slot while the one lane decodes."""
    pace = {"mb_per_s": 1e5, "step_ms": 1.0}
    options = {"geometry": "llama-3.1-8b", "context": CONTEXT, **pace}
    decoder = GEOMETRIES["llama-3.1-8b"].decoder()
    asked = OwnerConfig(
        paced_lane.FACTORY,
        options,
        (SourceConfig(paced.FACTORY, paced.options_for(decoder, 4, 1e9)),),
        CONTEXT,
        prefetch_depth=depth,
    )
    decoding = dataclasses.replace(STREAMED, max_tokens=40, audit=False)
    client = OwnerClient(asked)
    try:
        assert client.start().lanes == 1
        labels = [client.submit([1, 2, 3, 4], decoding) for _ in range(2)]
        first, second = (client.result(label) for label in labels)
        assert first.ended.measured is not None
        assert second.ended.measured is not None
        assert first.tokens == second.tokens
        assert len(first.tokens) == 40
        assert first.ended.measured.parked_ns == 0
        assert bool(second.ended.measured.parked_ns) == bool(depth)
    finally:
        client.close()


@pytest.mark.parametrize("spans", [None, 0, 2, LAYERS])
def test_killed_owner_takes_its_source_along(tmp_path: Path, spans: int | None) -> None:
    """The router hears of it once per wait, and what it waits for never hangs."""
    with watched(tmp_path) as w:
        if spans is not None:
            w.gate.allow(spans)
            label = w.client.submit(prompt(1), STREAMED)
        os.kill(w.owner_pid, signal.SIGKILL)
        assert dead(w.source)
        with pytest.raises(PeerDied, match=r"the owner process died \(status -9\)"):
            w.client.result(label if spans is not None else 0)


def test_stopped_source_does_not_stop_the_owner(tmp_path: Path) -> None:
    """A withdrawn request ends at once, and closing ends a stopped source too."""
    with watched(tmp_path) as w:
        label = w.client.submit(prompt(1), STREAMED)
        os.kill(w.source_pid, signal.SIGSTOP)
        w.client.withdraw(label)
        assert w.client.result(label).ended.outcome == "cancelled"


def test_killed_source_is_told_to_the_router(tmp_path: Path) -> None:
    with watched(tmp_path) as w:
        label = w.client.submit(prompt(1), STREAMED)
        os.kill(w.source_pid, signal.SIGKILL)
        ended = w.client.result(label).ended
        assert (ended.outcome, ended.cause) == ("failed", "source-died")
        assert "signal 9" in ended.reason
        again = w.client.result(w.client.submit(prompt(1), STREAMED)).ended
        assert (again.outcome, again.mistake) == ("failed", "source")
        assert again.reason.startswith("no prefill source")


def test_a_killed_source_comes_back_where_it_is_told_to(tmp_path: Path) -> None:
    """The running request is tried again, the waiting one never noticed."""
    policy = RestartPolicy(first_delay_s=0.01)
    with watched(tmp_path, restart=policy, decoder_options={"context": CONTEXT, "lanes": 1}) as w:
        retried = w.client.submit(prompt(1), replace_options(on_failure="retry", digest=True))
        waiting = w.client.submit(prompt(2), STREAMED)
        os.kill(w.source_pid, signal.SIGKILL)
        w.gate.open()
        ended = w.client.result(retried).ended
        assert (ended.outcome, ended.cause) == ("finished", "")
        assert len(ended.attempts) == 1
        assert "signal 9" in ended.attempts[0]
        assert w.client.result(waiting).ended.outcome == "finished"
        counts = {(s, n): count for s, n, count in w.client.inspect().statistics}
        assert counts["restarts", "restarted"] == 1
        assert counts["retries", "count"] == 1


def replace_options(**changes: Any) -> RequestOptions:
    return dataclasses.replace(STREAMED, **changes)


def test_a_request_that_no_message_carries_is_refused_here(tmp_path: Path) -> None:
    """The owner could not read it, and so could not answer."""
    with watched(tmp_path) as w:
        for name, value in (("max_attempts", -1), ("on_failure", "hope"), ("chunk", -1)):
            with pytest.raises(Refused) as caught:
                w.client.submit(prompt(1), replace_options(**{name: value}))
            assert caught.value.field == name
        w.gate.open()
        assert w.client.result(w.client.submit(prompt(1), STREAMED)).ended.outcome == "finished"


def test_an_owner_without_an_engine_of_its_own_does_not_start(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    client = OwnerClient(config(gate, local=True))
    try:
        with pytest.raises(Refused, match="decoder null has no prefill engine of its own"):
            client.start()
    finally:
        gate.open()
        client.close()


def test_a_refused_request_names_its_option(tmp_path: Path) -> None:
    with watched(tmp_path) as w:
        w.gate.open()
        for options, field in (
            (RequestOptions(max_tokens=2), "max_tokens"),
            (RequestOptions(max_tokens=1, group_layers=0), "group_layers"),
        ):
            ended = w.client.result(w.client.submit(prompt(1), options)).ended
            assert (ended.outcome, ended.mistake) == ("failed", field)
        good = w.client.result(w.client.submit(prompt(1), STREAMED)).ended
        assert good.outcome == "finished"


def test_a_malformed_submit_costs_nobody_else(tmp_path: Path) -> None:
    """Bytes that are no message are left out; a submit without its prompt ends as failed."""
    with watched(tmp_path) as w:
        channel = w.client._link._channel
        assert channel is not None
        assert channel._sock is not None
        label = w.client.submit(prompt(1), STREAMED)
        for payload in (b"\xc1garbage", msgspec.msgpack.encode(["explode", 1]), b"\x93"):
            channel._sock.send(payload)
        submit = Submit(
            label=1000,
            num_tokens=4,
            max_tokens=1,
            route="whole",
            group_layers=1,
            chunk=0,
            prefill_chunk=0,
            emission="layers",
            digest=False,
            stop_tokens=(),
            sampling=Sampling(),
            audit=False,
            trace=False,
            deadline_ns=None,
            on_failure="fail",
            max_attempts=1,
            poison=False,
        )
        fd = os.memfd_create("prompt")
        os.write(fd, bytes(4 * 4))
        refused = {
            1000: ([], submit, "a submit with 0 descriptors, expected 1"),
            1001: ([fd, fd], submit, "a submit with 2 descriptors, expected 1"),
            1002: ([fd], replace(submit, num_tokens=5), "a prompt of 4 tokens, 5 were told"),
        }
        for number, (fds, message, reason) in refused.items():
            channel.send(replace(message, label=number), fds)
            w.client._inbox[number] = deque()
            ended = w.client.result(number).ended
            assert (ended.outcome, ended.mistake, ended.reason) == ("failed", "", reason)
        os.close(fd)
        w.gate.open()
        assert w.client.result(label).ended.outcome == "finished"
        good = w.client.result(w.client.submit(prompt(2), STREAMED)).ended
        assert good.outcome == "finished"


def test_the_deadlines_are_configured(tmp_path: Path) -> None:
    """A source that is stopped fails its request in time, and is ended in time."""
    with watched(tmp_path, progress_timeout_s=0.3, drain_timeout_s=0.3) as w:
        label = w.client.submit(prompt(1), STREAMED)
        os.kill(w.source_pid, signal.SIGSTOP)
        ended = w.client.result(label).ended
        assert (ended.outcome, ended.cause) == ("failed", "stalled")
        assert ended.reason == "the source made no progress in time"
        assert dead(w.source)


def test_the_deadlines_by_default() -> None:
    parameters = inspect.signature(DecoderOwner).parameters
    for name, seconds in (("progress_timeout_s", 600.0), ("drain_timeout_s", 120.0)):
        assert parameters[name].default == seconds
        made = OwnerConfig("null", {}, (SourceConfig("replay", {}),), 8)
        assert getattr(made, name) == seconds
    limits = Limits(num_lanes=1, context=8)
    assert (limits.progress_timeout_ns, limits.drain_timeout_ns) == (600 * 10**9, 120 * 10**9)


ROUTER = """
import os, sys, signal
import msgspec
from headrace.runtime.config import OwnerConfig
from headrace.runtime.requests import RequestOptions
from headrace.runtime.router import OwnerClient

client = OwnerClient(msgspec.json.decode(sys.argv[1], type=OwnerConfig))
client.start()
client.submit(list(range(20)), RequestOptions(route="streamed", max_tokens=1))
print(client.pid, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_router_takes_all_along(tmp_path: Path, number: signal.Signals) -> None:
    gate = Gate(tmp_path / "gate")
    text = msgspec.json.encode(config(gate)).decode()
    with subprocess.Popen(
        [sys.executable, "-c", ROUTER, text], stdout=subprocess.PIPE, text=True
    ) as router:
        assert router.stdout is not None
        owner = int(router.stdout.readline())
        (source,) = children_of(owner)
        pidfds = [os.pidfd_open(pid) for pid in (owner, source)]
        router.send_signal(number)
        for pidfd in pidfds:
            assert dead(pidfd)
            os.close(pidfd)
    gate.open()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"source": "nowhere"}, "unknown source 'nowhere'"),
        ({"decoder": "nowhere"}, "unknown decoder 'nowhere'"),
        ({"source": "headrace.nothing:open"}, "cannot import it"),
        ({"source": "headrace.ids:open"}, "has no factory 'open'"),
        ({"source": "replay", "options": {"lairs": 3}}, "unknown field `lairs`"),
        ({"python": "/nowhere/python"}, "interpreter '/nowhere/python' is missing"),
        ({"num_slots": 0}, "slots is 0"),
        ({"decoder_options": {"lanes": 1}}, "missing required field `context`"),
        ({"context": 1 << 40}, "context"),
    ],
)
def test_a_mistake_in_the_config_is_one_sentence(
    tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    gate = Gate(tmp_path / "gate")
    gate.open()
    changes = {"source": "replay", "options": dict(GEOMETRY)} | changes
    client = OwnerClient(config(gate, **changes))
    begun_s = time.monotonic()
    try:
        with pytest.raises(Refused) as caught:
            client.start()
    finally:
        client.close()
    assert not caught.value.shortage
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - begun_s < 5.0


@pytest.mark.parametrize("engine", ["open_short", "open_out_of_memory"])
def test_what_is_short_just_now_is_refused_and_told_from_a_mistake(
    tmp_path: Path, engine: str
) -> None:
    """From a source by its owner to who started that."""
    gate = Gate(tmp_path / "gate")
    gate.open()
    client = OwnerClient(config(gate, source=f"tests.unit.runtime.engines:{engine}"))
    try:
        with pytest.raises(Refused) as caught:
            client.start()
    finally:
        client.close()
    assert caught.value.shortage


@pytest.mark.parametrize("shortage", [False, True])
def test_a_refusal_about_one_of_several_sources_stays_what_it_is(shortage: bool) -> None:
    handles = [SourceHandle("replay", {}, name=name) for name in ("a", "b")]
    with pytest.raises(Refused) as caught, _named(handles[1], handles):
        raise Refused("cannot run python", field="interpreter", shortage=shortage)
    assert str(caught.value) == "source b: cannot run python"
    assert (caught.value.field, caught.value.shortage) == ("interpreter", shortage)


def test_a_source_that_dies_while_loading(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    gate.open()
    client = OwnerClient(config(gate, source="tests.faults.engines:open_dying"))
    try:
        with pytest.raises(OwnerFailed, match="died: exit status 9 while starting"):
            client.start()
    finally:
        client.close()
