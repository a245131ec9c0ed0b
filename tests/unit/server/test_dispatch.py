"""From the queue to the decoders: who is next, where, and what is too late."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("starlette")

from headrace.messages import Measured
from headrace.runtime.requests import RequestOptions
from headrace.server import events
from headrace.server.choices import Choice
from headrace.server.config import QueueConfig
from headrace.server.dispatch import Asked
from headrace.server.queue import CHOICE_NBYTES
from headrace.server.terminals import Ending, Terminal
from tests.server_stand import MODEL, Stand, ended, reused, run


def ask(
    stand: Stand,
    *,
    lengths: Sequence[int] = (5,),
    client: str = "me",
    model: str = MODEL,
    deadline_s: float | None = None,
) -> list[Choice]:
    """Admit a request whose prompts have these lengths."""
    prompts = [array("I", [1] * length) for length in lengths]
    options = [RequestOptions(max_tokens=4) for _ in lengths]
    deadline_ns = None if deadline_s is None else time.monotonic_ns() + int(deadline_s * 1e9)
    asked = Asked(1, client, model, prompts, options, deadline_ns)
    return stand.dispatcher.admit(asked, asyncio.Event())


def refused(stand: Stand, **more: Any) -> Ending:
    with pytest.raises(Ending) as told:
        ask(stand, **more)
    return told.value


def test_choices_go_to_the_decoder_with_the_least_load() -> None:
    async def test() -> None:
        stand = Stand(num_decoders=2, lanes=2)
        ask(stand, lengths=[5] * 2)
        assert not stand.decoder.taken  # in the next turn of the loop
        await stand.quiet()
        assert [len(each.running) for each in stand.decoders] == [1, 1]
        ask(stand, lengths=[5] * 3)
        await stand.quiet()
        assert [len(each.running) for each in stand.decoders] == [2, 2]
        assert stand.dispatcher.num_waiting == 1
        first, second = stand.decoders
        second.end(second.running[0])
        await stand.quiet()
        assert (len(second.taken), stand.dispatcher.num_waiting) == (3, 0)
        assert first.taken[0].index == 0

    run(test)


def test_a_decoder_gets_only_its_own_models() -> None:
    async def test() -> None:
        stand = Stand(num_decoders=2)
        stand.decoders[1].settings.models = ("other",)
        ask(stand, lengths=[5] * 3)
        ask(stand, model="other")
        await stand.quiet()
        assert [len(each.taken) for each in stand.decoders] == [2, 1]

    run(test)


def test_all_choices_of_a_request_are_admitted_or_none() -> None:
    async def test() -> None:
        stand = Stand(queue=QueueConfig(max_requests=3, max_bytes=1024 * 8))
        stand.decoder.state = "starting"
        ask(stand, lengths=[5, 5])
        full = refused(stand, lengths=[5, 5])
        assert full.terminal is Terminal.QUEUE_FULL
        assert full.retry_after_s
        assert stand.dispatcher.num_waiting == stand.queue.statistics()["waiting"] == 2
        assert refused(stand, lengths=[5] * 4).terminal is Terminal.TOO_LARGE
        assert refused(stand, lengths=[4096]).terminal is Terminal.TOO_LARGE
        assert stand.queue.statistics()["nbytes"] == 2 * (CHOICE_NBYTES + 4 * 5)

    run(test)


def test_what_waits_is_told_when_it_changes() -> None:
    async def test() -> None:
        stand = Stand(lanes=1)
        first, second = ask(stand, lengths=[5, 5])
        await stand.quiet()
        stand.decoder.end(first)
        await stand.quiet()
        stand.dispatcher.look_soon()
        await stand.quiet()
        told = [(each.waiting, each.nbytes) for each in stand.of(events.QueueChanged)]
        assert told == [(1, CHOICE_NBYTES + 20), (0, 0)]
        assert stand.decoder.running == [second]

    run(test)


def test_a_deadline_in_the_queue_is_noticed_without_any_other_event() -> None:
    async def test() -> None:
        stand = Stand()
        stand.decoder.state = "starting"
        (late,) = ask(stand, deadline_s=0.01)
        (later,) = ask(stand, deadline_s=60.0)
        await asyncio.wait_for(late._news.wait(), 5)
        assert late.failure is not None
        assert late.failure.terminal is Terminal.DEADLINE
        assert not later.over
        late.drop()
        later.drop()
        await stand.quiet()
        assert stand.dispatcher.num_waiting == 0
        assert stand.dispatcher._timer is None

    run(test)


def test_an_owner_is_told_what_is_left_of_a_deadline() -> None:
    async def test() -> None:
        stand = Stand()
        (with_one,) = ask(stand, deadline_s=60.0)
        (without,) = ask(stand)
        await stand.quiet()
        assert with_one.options.deadline_s is not None
        assert 59.0 < with_one.options.deadline_s <= 60.0
        assert without.options.deadline_s is None

    run(test)


def test_what_is_withdrawn_while_it_waits_leaves_room_for_others() -> None:
    async def test() -> None:
        stand = Stand(queue=QueueConfig(max_requests=1))
        stand.decoder.state = "starting"
        (first,) = ask(stand)
        first.drop()
        first.drop()
        assert first.failure is not None
        assert first.failure.terminal is Terminal.CLIENT_LEFT
        (second,) = ask(stand)
        assert stand.dispatcher.num_waiting == 1
        second.drop()
        await stand.nothing_left()

    run(test)


def test_the_time_of_a_prefill_is_learnt_from_what_was_computed_in_full() -> None:
    async def test() -> None:
        stand = Stand()
        facts = dict.fromkeys(Measured.__struct_fields__, 0)
        facts |= {"prefill_begun_ns": 1_000_000_000, "source_final_ns": 2_000_000_000}
        for how, learnt in (
            (ended("failed", cause="stalled"), 0.0),
            (ended(measured=Measured(**facts), reuse=reused(3)), 0.0),
            (ended(measured=Measured(**facts)), 0.2),
        ):
            (choice,) = ask(stand)
            await stand.quiet()
            stand.decoder.end(choice, how)
            assert stand.queue.seconds_per_token == pytest.approx(learnt)

    run(test)


def test_a_client_is_charged_for_what_its_choices_came_to() -> None:
    """Whoever decoded less has its next turn sooner."""

    async def test() -> None:
        stand = Stand(lanes=2)
        long, _ = ask(stand, client="long", lengths=[5, 5])
        short, _ = ask(stand, client="short", lengths=[5, 5])
        await stand.quiet()
        assert stand.decoder.running == [long, short]
        stand.decoder.state = "starting"  # nothing is taken for now
        stand.decoder.say(long, "aaaa")
        stand.decoder.end(long)
        stand.decoder.end(short)
        await stand.quiet()
        stand.decoder.state = "ready"
        stand.dispatcher.look_soon()
        await stand.quiet()
        assert [each.job.client for each in stand.decoder.taken[2:]] == ["short", "long"]

    run(test)


def test_no_decoder_for_a_model_is_said_with_the_reasons() -> None:
    async def test() -> None:
        stand = Stand(num_decoders=2)
        for each in stand.decoders:
            each.state, each.reason = "set aside", f"{each.name} is broken"
        told = refused(stand)
        assert told.terminal is Terminal.NOT_READY
        assert "d0 is broken" in told.text
        assert "d1 is broken" in told.text
        stand.decoders[1].state = "waiting"
        (choice,) = ask(stand)  # it may come back
        await stand.quiet()
        assert not choice.over
        choice.drop()

    run(test)


def test_after_a_close_nothing_waits_and_nothing_is_taken() -> None:
    async def test() -> None:
        stand = Stand()
        stand.decoder.state = "starting"
        choices = ask(stand, lengths=[5, 5], deadline_s=60.0)
        await stand.quiet()
        stand.dispatcher.close()
        stand.dispatcher.close()
        for choice in choices:
            assert choice.failure is not None
            assert choice.failure.terminal is Terminal.SHUTTING_DOWN
        assert refused(stand).terminal is Terminal.SHUTTING_DOWN
        await stand.nothing_left()

    run(test)


def test_a_drain_goes_on_with_what_waits_although_another_decoder_is_set_aside() -> None:
    async def test() -> None:
        stand = Stand(num_decoders=2, lanes=1)
        good, aside = stand.decoders
        aside.settings.models = ("other",)
        aside.state = "set aside"
        choices = ask(stand, lengths=[5] * 3)
        await stand.quiet()
        stand.dispatcher.draining = True
        stand.dispatcher.look_soon()
        await stand.quiet()
        assert [each.failure for each in choices] == [None] * 3
        for _ in choices:
            good.end(good.running[0])
            await stand.quiet()
        assert all(each.over and each.failure is None for each in choices)

    run(test)
