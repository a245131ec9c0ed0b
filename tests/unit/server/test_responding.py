"""What a client reads of its choices: whole or in pieces, with usage, logprobs and stops."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("starlette")

from headrace.server import responding
from headrace.server.terminals import Terminal
from tests.server_stand import STOP_TOKEN, Client, Stand, ended, reused, run

KINDS = ("completions", "chat")
SHAPES = [(kind, stream) for kind in KINDS for stream in (False, True)]
by_shape = pytest.mark.parametrize(("kind", "stream"), SHAPES)
by_kind = pytest.mark.parametrize("kind", KINDS)


def texts(client: Client, kind: str, num_choices: int = 1) -> list[str]:
    """Each choice's text, put together."""
    found = [""] * num_choices
    chunks = [client.json] if client.body.startswith(b"{") else client.chunks[:-1]
    for chunk in chunks:
        for choice in chunk["choices"]:
            found[choice["index"]] += _text(choice, kind)
    return found


def _text(choice: dict[str, Any], kind: str) -> str:
    if kind == "completions":
        return str(choice["text"])
    return str((choice.get("message") or choice["delta"]).get("content", ""))


def reasons(client: Client) -> dict[int, str]:
    """Why each choice ended, which is told once."""
    found: dict[int, str] = {}
    chunks = [client.json] if client.body.startswith(b"{") else client.chunks[:-1]
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        if choice["finish_reason"] is not None:
            assert choice["index"] not in found
            found[choice["index"]] = choice["finish_reason"]
    return found


@by_shape
def test_the_text_of_each_choice_is_told_in_full(kind: str, stream: bool) -> None:
    async def test() -> None:
        stand = Stand(lanes=3)
        client, choices = await stand.asked(kind, stream=stream, n=3)
        for round_ in range(3):
            for choice in choices[round_:]:
                stand.decoder.say(choice, "\u00e9x"[round_ % 2] * (choice.index + 1))
                await stand.quiet()
        for choice in reversed(choices):
            stand.decoder.end(choice)
        await stand.done(client)
        assert texts(client, kind, 3) == [
            "\u00e9",
            "\u00e9\u00e9xx",
            "\u00e9\u00e9\u00e9xxx\u00e9\u00e9\u00e9",
        ]
        assert reasons(client) == {0: "length", 1: "length", 2: "length"}
        if stream:
            assert client.chunks[-1] == "[DONE]"
            assert client.headers["content-type"].startswith("text/event-stream")
            assert len({chunk["id"] for chunk in client.chunks[:-1]}) == 1
        assert stand.answered.terminal is Terminal.FINISHED
        await stand.nothing_left()

    run(test)


@by_shape
@pytest.mark.parametrize(
    ("pieces", "stops", "text"),
    [
        (["hello wor", "ld"], ["world"], "hello "),
        (["he", "l", "l", "o"], "ll", "he"),
        (["abc"], ["zz", "b"], "a"),
        (["stop", "!"], ["stop"], ""),
        (["wor", "m"], ["world"], "worm"),
    ],
)
def test_a_stop_string_cuts_across_tokens_and_ends_the_work(
    kind: str, stream: bool, pieces: list[str], stops: Any, text: str
) -> None:
    async def test() -> None:
        stand = Stand()
        client, (choice,) = await stand.asked(kind, stream=stream, stop=stops, max_tokens=50)
        for piece in pieces:
            stand.decoder.say(choice, piece)
            await stand.quiet()
        cut = text != "".join(pieces)
        if not cut:
            stand.decoder.end(choice)
        await stand.done(client)
        assert texts(client, kind) == [text]
        assert reasons(client) == {0: "stop" if cut else "length"}
        assert stand.decoder.withdrawn == ([choice] if cut else [])
        assert stand.answered.terminal is Terminal.FINISHED
        await stand.nothing_left()

    run(test)


@by_shape
def test_a_first_token_that_ends_the_text_gives_an_empty_one(kind: str, stream: bool) -> None:
    async def test() -> None:
        stand = Stand()
        client, (choice,) = await stand.asked(kind, stream=stream)
        stand.decoder.say(choice, chr(STOP_TOKEN))
        stand.decoder.end(choice)
        await stand.done(client)
        assert texts(client, kind) == [""]
        assert reasons(client) == {0: "stop"}
        if not stream:
            assert client.json["usage"]["completion_tokens"] == 1
        await stand.nothing_left()

    run(test)


@by_shape
def test_one_token_is_of_that_length_unless_it_ends_the_text(kind: str, stream: bool) -> None:
    async def test() -> None:
        for token, reason in (("a", "length"), (chr(STOP_TOKEN), "stop")):
            stand = Stand()
            client, (choice,) = await stand.asked(kind, stream=stream, max_tokens=1)
            assert choice.options.max_tokens == 1
            stand.decoder.say(choice, token)
            stand.decoder.end(choice)
            await stand.done(client)
            assert reasons(client) == {0: reason}
            await stand.nothing_left()

    run(test)


def test_ignore_eos_goes_on_and_ends_by_length() -> None:
    async def test() -> None:
        stand = Stand()
        client, (choice,) = await stand.asked(ignore_eos=True)
        assert choice.options.stop_tokens == ()
        stand.decoder.say(choice, f"a{chr(STOP_TOKEN)}b{chr(STOP_TOKEN)}")
        stand.decoder.end(choice)
        await stand.done(client)
        assert (texts(client, "completions"), reasons(client)) == (["ab"], {0: "length"})

    run(test)


def usage_of(client: Client, *, stream: bool) -> dict[str, Any]:
    if not stream:
        usage: dict[str, Any] = client.json["usage"]
        return usage
    *chunks, last, done = client.chunks
    assert done == "[DONE]"
    assert last["choices"] == []
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    found: dict[str, Any] = last["usage"]
    return found


@by_shape
@pytest.mark.parametrize(
    ("held", "remainder"),
    [(None, "source"), (3, "source"), (3, "owner"), (0, "owner"), (-1, "none")],
)
def test_usage_adds_up_whoever_had_the_prompt(
    kind: str, stream: bool, held: int | None, remainder: str
) -> None:
    """The prompt counts once for all choices, and its parts add up to it; held -1: all."""

    async def test() -> None:
        stand = Stand()
        options = {"stream_options": {"include_usage": True}} if stream else {}
        client, choices = await stand.asked(kind, stream=stream, n=2, **options)
        prompt = choices[0].job.num_prompt_tokens
        cached = prompt if held == -1 else held or 0
        for choice in choices:
            stand.decoder.say(choice, "abc"[: choice.index + 2])
            reuse = None if held is None else reused(cached, remainder)
            stand.decoder.end(choice, ended(reuse=reuse))
        await stand.done(client)
        usage = usage_of(client, stream=stream)
        counts = usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]
        assert counts == (prompt, 5, prompt + 5)
        assert usage["prompt_tokens_details"] == {
            "cached_tokens": cached,
            "transferred_tokens": 0 if remainder == "owner" else prompt - cached,
        }
        await stand.nothing_left()

    run(test)


@by_shape
def test_usage_of_what_a_stop_string_cut_is_that_of_its_end(kind: str, stream: bool) -> None:
    """The owner tells what it had kept with its end, which comes after the text was cut."""

    async def test() -> None:
        stand = Stand()
        options = {"stream_options": {"include_usage": True}} if stream else {}
        client, (choice,) = await stand.asked(kind, stream=stream, stop="b", **options)
        choice.withdraw = lambda: None  # the owner takes its time
        stand.decoder.say(choice, "abc")
        await stand.quiet()
        assert not client.complete if client.sent else not stream
        stand.decoder.end(choice, ended("cancelled", cause="cancelled", reuse=reused(2)))
        await stand.done(client)
        details = usage_of(client, stream=stream)["prompt_tokens_details"]
        prompt = choice.job.num_prompt_tokens
        assert details == {"cached_tokens": 2, "transferred_tokens": prompt - 2}
        await stand.nothing_left()

    run(test)


def test_a_stream_that_tells_no_usage_does_not_wait_for_the_end_of_what_it_cut() -> None:
    async def test() -> None:
        stand = Stand()
        client, (choice,) = await stand.asked(stream=True, stop="b")
        choice.withdraw = lambda: None
        stand.decoder.say(choice, "abc")
        await stand.done(client)
        assert client.chunks[-1] == "[DONE]"
        stand.decoder.end(choice, ended("cancelled", cause="cancelled"))
        await stand.nothing_left()

    run(test)


def test_usage_of_a_prompt_that_the_owner_computed_tells_nothing_as_transferred() -> None:
    async def test() -> None:
        stand = Stand()
        client, (choice,) = await stand.asked()
        stand.decoder.say(choice, "a")
        stand.decoder.end(choice, ended(local=True))
        await stand.done(client)
        details = client.json["usage"]["prompt_tokens_details"]
        assert details == {"cached_tokens": 0, "transferred_tokens": 0}

    run(test)


def test_several_prompts_count_each_once() -> None:
    async def test() -> None:
        stand = Stand(lanes=4)
        client = stand.ask(prompt=["hello", "hi"], n=2)
        await stand.until(lambda: len(stand.decoder.taken) == 4)
        for choice in list(stand.decoder.taken):
            stand.decoder.say(choice, str(choice.index))
            stand.decoder.end(choice)
        await stand.done(client)
        assert texts(client, "completions", 4) == ["0", "1", "2", "3"]
        usage = client.json["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (7, 4)
        assert usage["prompt_tokens_details"]["transferred_tokens"] == 7

    run(test)


@by_kind
def test_continuous_usage_grows_with_each_chunk(kind: str) -> None:
    async def test() -> None:
        stand = Stand()
        told = {"include_usage": True, "continuous_usage_stats": True}
        client, (choice,) = await stand.asked(kind, stream=True, stream_options=told)
        for _ in range(3):
            stand.decoder.say(choice, "a")
            await stand.quiet()
        stand.decoder.end(choice)
        await stand.done(client)
        counts = [chunk["usage"]["completion_tokens"] for chunk in client.chunks[:-1]]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (1, 3)

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_tells_its_role_once_for_each_choice(stream: bool) -> None:
    async def test() -> None:
        stand = Stand()
        client, choices = await stand.asked("chat", stream=stream, n=2)
        for letter in "ab":
            for choice in choices:
                stand.decoder.say(choice, letter)
                await stand.quiet()
        for choice in choices:
            stand.decoder.end(choice)
        await stand.done(client)
        if stream:
            roles = [
                (choice["index"], choice["delta"]["role"])
                for chunk in client.chunks[:-1]
                for choice in chunk["choices"]
                if "role" in choice["delta"]
            ]
            assert sorted(roles) == [(0, "assistant"), (1, "assistant")]
        else:
            assert [each["message"]["role"] for each in client.json["choices"]] == ["assistant"] * 2

    run(test)


@by_shape
def test_logprobs_are_told_for_each_token_in_the_style_of_the_endpoint(
    kind: str, stream: bool
) -> None:
    async def test() -> None:
        stand = Stand()
        asked = {"logprobs": 2} if kind == "completions" else {"logprobs": True, "top_logprobs": 2}
        client, (choice,) = await stand.asked(kind, stream=stream, **asked)
        assert choice.options.logprobs == 2
        for letter in "abc":
            top = ((ord(letter), -0.5), (ord("z"), float("-inf")))
            stand.decoder.say(choice, letter, logprob=-0.5, top=top)
            await stand.quiet()
        stand.decoder.end(choice)
        await stand.done(client)
        told = [client.json] if not stream else client.chunks[:-1]
        logprobs = [choice["logprobs"] for chunk in told for choice in chunk["choices"]]
        if kind == "completions":
            joined = {key: [x for each in logprobs for x in each[key]] for key in logprobs[0]}
            assert joined["tokens"] == ["a", "b", "c"]
            assert joined["token_logprobs"] == [-0.5] * 3
            assert joined["text_offset"] == [0, 1, 2]
            assert joined["top_logprobs"][1] == {"b": -0.5, "z": -9999.0}
        else:
            content = [each for part in logprobs for each in part["content"]]
            assert [each["token"] for each in content] == ["a", "b", "c"]
            assert [each["bytes"] for each in content] == [[97], [98], [99]]
            assert [top["token"] for top in content[0]["top_logprobs"]] == ["a", "z"]
        await stand.nothing_left()

    run(test)


@by_kind
def test_no_logprobs_are_told_unasked(kind: str) -> None:
    async def test() -> None:
        stand = Stand()
        client, (choice,) = await stand.asked(kind)
        assert choice.options.logprobs is None
        stand.decoder.say(choice, "a")
        stand.decoder.end(choice)
        await stand.done(client)
        assert client.json["choices"][0]["logprobs"] is None

    run(test)


@by_kind
def test_what_came_before_a_failure_of_another_choice_is_told(kind: str) -> None:
    async def test() -> None:
        stand = Stand(lanes=2)
        client, (first, second) = await stand.asked(kind, stream=True, n=2)
        stand.decoder.say(first, "a")
        await stand.quiet()
        stand.decoder.say(first, "b")
        stand.decoder.end(second, ended("failed", cause="device"))
        await stand.done(client)
        assert b"device" in client.body
        told = client.body[: client.body.index(b'"error"')]
        assert b'"b"' in told

    run(test)


@by_shape
def test_an_owner_that_is_stuck_holds_up_no_finished_answer(
    kind: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a stop string only the usage waits for the owner's end, and not for ever."""
    monkeypatch.setattr(responding, "END_WITHIN_S", 0.01)

    async def test() -> None:
        stand = Stand()
        more: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
        client, (choice,) = await stand.asked(kind, stream=stream, stop="!", **more)
        stand.decoder.say(choice, "a!")
        await stand.done(client)
        assert texts(client, kind) == ["a"]
        assert reasons(client) == {0: "stop"}

    run(test)
