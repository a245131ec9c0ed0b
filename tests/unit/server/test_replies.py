"""Replies and chunks are what OpenAI's own client reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from headrace.server.replies import (
    DONE,
    Answer,
    ChatChoice,
    CompletionChoice,
    Heading,
    IdKind,
    ModelCard,
    ModelList,
    Reply,
    Scored,
    Tokenized,
    chat,
    chat_chunk,
    chat_logprobs,
    chat_piece,
    completion,
    completion_logprobs,
    event_of,
    heading,
    json_of,
    usage_of,
)
from headrace.server.terminals import Ending, Terminal

types = pytest.importorskip("openai.types", reason="needs the openai package")

HEAD = Heading("cmpl-1", 1_700_000_000, "tiny", "fp_1")
SCORED = (
    Scored("né", -0.5, (("né", -0.5), ("ne", -1.0))),
    Scored("\N{REPLACEMENT CHARACTER}", float("-inf"), (("a", -0.25),)),
)
BASE = {"id": "cmpl-1", "created": 1_700_000_000, "model": "tiny", "system_fingerprint": "fp_1"}
USAGE = {
    "prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10,
    "prompt_tokens_details": {"cached_tokens": 4, "transferred_tokens": 3},
}  # fmt: skip


def told(reply: Reply) -> dict[str, Any]:
    """A reply as its client decodes it."""
    decoded = json.loads(json_of(reply))
    assert isinstance(decoded, dict)
    return decoded


def read(kind: Any, reply: Reply) -> Any:
    """A reply as the openai package holds it, checked by its own model, which must lose nothing."""
    model = kind.model_validate(told(reply), strict=True)
    assert model.to_dict(exclude_unset=True) == told(reply)
    return model


def test_a_whole_completion() -> None:
    choices = [
        CompletionChoice(0, "né", completion_logprobs(SCORED), "stop"),
        CompletionChoice(1, "x", finish_reason="length"),
    ]
    reply = completion(HEAD, choices, usage_of(7, 3, cached=4, transferred=3))
    assert told(reply) == {
        **BASE,
        "object": "text_completion",
        "choices": [
            {
                "index": 0,
                "text": "né",
                "finish_reason": "stop",
                "logprobs": {
                    "tokens": ["né", "\N{REPLACEMENT CHARACTER}"],
                    "token_logprobs": [-0.5, -9999.0],
                    "top_logprobs": [
                        {"né": -0.5, "ne": -1.0},
                        {"a": -0.25, "\N{REPLACEMENT CHARACTER}": -9999.0},
                    ],
                    "text_offset": [0, 2],
                },
            },
            {"index": 1, "text": "x", "finish_reason": "length", "logprobs": None},
        ],
        "usage": USAGE,
    }
    model = read(types.Completion, reply)
    assert model.choices[0].logprobs.token_logprobs == [-0.5, -9999.0]
    assert model.usage.prompt_tokens_details.cached_tokens == 4
    assert model.usage.prompt_tokens_details.transferred_tokens == 3


def test_chunks_of_a_completion() -> None:
    piece = completion(HEAD, [CompletionChoice(0, "né")])
    assert "usage" not in told(piece)
    assert told(piece)["choices"][0]["finish_reason"] is None
    with_null = completion(HEAD, [CompletionChoice(0, "né")], None)
    assert told(with_null)["usage"] is None
    last = completion(HEAD, [], usage_of(7, 3, cached=4, transferred=3))
    assert told(last)["choices"] == []
    assert told(last)["usage"] == USAGE
    read(types.Completion, last)


def test_offsets_go_on_where_the_last_chunk_ended() -> None:
    assert completion_logprobs(SCORED, 5).text_offset == [5, 7]
    assert completion_logprobs(()).tokens == []


def test_of_tokens_that_read_alike_the_likeliest_is_told_or_the_token_itself() -> None:
    alike = Scored("a", -3.0, (("b", -1.0), ("a", -2.0), ("b", -4.0)))
    assert completion_logprobs([alike]).top_logprobs == [{"b": -1.0, "a": -3.0}]


def test_a_whole_chat() -> None:
    reply = chat(
        HEAD,
        [ChatChoice(0, Answer("né"), chat_logprobs(SCORED), "stop")],
        usage_of(7, 3, cached=4, transferred=3),
    )
    assert told(reply) == {
        **BASE,
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "né", "refusal": None},
                "finish_reason": "stop",
                "logprobs": {
                    "content": [
                        {
                            "token": "né", "logprob": -0.5, "bytes": [110, 195, 169],
                            "top_logprobs": [
                                {"token": "né", "logprob": -0.5, "bytes": [110, 195, 169]},
                                {"token": "ne", "logprob": -1.0, "bytes": [110, 101]},
                            ],
                        },
                        {
                            "token": "\N{REPLACEMENT CHARACTER}", "logprob": -9999.0,
                            "bytes": None,
                            "top_logprobs": [{"token": "a", "logprob": -0.25, "bytes": [97]}],
                        },
                    ],
                    "refusal": None,
                },
            }
        ],
        "usage": USAGE,
    }  # fmt: skip
    model = read(types.chat.ChatCompletion, reply)
    assert model.choices[0].message.content == "né"
    assert model.choices[0].logprobs.content[1].top_logprobs[0].logprob == -0.25


def test_chunks_of_a_chat() -> None:
    first = chat_chunk(HEAD, [chat_piece(1, "", first=True)])
    middle = chat_chunk(HEAD, [chat_piece(1, "né", logprobs=chat_logprobs(SCORED))], None)
    end = chat_chunk(HEAD, [chat_piece(1, "", finish_reason="length")])
    last = chat_chunk(HEAD, [], usage_of(7, 3, cached=4, transferred=3))
    assert [told(each)["choices"][0]["delta"] for each in (first, middle, end)] == [
        {"role": "assistant", "content": ""},
        {"content": "né"},
        {},
    ]
    assert told(first)["object"] == "chat.completion.chunk"
    assert "usage" not in told(first)
    assert told(middle)["usage"] is None
    assert told(end)["choices"][0]["finish_reason"] == "length"
    assert told(last)["choices"] == []
    for each in (first, middle, end, last):
        read(types.chat.ChatCompletionChunk, each)


def test_what_is_left_out_is_not_null() -> None:
    assert chat_piece(0, "x").delta.role is UNSET
    assert completion(HEAD, []).usage is UNSET


def test_models_and_tokens() -> None:
    models = ModelList([ModelCard("tiny", 1_700_000_000, 512)])
    assert told(models) == {
        "object": "list",
        "data": [
            {
                "id": "tiny", "object": "model", "created": 1_700_000_000,
                "owned_by": "headrace", "max_model_len": 512,
            }
        ],
    }  # fmt: skip
    assert types.Model.model_validate(told(models)["data"][0], strict=True).id == "tiny"
    assert told(Tokenized(2, 512, [1, 2]))["token_strs"] is None


def test_a_stream_is_framed_as_events() -> None:
    reply = completion(HEAD, [CompletionChoice(0, "a\n\nb\r\u2028")])
    event = event_of(reply)
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    assert event.count(b"\n") == 2
    assert msgspec.json.decode(event[len(b"data: ") :])["choices"][0]["text"] == "a\n\nb\r\u2028"
    failed = Ending(Terminal.SOURCE_DIED, "the source died", field=None)
    assert json.loads(event_of(failed.body())[len(b"data: ") :]) == {
        "error": {
            "message": "the source died", "type": "overloaded_error",
            "param": None, "code": "source-died",
        }
    }  # fmt: skip
    assert DONE == b"data: [DONE]\n\n"


TEXT = "né\u2028\r\n"


@pytest.fixture
def streams() -> Iterator[tuple[Any, list[bytes]]]:
    """OpenAI's client, and the streams that it is answered with."""
    httpx = pytest.importorskip("httpx")
    openai = pytest.importorskip("openai")
    waiting: list[bytes] = []

    def answer(_: Any) -> Any:
        headers = {"content-type": "text/event-stream"}
        return httpx.Response(200, headers=headers, content=waiting.pop(0))

    with (
        httpx.Client(transport=httpx.MockTransport(answer)) as transport,
        openai.OpenAI(api_key="k", base_url="http://here/v1", http_client=transport) as client,
    ):
        yield client, waiting


def test_openai_s_client_reads_a_chat_s_stream(streams: tuple[Any, list[bytes]]) -> None:
    client, waiting = streams
    pieces = [
        chat_chunk(HEAD, [chat_piece(0, "", first=True)], None),
        chat_chunk(HEAD, [chat_piece(0, TEXT)], None),
        chat_chunk(HEAD, [chat_piece(0, "", finish_reason="stop")], None),
        chat_chunk(HEAD, [], usage_of(7, 3)),
    ]
    waiting.append(b"".join(map(event_of, pieces)) + DONE)
    chunks = list(client.chat.completions.create(model="tiny", messages=[], stream=True))
    assert "".join(each.choices[0].delta.content or "" for each in chunks[:-1]) == TEXT
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.total_tokens == 10


def test_openai_s_client_reads_a_completion_s_stream(streams: tuple[Any, list[bytes]]) -> None:
    client, waiting = streams
    pieces = [
        completion(HEAD, [CompletionChoice(1, TEXT, completion_logprobs(SCORED))]),
        completion(HEAD, [CompletionChoice(1, "", finish_reason="length")]),
        completion(HEAD, [], usage_of(7, 3)),
    ]
    waiting.append(b"".join(map(event_of, pieces)) + DONE)
    chunks = list(client.completions.create(model="tiny", prompt="p", stream=True))
    assert [each.choices[0].text for each in chunks[:-1]] == [TEXT, ""]
    assert [each.choices[0].finish_reason for each in chunks[:-1]] == [None, "length"]
    assert chunks[0].choices[0].logprobs.text_offset == [0, 2]
    assert chunks[-1].usage.prompt_tokens == 7


def test_openai_s_client_raises_at_an_error_event(streams: tuple[Any, list[bytes]]) -> None:
    client, waiting = streams
    failed = Ending(Terminal.DEVICE, "broke").body()
    waiting.append(event_of(chat_chunk(HEAD, [chat_piece(0, "né")])) + event_of(failed))
    stream = client.chat.completions.create(model="tiny", messages=[], stream=True)
    assert next(stream).choices[0].delta.content == "né"
    with pytest.raises(Exception, match="broke") as raised:
        next(stream)
    assert type(raised.value).__name__ == "APIError"
    assert getattr(raised.value, "code", None) == "device"


def test_ids_are_our_own_and_differ() -> None:
    kinds: tuple[IdKind, ...] = ("cmpl", "chatcmpl")
    made = {heading(kind, "tiny", 1, "fp").id for kind in kinds for _ in range(50)}
    assert len(made) == 100
    assert {each.split("-")[0] for each in made} == {"cmpl", "chatcmpl"}
    assert all(len(each.split("-")[1]) == 32 for each in made)
