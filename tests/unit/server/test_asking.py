"""From a body to what is asked of the owners."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("starlette")

from headrace.errors import Refused
from headrace.messages import Sampling
from headrace.server.asking import DEADLINE_HEADER, MESSAGE_COST, ROUTE_HEADER, asked_of
from headrace.server.bodies import chat_of, completion_of
from headrace.server.config import PageConfig, QueueConfig, RequestConfig
from headrace.server.dispatch import Asked
from headrace.server.encoding import LONG_TEXT, Encoding
from headrace.server.models import ServedModel
from headrace.server.terminals import Ending, Terminal
from tests.server_stand import CHAT, COMPLETION, CONTEXT, STOP_TOKEN, serve_config, served_model
from tests.unit.server.test_encoding import stays


def asked(
    kind: str = "completions", *, headers: Any = None, config: Any = None, **body: Any
) -> Asked:
    base, read = (COMPLETION, completion_of) if kind == "completions" else (CHAT, chat_of)
    told = {name: value for name, value in {**base, **body}.items() if value is not ...}
    parsed = read(json.dumps(told).encode())
    model = served_model(context=body.pop("context", CONTEXT))
    config = config or serve_config()
    return asyncio.run(asked_of(7, "me", parsed, model, headers or {}, config, Encoding(), stays))


def refused(kind: str = "completions", **more: Any) -> Ending:
    with pytest.raises(Ending) as told:
        asked(kind, **more)
    assert told.value.terminal is Terminal.INVALID
    return told.value


def test_each_choice_has_its_prompt_and_a_seed_of_its_own() -> None:
    got = asked(prompt=["hi", "abc"], n=2, seed=5, temperature=0.5)
    assert [bytes(prompt) for prompt in map(list, got.prompts)] == [b"hi", b"hi", b"abc", b"abc"]
    samplings = [options.sampling for options in got.options]
    assert samplings == [Sampling(0.5, 1.0, 0, 5 + at) for at in range(4)]
    assert (got.request, got.client, got.model) == (7, "me", "letters")


def test_without_a_seed_no_two_requests_have_the_same() -> None:
    seeds = {asked().options[0].sampling.seed for _ in range(8)}
    assert len(seeds) == 8
    assert None not in seeds


def test_ids_are_a_prompt_and_are_checked() -> None:
    assert list(asked(prompt=[104, 105]).prompts[0]) == [104, 105]
    assert refused(prompt=[256]).field == "prompt"
    assert refused(prompt="").field == "prompt"
    assert refused(prompt=["hi", ""]).field == "prompt"


def test_max_tokens_are_those_asked_for_or_the_default_or_what_fits() -> None:
    assert asked(max_tokens=3).options[0].max_tokens == 3
    config = serve_config(requests=RequestConfig(max_tokens=5))
    assert asked(max_tokens=..., config=config).options[0].max_tokens == 5
    long = "a" * (CONTEXT - 1)
    assert asked(max_tokens=..., prompt=long).options[0].max_tokens == 2
    chat = asked("chat", max_tokens=...)
    assert chat.options[0].max_tokens == CONTEXT - len(chat.prompts[0]) + 1
    assert asked(prompt="a" * CONTEXT, max_tokens=1).options[0].max_tokens == 1
    assert refused(prompt="a" * CONTEXT, max_tokens=2).field == "prompt"
    assert refused(prompt="a" * (CONTEXT + 1), max_tokens=...).field == "prompt"
    assert refused("chat", max_tokens=CONTEXT).field == "messages"


@pytest.mark.parametrize(
    ("field", "header", "default", "route"),
    [
        (None, "", "whole", "whole"),
        (None, "streamed", "whole", "streamed"),
        ("chunked", "streamed", "whole", "chunked"),
        (None, "", "auto", "auto"),
        ("whole", "", "auto", "whole"),
    ],
)
def test_a_route_by_field_outranks_the_header_and_that_the_config(
    field: Any, header: str, default: Any, route: str
) -> None:
    config = serve_config(requests=RequestConfig(route=default))
    got = asked(route=field, headers={ROUTE_HEADER: header}, config=config)
    assert got.options[0].route == route


@pytest.mark.parametrize(
    ("field", "header", "default", "deadline_s"),
    [
        (None, "", None, None),
        (None, "", 9.0, 9.0),
        (None, "3.5", 9.0, 3.5),
        (2.0, "3.5", 9.0, 2.0),
    ],
)
def test_a_deadline_by_field_outranks_the_header_and_that_the_config(
    field: Any,
    header: str,
    default: Any,
    deadline_s: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "monotonic_ns", lambda: 0)
    config = serve_config(queue=QueueConfig(deadline_s=default))
    got = asked(deadline_s=field, headers={DEADLINE_HEADER: header}, config=config)
    assert got.deadline_ns == (None if deadline_s is None else int(deadline_s * 1e9))
    assert got.options[0].deadline_s is None  # what is left of it is told when it is dispatched


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", "1e10", "1" * 500])
def test_a_header_that_is_no_time_is_refused_by_its_name(value: str) -> None:
    told = refused(headers={DEADLINE_HEADER: value})
    assert told.field == DEADLINE_HEADER
    assert len(told.text) < 200


def test_a_header_that_is_no_route_is_refused_by_its_name() -> None:
    told = refused(headers={ROUTE_HEADER: "x" * 500})
    assert told.field == ROUTE_HEADER
    assert len(told.text) < 200


def test_a_template_that_refuses_is_a_mistake_in_the_messages() -> None:
    assert refused("chat", messages=[{"role": "user", "content": "refuse"}]).field == "messages"


def test_a_deadline_in_a_header_is_a_plain_number() -> None:
    assert asked(headers={DEADLINE_HEADER: "1.5"}).deadline_ns
    for given in ("1_0", "0", "-1", "nan", "1e3", " 1", "9" * 400):
        assert refused(headers={DEADLINE_HEADER: given}).field == DEADLINE_HEADER
        assert refused(headers={DEADLINE_HEADER: given}, deadline_s=2.0).field == DEADLINE_HEADER


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a" * LONG_TEXT},
        {"prompt": ["a" * (LONG_TEXT // 2)] * 2},  # short ones that are long together
        {"messages": [{"role": "user", "content": "a" * (LONG_TEXT - MESSAGE_COST)}]},
        {"messages": [{"role": "user", "content": ""}] * (LONG_TEXT // MESSAGE_COST)},
    ],
)
def test_long_texts_are_encoded_in_their_own_thread(
    body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    encode = ServedModel.encode

    def seen(self: ServedModel, text: str, *, add_special: bool = True) -> Any:
        threads.append(threading.current_thread())
        return encode(self, text, add_special=add_special)

    monkeypatch.setattr(ServedModel, "encode", seen)
    kind = "chat" if "messages" in body else "completions"
    refused(kind, **body)  # it does not fit
    assert threads
    assert threading.main_thread() not in threads
    threads.clear()
    asked()
    assert threads == [threading.main_thread()]


def test_ids_do_not_wait_for_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Encoding, "_in_turn", None)
    assert "the prompt has 8192" in refused(prompt=[1] * LONG_TEXT).text


def test_a_text_that_cannot_fit_is_not_encoded() -> None:
    model = replace(served_model(), most_characters=10)
    with pytest.raises(Refused, match="none of more than 10 fits"):
        model.encode("a" * 11)


def test_stops_of_the_model_and_traces_are_asked_for() -> None:
    options = asked().options[0]
    assert (options.stop_tokens, options.trace, options.logprobs) == ((STOP_TOKEN,), True, None)
    untraced = serve_config(page=PageConfig(recent=0))
    assert not asked(config=untraced).options[0].trace
    assert asked(logprobs=0).options[0].logprobs == 0


def test_a_deadline_runs_while_a_text_waits_for_the_thread() -> None:
    async def test() -> None:
        encoding, gate, begun = Encoding(), threading.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def work() -> None:
            loop.call_soon_threadsafe(begun.set)
            assert gate.wait(10)

        first = asyncio.ensure_future(encoding.run(work, LONG_TEXT, "other", stays))
        await begun.wait()
        text = json.dumps({**COMPLETION, "prompt": "a" * LONG_TEXT, "deadline_s": 0.01})
        parsed, config = completion_of(text.encode()), serve_config()
        try:
            with pytest.raises(Ending) as told:
                await asked_of(7, "me", parsed, served_model(), {}, config, encoding, stays)
        finally:
            gate.set()
        assert told.value.terminal is Terminal.DEADLINE
        await first

    asyncio.run(test())
