"""The scheduler half: what is answered to vLLM, and what the worker is told, in every state."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from headrace.runtime.config import SourceConfig
from headrace.vllm.scheduling import Load, Orders, Prompt, Scheduling, Told
from headrace.vllm.settings import Settings

BLOCK = 4
PROMPT = tuple(range(1, 18))  # four blocks and a token
ASKED = {"do_remote_prefill": True}
BLOCKS = ((5, 6, 7, 8, 9), (1, 2, 3, 4, 10))


def scheduling(**settings: Any) -> Scheduling:
    """Its sources can begin anywhere."""
    halves = Scheduling(Settings(sources=(SourceConfig("replay"),), **settings), BLOCK)
    halves.hear(Told(64, starts_anywhere=True, num_slots=2))
    return halves


def prompt(request_id: str = "a", tokens: tuple[int, ...] | None = PROMPT, **given: Any) -> Prompt:
    params, plain = given.pop("params", ASKED), given.pop("plain", True)
    return Prompt(request_id, tokens, params, plain, **given)


def idle(halves: Scheduling) -> bool:
    """Whether nothing is remembered of any request."""
    remembered = ("_pending", "_begun", "_aborted", "_dropped", "_left", "_over")
    return not any(getattr(halves, name) for name in remembered)


def begun(halves: Scheduling, *request_ids: str) -> None:
    """Have these loaded by the worker."""
    for request_id in request_ids:
        each = prompt(request_id)
        halves.allocated(each, BLOCKS, halves.matched(each, 0) or 0)
    assert [load.request_id for load in halves.step().loads] == list(request_ids)


# What is matched.


@pytest.mark.parametrize(
    ("count", "end"), [(0, 0), (1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (16, 12), (17, 16)]
)
def test_a_load_ends_with_the_last_block_that_leaves_a_token(count: int, end: int) -> None:
    halves = scheduling()
    assert halves.matched(prompt(tokens=PROMPT[:count]), 0) == end
    assert halves.take_local() == ({} if end else {"short": 1})


def test_what_vllm_has_is_not_loaded_where_sources_start_anywhere() -> None:
    halves = scheduling()
    halves.hear(Told(64, starts_anywhere=True, num_slots=2))
    assert halves.matched(prompt(), 8) == 8
    assert halves.matched(prompt(), 12) == 4
    assert halves.matched(prompt(), 16) == 0
    assert halves.take_local() == {"short": 1}


def test_vllm_asks_again_until_the_worker_has_told_of_its_sources() -> None:
    halves = Scheduling(Settings(sources=(SourceConfig("replay"),)), BLOCK)
    assert halves.matched(prompt(), 0) is None
    assert halves.matched(prompt("b", PROMPT[:3]), 0) == 0
    halves.hear(Told(64, starts_anywhere=True, num_slots=2))
    assert halves.matched(prompt(), 0) == 16


def test_vllm_asks_again_while_all_slots_are_taken() -> None:
    """Two of the one source: a further load would hold blocks and only wait."""
    halves = scheduling()
    begun(halves, "a", "b")
    assert halves.matched(prompt("c"), 0) is None
    assert halves.matched(prompt("d", PROMPT[:3]), 0) == 0
    halves.reported(["a"])
    assert halves.matched(prompt("c"), 0) == 16


def test_a_prefix_that_no_source_goes_on_from() -> None:
    halves = scheduling()
    halves.hear(Told(64, starts_anywhere=False, num_slots=2))
    assert halves.matched(prompt(), 0) == 16
    assert halves.matched(prompt(), 4) == 0
    assert halves.take_local() == {"prefix": 1}


def test_prompts_that_are_too_long_too_short_or_no_text() -> None:
    halves = scheduling(min_tokens=10)
    halves.hear(Told(16, starts_anywhere=True, num_slots=2))
    assert halves.matched(prompt("fits"), 0) == 16
    assert halves.matched(prompt("long", tuple(range(21))), 0) == 0
    assert halves.matched(prompt("short", PROMPT[:9]), 0) == 0
    assert halves.matched(prompt("least", PROMPT[:10]), 0) == 8
    assert halves.matched(prompt("embedded", None), 0) == 0
    assert halves.matched(prompt("image", plain=False), 0) == 0
    assert halves.take_local() == {"long": 1, "short": 1, "not-text": 2}
    assert halves.take_local() == {}


def test_an_owner_that_ended_is_asked_for_nothing() -> None:
    halves = scheduling()
    halves.hear(Told(64, starts_anywhere=True, num_slots=2))
    assert halves.matched(prompt(), 0) == 16
    halves.hear(Told(0, starts_anywhere=False, in_service=False))
    assert halves.matched(prompt(), 0) == 0
    assert halves.take_local() == {"out-of-service": 1}


def test_who_asks_for_a_load() -> None:
    asked, always = scheduling(), scheduling(load="always")
    for params in (None, {}, {"do_remote_prefill": False}):
        assert asked.matched(prompt(params=params), 0) == 0
    for params in (None, {}, {"do_remote_prefill": True}):
        assert always.matched(prompt(params=params), 0) == 16
    assert always.matched(prompt(params={"do_remote_prefill": False}), 0) == 0
    assert asked.take_local() == always.take_local() == {}


def test_mistaken_parameters_are_told_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    halves = scheduling()
    with caplog.at_level(logging.WARNING, "headrace.vllm"):
        for name, params in (
            ("a", {"do_remote_prefill": "yes"}),
            ("b", {**ASKED, "headrace_route": "swift"}),
        ):
            assert halves.matched(prompt(name, params=params), 0) == 0
    assert halves.take_local() == {"mistaken": 2}
    assert ["'yes'" in text for text in caplog.messages] == [True, False]
    assert "it is one of whole, chunked, streamed, auto" in caplog.messages[1]


def test_a_prompt_is_counted_once_however_often_vllm_asks() -> None:
    halves = scheduling()
    for _ in range(3):
        assert halves.matched(prompt(tokens=PROMPT[:3]), 0) == 0
    assert halves.take_local() == {"short": 1}
    halves.finished("a")
    halves.matched(prompt(tokens=PROMPT[:3]), 0)
    assert halves.take_local() == {"short": 1}


def test_asking_changes_nothing() -> None:
    halves = scheduling()
    assert [halves.matched(prompt(), 0) for _ in range(3)] == [16] * 3
    assert halves.step() == Orders()
    halves.finished("a")
    assert idle(halves)


# What the worker is told.


def test_a_load_is_told_once_with_all_that_the_worker_needs() -> None:
    halves = scheduling(route="streamed")
    halves.hear(Told(64, starts_anywhere=True, num_slots=2))
    assert halves.matched(prompt(), 8) == 8
    halves.allocated(prompt(), BLOCKS, 8)
    own = prompt("b", params={**ASKED, "headrace_route": "auto"})
    assert halves.matched(own, 0) == 16
    halves.allocated(own, BLOCKS, 16)
    assert halves.loading == 2
    assert halves.step() == Orders(
        loads=(
            Load("a", PROMPT[:16], 8, BLOCKS, "streamed"),
            Load("b", PROMPT[:16], 0, BLOCKS, "auto"),
        )
    )
    assert halves.loading == 2
    assert halves.step() == Orders()


def test_blocks_without_a_load() -> None:
    """vLLM tells of these too: of what it computes itself, and again once a load is over."""
    halves = scheduling()
    halves.allocated(prompt(), BLOCKS, 0)
    halves.allocated(prompt(tokens=None), BLOCKS, 4)
    assert halves.step() == Orders()
    assert halves.loading == 0


def test_what_was_reported_is_not_loaded_again() -> None:
    halves = scheduling()
    begun(halves, "a", "b")
    halves.reported(["a"])
    assert halves.loading == 1
    assert halves.matched(prompt(), 0) == 0, "preempted, or to be computed after a failure"
    assert halves.take_local() == {}
    halves.finished("a")
    assert halves.step() == Orders()
    assert halves.matched(prompt(), 0) == 16, "another request of that name"


def test_an_abort_before_the_load_was_told() -> None:
    halves = scheduling()
    halves.allocated(prompt(), BLOCKS, halves.matched(prompt(), 0) or 0)
    halves.finished("a")
    assert halves.loading == 1, "vLLM waits for its report"
    assert halves.step() == Orders(dropped=("a",))
    halves.reported(["a"])
    assert idle(halves)


def test_an_abort_of_a_load_that_was_told() -> None:
    halves = scheduling()
    begun(halves, "a")
    halves.finished("a")
    assert halves.step() == Orders(aborted=("a",))
    assert halves.loading == 1
    halves.reported(["a"])
    assert idle(halves)


def test_an_abort_in_the_step_of_the_report() -> None:
    """The worker reported it, and vLLM finishes it before it tells us of that."""
    halves = scheduling()
    begun(halves, "a")
    halves.finished("a")
    halves.reported(["a"])
    assert halves.loading == 0
    assert halves.step() == Orders()
    assert idle(halves)


def test_a_report_of_what_is_not_loaded() -> None:
    halves = scheduling()
    halves.reported(["a"])
    assert idle(halves)


def test_a_request_that_was_never_loaded() -> None:
    halves = scheduling()
    halves.finished("a")
    assert halves.step() == Orders()
    assert idle(halves)


def test_what_waits_for_a_slot_is_bounded_in_time_and_number() -> None:
    now_ns = 0
    halves = Scheduling(
        Settings(sources=(SourceConfig("replay"),), deadline_s=10.0, max_waiting=1),
        BLOCK,
        clock_ns=lambda: now_ns,
    )
    halves.hear(Told(64, starts_anywhere=True, num_slots=1))
    halves.allocated(prompt("a"), BLOCKS, halves.matched(prompt("a"), 0) or 0)
    assert halves.matched(prompt("b"), 0) is None
    assert halves.matched(prompt("c"), 0) == 0, "one waits already"
    now_ns = 10_000_000_000
    assert halves.matched(prompt("b"), 0) is None
    now_ns += 1
    assert halves.matched(prompt("b"), 0) == 0
    assert halves.take_local() == {"busy": 2}
    assert halves.matched(prompt("d"), 0) is None, "the place of the one that left"
    halves.finished("d")
    assert halves.matched(prompt("e"), 0) is None
    halves.step()
    halves.reported(["a"])
    assert halves.matched(prompt("e"), 0) == 16


def test_the_worker_is_asked_for_its_word_after_a_rest() -> None:
    halves = scheduling()
    halves.arrived()
    assert halves.take_asks()
    assert not halves.take_asks()
    assert halves.matched(prompt(), 0) is None
    halves.hear(Told(64, starts_anywhere=True, num_slots=2))
    halves.arrived()
    assert not halves.take_asks()
    assert halves.matched(prompt(), 0) == 16
    halves.finished("a")
    halves.finished("b")
    halves.arrived()
    assert halves.take_asks()


def test_a_route_that_the_sources_do_not_offer_is_a_mistake() -> None:
    halves = scheduling()
    halves.hear(Told(64, starts_anywhere=True, num_slots=2, routes=("whole",)))
    asked = {**ASKED, "headrace_route": "streamed"}
    assert halves.matched(prompt(params=asked), 0) == 0
    assert halves.matched(prompt("b"), 0) == 16
    assert halves.take_local() == {"mistaken": 1}


def test_prompts_whose_logprobs_are_asked_for_are_vllms_own() -> None:
    halves = scheduling()
    assert halves.matched(prompt(reads_cache=False), 0) == 0
    assert halves.take_local() == {"prompt-logprobs": 1}
