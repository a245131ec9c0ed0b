"""A router that does not read loses nothing, and its owner neither spins nor piles up."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.channel import Channel, socket_pair
from headrace.errors import WouldBlock
from headrace.memory import memfd_with
from headrace.messages import (
    Ended,
    FromOwner,
    Inspect,
    Inspected,
    Shutdown,
    Submit,
    Token,
    ToOwner,
    Up,
    decode_from_owner,
    decode_to_owner,
    encode,
)
from headrace.runtime.owner_link import submit_of
from headrace.runtime.owner_main import CLOGGED_TURN_S, OwnerProcess
from headrace.runtime.requests import RequestOptions
from tests.faults.lab import NUM_TOKENS, Lab, prompt

LANES = 4
MAX_TOKENS = 20
SUBMIT = submit_of(0, NUM_TOKENS, RequestOptions(route="streamed", max_tokens=MAX_TOKENS))


class Router:
    """The other end of an owner process that runs in this one, and is served turn by turn.

    `after_turn` is called after each; while `clogged`, the owner's end has no room.
    """

    def __init__(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        near, far = socket_pair(200, 256)
        ours: Channel[FromOwner, ToOwner] = Channel(near, encode, decode_to_owner)
        self.far: Channel[ToOwner, FromOwner] = Channel(far, encode, decode_from_owner)
        self.near = ours
        self.process = OwnerProcess(ours, lab.owner, lab.handles)
        self.lab = lab
        self.clogged = False
        self.timeouts: list[float] = []
        self.heard: list[FromOwner] = []
        self.after_turn: Callable[[], None] = lambda: None
        send, turn = ours.send, lab.owner.turn

        def send_if_room(message: FromOwner, *rest: Any) -> None:
            if self.clogged:
                raise WouldBlock("no room")
            send(message, *rest)

        def turn_and_tell(timeout_s: float = 0.0) -> None:
            self.timeouts.append(timeout_s)
            turn(min(timeout_s, 0.05))
            self.after_turn()

        monkeypatch.setattr(ours, "send", send_if_room)
        monkeypatch.setattr(lab.owner, "turn", turn_and_tell)

    def submit(self, submit: Submit, tokens: list[int]) -> None:
        fd = memfd_with(memoryview(array("I", tokens)), "prompt")
        self.far.send(submit, [fd])
        os.close(fd)

    def read(self) -> None:
        """Take all that there is."""
        while True:
            try:
                self.heard.append(self.far.receive()[0])
            except WouldBlock:
                return

    def tokens(self, label: int) -> list[Token]:
        return [each for each in self.heard if isinstance(each, Token) and each.label == label]

    def ended(self) -> list[int]:
        return [each.label for each in self.heard if isinstance(each, Ended)]

    def serve(self) -> None:
        self.process.serve(self.lab.decoder)


@pytest.fixture
def router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Router]:
    with Lab(tmp_path, lanes=LANES, slots=LANES) as lab:
        lab.gate.open()
        made = Router(lab, monkeypatch)
        with made.near, made.far:
            yield made


def test_a_router_that_stops_reading_loses_no_token(router: Router) -> None:
    """Four requests decode to their ends meanwhile, and what is held is asked for in vain."""
    process, owner = router.process, router.lab.owner
    outboxes: list[int] = []
    num_asked, num_idle = 50, 5

    def script() -> None:
        router.read()
        if not router.clogged and not router.heard[1:]:
            router.clogged = True
            for label in range(LANES):
                router.submit(replace(SUBMIT, label=label), prompt(label))
            for _ in range(num_asked):
                router.far.send(Inspect())
        elif router.clogged:
            outboxes.append(len(process._outbox))
            running = [told.request for told in process._running.values()]
            if owner.idle and len(running) == LANES and all(each.done for each in running):
                router.clogged = router.timeouts[-num_idle:] != [CLOGGED_TURN_S] * num_idle
        elif (
            len(router.ended()) == LANES
            and sum(isinstance(each, Inspected) for each in router.heard) == num_asked
        ):
            router.far.send(Shutdown())

    router.after_turn = script
    router.serve()
    assert isinstance(router.heard[0], Up)
    assert max(outboxes) <= LANES
    assert sorted(router.ended()) == list(range(LANES))
    for label in range(LANES):
        tokens = [each.token for each in router.tokens(label)]
        vocab_size = router.lab.decoder.manifest().vocab_size
        assert tokens == [(tokens[0] + at) % vocab_size for at in range(MAX_TOKENS)]
        last = max(at for at, each in enumerate(router.heard) if each in router.tokens(label))
        end = next(
            at
            for at, each in enumerate(router.heard)
            if isinstance(each, Ended) and each.label == label
        )
        assert last < end
    assert router.timeouts[-1] == 60.0  # with nothing to say it waits to be asked


@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_a_token_is_told_with_its_logprobs(router: Router, logprobs: int | None) -> None:
    def script() -> None:
        router.read()
        if len(router.timeouts) == 1:
            for label, asked in ((0, logprobs), (1, None)):
                router.submit(replace(SUBMIT, label=label, logprobs=asked), prompt(1))
        elif len(router.ended()) == 2:
            router.far.send(Shutdown())

    router.after_turn = script
    router.serve()
    told, plain = router.tokens(0), router.tokens(1)
    assert [each.token for each in told] == [each.token for each in plain]
    assert all((each.logprob, each.top) == (None, ()) for each in plain)
    assert len(told) == MAX_TOKENS
    vocab_size = router.lab.decoder.manifest().vocab_size
    sure = 1 - math.log(math.e + vocab_size - 1)  # of a row with one 1 among zeros
    for at, each in enumerate(told):
        if logprobs is None:
            assert (each.logprob, each.top) == (None, ())
            continue
        assert each.logprob is not None
        assert len(each.top) == logprobs
        assert each.top[:1] in ((), ((each.token, each.logprob),))
        if at:  # the first one's row is the source's
            assert each.logprob == pytest.approx(sure)
