"""Sources that break the protocol: the attempt fails, the source and all others live on."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.errors import Refused
from headrace.ids import AttemptId
from headrace.messages import FromSource, Released
from headrace.runtime.source_main import UNQUIET_STATUS
from headrace.runtime.supervisor import RestartPolicy
from headrace.runtime.worker import MESSAGES_PER_ATTEMPT
from tests.faults.engines import BEHAVIOURS, TOKEN_OF
from tests.faults.lab import CONTEXT, GEOMETRY, LAYERS, Lab, prompt

ROGUE = "tests.faults.engines:open_rogue"
OPTIONS = {**GEOMETRY, "vocab_size": 2000}
HARMLESS = ("stale", "handshake again")
FATAL = ("exits", "aborts", "hangs up", "dies after the final")
OTHERS = (
    *("after the final", "nan", "late write", "deaf", "floods", "wild clock", "a case"),
    *("runs on", "stays unquiet"),
)
HARMFUL = [name for name in BEHAVIOURS if name not in (*HARMLESS, *FATAL, *OTHERS)]

REASONS = {
    "cell twice": "told before",
    "layer outside": r"outside the model's layers",
    "position outside": r"outside the prompt's positions",
    "stray slot": "is not its lease",
    "old generation": "is not its lease",
    "digests amiss": "1 spans, 2 digests",
    "final without cells": "was never told",
    "a token instead": "a final of token 3, the source's manifest has logits",
    "no final": "the engine returned without its final",
    "garbage": "undecodable message",
    "descriptors": "a source sends no descriptors",
    "writes told cells": "would write .*told before",
    "commits twice": "the engine returned without its final",
    "raises": "ValueError: layer 2 went up in smoke",
}


def bad(name: str) -> list[int]:
    return [TOKEN_OF[name], *prompt(1)[1:]]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One source that outlives all misbehaviour but its own death."""
    with Lab(tmp_path_factory.mktemp("rogue"), lanes=3, engine=ROGUE, options=OPTIONS) as lab:
        yield lab


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Lab]:
    with Lab(tmp_path, lanes=3, engine=ROGUE, options=OPTIONS, progress_timeout_s=0.5) as lab:
        yield lab


@pytest.mark.parametrize("name", HARMFUL)
def test_only_its_attempt_fails(shared: Lab, name: str) -> None:
    lab, pid = shared, shared.handle.pid
    lab.fill_canaries()
    neighbour = lab.submit(prompt(2), hold=True)
    broken = lab.submit(bad(name))
    after = lab.submit(prompt(3), hold=True)
    lab.until_done(neighbour, broken, after)
    assert broken.outcome == "failed"
    assert broken.reason
    if name in REASONS:
        assert re.search(REASONS[name], broken.reason), broken.reason
    for request, seed in ((neighbour, 2), (after, 3)):
        lab.assert_exact(request, prompt(seed))
        assert request.entry is not None
        lab.assert_rest_of_lane(request.entry.lane)
        lab.owner.release(request)
    lab.settle()
    assert lab.handle.pid == pid
    assert not lab.handle.died()


@pytest.mark.parametrize("name", HARMLESS)
def test_strays_are_dropped_and_counted(shared: Lab, name: str) -> None:
    before = sum(shared.counts("dropped").values())
    request = shared.submit(bad(name), hold=True)
    shared.until_done(request)
    assert request.outcome == "finished", request.reason
    shared.assert_exact(request, bad(name))
    shared.owner.release(request)
    shared.settle()
    assert sum(shared.counts("dropped").values()) - before >= 3
    shared.serve_exact(4)


def test_what_comes_after_publishing_changes_nothing(own: Lab) -> None:
    request = own.submit(bad("after the final"), hold=True)
    own.until_done(request)
    own.gate.allow(1)
    own.until_count("dropped", "late", 3)
    assert request.outcome == "finished"
    own.assert_exact(request, bad("after the final"))
    own.owner.release(request)
    own.settle()
    own.serve_exact(4)


@pytest.mark.parametrize("name", FATAL)
def test_a_source_that_ends_itself(own: Lab, name: str) -> None:
    """Its request ends at once, long before the progress deadline could tell."""
    begun_s = time.monotonic()
    request = own.submit(bad(name), hold=True)
    own.until_done(request)
    own.until(own.handle.died, "the source is gone")
    if name == "dies after the final":
        assert request.outcome == "finished"
        own.assert_exact(request, bad(name))
        own.owner.release(request)
    else:
        assert request.outcome == "failed"
        assert "died" in request.reason
    assert time.monotonic() - begun_s < 2.0
    own.settle()
    own.attach()
    own.serve_exact(5)


def test_an_engine_that_gives_its_lease_back_and_runs_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The next grant ends its source, long before any deadline: that proves the slots quiet."""
    with Lab(tmp_path, lanes=3, engine=ROGUE, options=OPTIONS) as lab:
        capfd.readouterr()
        begun_s = time.monotonic()
        broken = lab.submit(bad("runs on"))
        lab.until_done(broken)
        assert (broken.outcome, broken.cause) == ("failed", "source-failed")
        assert not lab.handle.died()
        following = lab.submit(prompt(2))
        lab.until_done(following)
        assert (following.outcome, following.cause) == ("failed", "source-died")
        assert f"exit status {UNQUIET_STATUS}" in following.reason
        assert time.monotonic() - begun_s < 2.0
        (line,) = capfd.readouterr().err.splitlines()
        granted, running = (AttemptId(*r.request, 1) for r in (following, broken))
        assert f"attempt {granted} was granted while the engine of attempt {running}" in line
        lab.settle()
        lab.attach()
        lab.serve_exact(5)


def test_an_engine_whose_device_may_write_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its request hears why; its slot is given back by its source's end, and by nothing else."""
    with Lab(tmp_path, lanes=3, engine=ROGUE, options=OPTIONS) as lab:
        capfd.readouterr()
        broken = lab.submit(bad("stays unquiet"))
        lab.until_done(broken)
        assert (broken.outcome, broken.cause) == ("failed", "source-failed")
        assert broken.reason.startswith("Unquiet: copies into it may be in flight")
        lab.until(lab.handle.died, "the source is gone")
        assert f"exit status {UNQUIET_STATUS}" in lab.handle.exit_text()
        (line,) = capfd.readouterr().err.splitlines()
        assert f"the slot of attempt {AttemptId(*broken.request, 1)} is not given back" in line
        lab.settle()
        lab.attach()
        lab.serve_exact(5)


def test_who_follows_one_that_runs_on_is_served_by_the_next_source(tmp_path: Path) -> None:
    """All who may be tried again; they came before the lease was given back."""
    policy = RestartPolicy(first_delay_s=0.01)
    with Lab(tmp_path, lanes=2, engine=ROGUE, options=OPTIONS, restart=policy) as lab:
        broken = lab.submit(bad("runs on"))
        following = {
            seed: lab.submit(prompt(seed), hold=True, on_failure="retry") for seed in (2, 3)
        }
        lab.until_done(broken)
        assert broken.cause == "source-failed"
        for seed, request in following.items():
            lab.until_done(request)
            lab.assert_exact(request, prompt(seed))
            lab.owner.release(request)
        assert [len(r.attempts) for r in following.values()] == [1, 0]
        assert f"exit status {UNQUIET_STATUS}" in following[2].attempts[0]
        assert lab.counts("restarts")["restarted"] == 1
        lab.settle()


def test_messages_before_the_death_still_count(own: Lab) -> None:
    """All was told before the death, and the owner only reads it afterwards."""
    request = own.submit(bad("dies after the final"), hold=True)
    assert own.handle.wait(10.0)
    own.until_done(request)
    assert request.outcome == "finished"
    own.assert_exact(request, bad("dies after the final"))
    own.owner.release(request)
    own.settle()


def test_a_row_of_nan_chooses_nothing(shared: Lab) -> None:
    request = shared.submit(bad("nan"), max_tokens=4)
    shared.until_done(request)
    assert (request.outcome, request.tokens) == ("failed", [])
    assert "NaN" in request.reason
    shared.settle()
    shared.serve_exact(6)


def test_a_digest_finds_what_was_written_late(shared: Lab) -> None:
    """Without one nobody can tell, which is why the option exists."""
    request = shared.submit(bad("late write"), digest=True)
    shared.until_done(request)
    assert request.outcome == "failed"
    assert request.reason.startswith("digest of layers [0, 1) x positions [0, 40)")
    shared.settle()
    shared.serve_exact(7, digest=True)


def test_a_span_without_the_digest_that_was_asked_for(shared: Lab) -> None:
    request = shared.submit(bad("cell twice"), digest=True)
    shared.until_done(request)
    assert "1 spans, 0 digests" in request.reason
    shared.settle()


def test_late_messages_of_a_deaf_source_are_dropped(shared: Lab) -> None:
    """It never hears the cancel; what it tells of the old lease touches nobody."""
    lab = shared
    dropped = lab.counts("dropped").get("late", 0)
    lab.fill_canaries()
    request = lab.submit(bad("deaf"))
    lab.owner.cancel(request)
    assert request.outcome == "cancelled"
    after = lab.submit(prompt(8), hold=True)
    lab.until_done(after)
    lab.assert_exact(after, prompt(8))
    assert after.entry is not None
    lanes = [lane for lane in range(3) if lane != after.entry.lane]
    lab.assert_canaries(slots=[], lanes=lanes)
    lab.owner.release(after)
    lab.settle()
    assert lab.counts("dropped")["late"] - dropped == LAYERS + 1  # its groups and its final


def test_a_flood_does_not_hold_a_turn(shared: Lab) -> None:
    """In one turn no more is taken than one attempt may have queued, however much there is."""
    lab, pid = shared, shared.handle.pid
    request = lab.submit(bad("floods"))
    before = sum(lab.counts("dropped").values())
    lab.until(lambda: sum(lab.counts("dropped").values()) > before + 5000, "it floods")
    taken = 0
    receive = lab.handle.receive

    def counted() -> FromSource:
        nonlocal taken
        message = receive()
        taken += 1
        return message

    lab.handle.receive = counted  # type: ignore[method-assign]
    for _ in range(50):
        taken = 0
        begun_s = time.monotonic()
        lab.owner.turn(0.0)
        assert taken <= MESSAGES_PER_ATTEMPT
        assert time.monotonic() - begun_s < 1.0
    del lab.handle.receive
    assert not request.done
    lab.owner.cancel(request)
    lab.settle()
    assert lab.handle.pid == pid
    lab.serve_exact(6)


def test_an_endless_source_is_taken_in_by_parts(
    shared: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source,) = shared.owner._handles
    told = 0

    def tell() -> FromSource:
        nonlocal told
        told += 1
        return Released(AttemptId(1, 2, 3), 0, 0)

    monkeypatch.setattr(shared.handle, "receive", tell)
    shared.owner._sources._receive(source)
    assert told == MESSAGES_PER_ATTEMPT


def test_options_that_no_source_could_read(shared: Lab) -> None:
    """They are refused here, since a source that cannot read its grant would end."""
    wrong: list[tuple[str, object]] = [
        ("route", "sideways"),
        ("emission", "by luck"),
        ("chunk", 1.5),
        ("chunk", 2**64),
        ("chunk", -1),
        ("prefill_chunk", True),
        ("group_layers", 0),
        ("deadline_s", float("nan")),
        ("deadline_s", float("inf")),
    ]
    for name, value in wrong:
        with pytest.raises(Refused, match=name.split("_")[0]) as caught:
            shared.submit(prompt(1), **{name: value})
        assert caught.value.field == name
    with pytest.raises(Refused, match=r"outside \[0, 2000\)"):
        shared.submit([2000])
    with pytest.raises(Refused, match="prompt is empty"):
        shared.submit([])
    with pytest.raises(Refused, match=f"65 prompt tokens .* and it is {CONTEXT}"):
        shared.submit([1] * (CONTEXT + 1))
    shared.settle()
    shared.serve_exact(9)
