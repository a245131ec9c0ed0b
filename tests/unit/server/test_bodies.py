"""Every field of a body is understood or refused by its name; nothing else comes of any bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import Refused
from headrace.messages import AskedRoute, OnFailure, PrefixAsked
from headrace.runtime.requests import RequestOptions
from headrace.server.bodies import (
    MAX_MESSAGES,
    MAX_SEED,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    Body,
    ChatBody,
    CompletionBody,
    Message,
    StreamOptions,
    TokenizeBody,
    chat_of,
    check_choices,
    completion_of,
    options_of,
    refusal_of,
    seed_of_choice,
    tokenize_of,
)
from headrace.server.config import RequestConfig
from headrace.server.fields import NEUTRAL_OF_CHAT, NEUTRAL_OF_COMPLETIONS, NEUTRAL_OF_MESSAGES
from headrace.server.terminals import Ending, Terminal

Reader = Callable[[bytes], CompletionBody | ChatBody | TokenizeBody]
READERS: tuple[Reader, ...] = (completion_of, chat_of, tokenize_of)
USER = {"role": "user", "content": "hello"}


def completion(**fields: Any) -> CompletionBody:
    return completion_of(json.dumps({"model": "m", "prompt": "p", **fields}).encode())


def chat(**fields: Any) -> ChatBody:
    return chat_of(json.dumps({"model": "m", "messages": [USER], **fields}).encode())


def refused(read: Callable[..., object], /, *given: Any, **fields: Any) -> Ending:
    with pytest.raises(Ending) as ending:
        read(*given, **fields)
    assert ending.value.terminal is Terminal.INVALID
    assert ending.value.status == 400
    assert 0 < len(ending.value.text) <= 400
    return ending.value


NO_STRING: list[Any] = [1, 1.5, True, [], {}]
NO_COUNT: list[Any] = ["1", 1.0, 1.5, True, [], {}, -2, 1 << 64, 10**400]
NO_NUMBER: list[Any] = ["1", True, [], {}, -0.1]
NO_BOOL: list[Any] = ["true", 0, 1, [], {}]

WRONG_OF_BOTH: dict[str, list[Any]] = {
    "model": [*NO_STRING, "", "x" * 513],
    "n": [*NO_COUNT, 0, 129],
    "stop": [1, True, {}, "", [""], ["a", 1], ["a"] * (MAX_STOPS + 1), "x" * (MAX_STOP_LENGTH + 1)],
    "seed": [*NO_COUNT, -1, MAX_SEED + 1],
    "temperature": [*NO_NUMBER, 2.01, 1e300, 10**400],
    "top_p": [*NO_NUMBER, 0, 1.01],
    "top_k": NO_COUNT,
    "max_tokens": [*NO_COUNT, 0, -1],
    "stream": NO_BOOL,
    "stream_options": [1, "x", [], True],
    "ignore_eos": NO_BOOL,
    "user": [*NO_STRING, "x" * 513],
    "safety_identifier": NO_STRING,
    "prompt_cache_key": NO_STRING,
    "route": [*NO_STRING, "fastest", "Whole", ""],
    "group_layers": [*NO_COUNT, 0],
    "chunk": NO_COUNT,
    "deadline_s": [*NO_NUMBER, 0, 1e10],
    "prefix": [*NO_STRING, "all"],
    "on_failure": [*NO_STRING, "again"],
    "digest": NO_BOOL,
    "frequency_penalty": [0.1, -1, "0", True, False, [], {}],
    "presence_penalty": [0.1, "0", True],
    "repetition_penalty": [1.1, 0, "1", True],
    "logit_bias": [{"50256": -100}, [], 0, "", False],
    "min_p": [0.1, "0", False],
    "min_tokens": [1, "0", False],
    "skip_special_tokens": [False, 1, "true"],
    "response_format": [{"type": "json_object"}, {"type": "json_schema"}, "text", {}, []],
    "store": [True, 0, "false"],
    "metadata": [{"a": "b"}, [], ""],
    "service_tier": ["flex", "priority", "", 0],
    "stop_token_ids": [[1], 1],
    "bad_words": [["a"], "a"],
    "structured_outputs": [{}, {"regex": "a"}],
    "include_stop_str_in_output": [True, 0],
    "nobody_knows_this": [None, 0, "x", {}],
    "Model": ["m"],
    "temprature": [1.0],
}
WRONG_OF_COMPLETIONS: dict[str, list[Any]] = {
    **WRONG_OF_BOTH,
    "prompt": [1, True, {}, [], [[]], [["a"]], [[[1]]], ["a"] * 129, [[1]] * 129],
    "logprobs": [*NO_COUNT, 21, -1],
    "echo": [True, 0],
    "suffix": ["x", 1],
    "best_of": [2, 0, "1", True, [1]],
    "messages": [[USER], None],
    "max_completion_tokens": [5],
    "tools": [[], None],
}
WRONG_OF_CHAT: dict[str, list[Any]] = {
    **WRONG_OF_BOTH,
    "messages": [1, "hello", {}, [], True, [USER] * (MAX_MESSAGES + 1)],
    "max_completion_tokens": [*NO_COUNT, 0],
    "logprobs": [*NO_BOOL, 5],
    "top_logprobs": [*NO_COUNT, 21, -1, 3],
    "tools": [[{"type": "function"}], {}, "x"],
    "tool_choice": ["auto", "required", {"type": "function"}],
    "functions": [[{}], {}],
    "function_call": ["auto", {}],
    "parallel_tool_calls": ["true", 1, 0],
    "modalities": [["text", "audio"], ["audio"], "text", []],
    "audio": [{"voice": "x"}, {}],
    "prediction": [{"type": "content"}, {}],
    "reasoning_effort": ["low", ""],
    "web_search_options": [{}],
    "continue_final_message": [True],
    "add_generation_prompt": [False],
    "chat_template": ["x", ""],
    "prompt": ["x", None],
    "echo": [True],
}
WRONG = [
    (kind, name, value)
    for kind, table in (("completion", WRONG_OF_COMPLETIONS), ("chat", WRONG_OF_CHAT))
    for name, values in table.items()
    for value in values
]
# These point into the field, at the element that is wrong.
DEEPER = {"stop": ("stop.0", "stop.1"), "prompt": ("prompt.0", "prompt.0.0")}


def test_the_table_is_wide() -> None:
    assert len(WRONG) > 400


@pytest.mark.parametrize(("kind", "name", "value"), WRONG)
def test_a_wrong_value_is_refused_by_the_field_s_name(kind: str, name: str, value: Any) -> None:
    ending = refused(completion if kind == "completion" else chat, **{name: value})
    assert ending.field == name or ending.field in DEEPER.get(name, ())
    assert name in ending.text


@pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity", "1e999", "01", "+1", ".5", "'a'"])
def test_numbers_that_json_has_not_are_refused(name: str) -> None:
    refused(completion_of, b'{"model": "m", "prompt": "p", "temperature": ' + name.encode() + b"}")


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b" ",
        b"null",
        b"[]",
        b'"text"',
        b"1",
        b"true",
        b"{",
        b"{}x",
        b"{} {}",
        b'{"model"}',
        b"{'model': 'm'}",
        b'{"model": "m",}',
        b"\xff\xfe{}",
        b"\xef\xbb\xbf{}",
        b'{"model": "\xff"}',
        b'{"model": "\xed\xa0\x80"}',
        b'{"model": "a\x00b"}',
        b'{"model": "a\nb"}',
        b'{"model": ' + b"9" * 5000 + b"}",
        b"[" * 200_000,
        b'{"model":' * 200_000,
        b'{"model": "m", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model": "m", "messages": [{"role": "user", "content": '
        + b"[" * 500
        + b"]" * 500
        + b"}]}",
        b"grant_type=client_credentials",
        b"\x00" * 100,
    ],
)
def test_what_is_no_json_object_is_refused(read: Reader, raw: bytes) -> None:
    refused(read, raw)


@pytest.mark.parametrize("name", ["best_of", "logit_bias", "response_format", "stop", "prompt"])
@pytest.mark.parametrize("depth", [10, 100, 300, 600, 800, 900, 950, 980, 990])
def test_a_value_is_refused_however_deep_it_is_nested(name: str, depth: int) -> None:
    deep = b"[" * depth + b"]" * depth
    fields = {b"model": b'"m"', b"prompt": b'"p"', b"n": deep, name.encode(): deep}
    raw = b"{" + b",".join(b'"%s":%s' % field for field in fields.items()) + b"}"
    refused(completion_of, raw)


@pytest.mark.parametrize("field", ["prompt", "stop", "user"])
@pytest.mark.parametrize("half", ["\\ud800", "\\udfff", "\\uD83Dx", "\\ude00\\ud83d"])
def test_half_of_a_character_is_no_text(field: str, half: str) -> None:
    raw = f'{{"model": "m", "prompt": "p", "{field}": "{half}"}}'.encode()
    assert "surrogate" in refused(completion_of, raw).text


def test_a_whole_character_of_two_halves_is() -> None:
    body = completion_of(b'{"model": "m", "prompt": "\\ud83d\\ude00\\u0000"}')
    assert body.prompt == "\N{GRINNING FACE}\0"


def test_of_a_field_that_comes_twice_the_last_counts() -> None:
    assert completion_of(
        b'{"model": "m", "prompt": "a", "prompt": "b", "n": 2, "n": 1}'
    ).prompts == ("b",)
    refused(completion_of, b'{"model": "m", "prompt": "a", "prompt": 1}')


def test_a_huge_name_or_value_is_not_told_back_whole() -> None:
    assert len(refused(completion, **{"x" * 100_000: 1}).field or "") == 64
    refused(completion, route="x" * 100_000)
    refused(completion, stop=["x" * 100_000])
    refused(chat, messages=[{"role": "x" * 100_000, "content": ""}])
    refused(chat, messages=[{"role": "user", "content": "", "y" * 100_000: 1}])
    part = {"type": "z" * 100_000}
    refused(chat, messages=[{"role": "user", "content": [part]}])
    part = {"type": "text", "text": "", "w" * 100_000: ""}
    refused(chat, messages=[{"role": "user", "content": [part]}])


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (1, "messages.1"),
        (None, "messages.1"),
        ([], "messages.1"),
        ({}, "messages.1.role"),
        ({"role": "user"}, "messages.1.content"),
        ({"role": "user", "content": None}, "messages.1.content"),
        ({"role": "assistant", "content": None, "tool_calls": [{}]}, "messages.1.tool_calls"),
        ({"role": "user", "content": 1}, "messages.1.content"),
        ({"role": "user", "content": {}}, "messages.1.content"),
        ({"role": "user", "content": ["text"]}, "messages.1.content.0"),
        ({"role": "user", "content": [{}]}, "messages.1.content.0.type"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages.1.content.0.type"),
        ({"role": "user", "content": [{"type": ["text"]}]}, "messages.1.content.0.type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.1.content.0.text"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages.1.content.0.text"),
        (
            {"role": "user", "content": [{"type": "text", "text": "", "cache_control": {}}]},
            "messages.1.content.0.cache_control",
        ),
        ({"role": "tool", "content": "x"}, "messages.1.role"),
        ({"role": "function", "content": "x"}, "messages.1.role"),
        ({"role": "", "content": "x"}, "messages.1.role"),
        ({"role": 1, "content": "x"}, "messages.1.role"),
        ({"role": "tool", "content": "x", "tool_call_id": "y"}, "messages.1.role"),
        ({"role": "user", "content": "x", "name": "me"}, "messages.1.name"),
        ({"role": "user", "content": "x", "weight": 1}, "messages.1.weight"),
    ],
)
def test_a_wrong_message_is_refused_by_its_place(message: Any, field: str) -> None:
    ending = refused(chat, messages=[USER, message])
    assert ending.field == field
    asked = json.dumps({"messages": [USER, message]}).encode()
    assert refused(tokenize_of, asked).field == field


@pytest.mark.parametrize("role", ["tool", "function", ""])
def test_a_role_that_is_none_is_named_with_those_that_are(role: str) -> None:
    """Before the fields that only such a message has, which would lead to the wrong repair."""
    message = {"role": role, "content": None, "tool_call_id": "y", "name": "f"}
    ending = refused(chat, messages=[message])
    roles = "system, developer, user, assistant"
    assert ending.text == f"unsupported role `{role}`; it is one of {roles}"


WORDS = {"route": AskedRoute, "prefix": PrefixAsked, "on_failure": OnFailure}


@pytest.mark.parametrize("field", WORDS)
@pytest.mark.parametrize("made", [completion, chat])
def test_a_word_that_a_field_does_not_have_is_told_with_those_that_it_has(
    made: Callable[..., Any], field: str
) -> None:
    ending = refused(made, **{field: "teleport"})
    told, _, words = ending.text.partition("; it is one of ")
    assert (told, ending.field) == (f"field `{field}` is `teleport`", field)
    assert sorted(words.split(", ")) == sorted(get_args(WORDS[field]))
    assert refused(made, **{field: "x" * 100_000}).text.endswith(f"; it is one of {words}")
    assert "one of" not in refused(made, **{field: 1}).text


def test_messages_are_read_to_what_a_template_takes() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    echoed: dict[str, Any] = {
        "role": "assistant", "content": "c", "refusal": None, "tool_calls": None,
        "function_call": None, "audio": None, "annotations": [], "name": None,
    }  # fmt: skip
    body = chat(messages=[{"role": "developer", "content": parts}, USER, echoed])
    assert body.messages == (
        Message(role="system", content="ab"),
        Message(role="user", content="hello"),
        Message(role="assistant", content="c"),
    )
    assert chat(messages=[{"role": "user", "content": []}]).messages[0].content == ""


@pytest.mark.parametrize("missing", ["model", "prompt"])
def test_a_missing_field_is_named(missing: str) -> None:
    fields = {"model": "m", "prompt": "p"}
    del fields[missing]
    assert refused(completion_of, json.dumps(fields).encode()).field == missing
    fields[missing] = None  # type: ignore[assignment]
    assert refused(completion_of, json.dumps(fields).encode()).field == missing


def test_null_is_an_absent_field_everywhere() -> None:
    body = completion(
        **{
            name: None
            for name in CompletionBody.__struct_fields__
            if name not in ("model", "prompt")
        },
        **dict.fromkeys(NEUTRAL_OF_COMPLETIONS),
    )
    assert body == completion()
    talk = chat(
        **{name: None for name in ChatBody.__struct_fields__ if name not in ("model", "messages")},
        **dict.fromkeys(NEUTRAL_OF_CHAT),
    )
    assert talk == chat()


def test_what_asks_for_nothing_is_taken() -> None:
    for name, values in NEUTRAL_OF_COMPLETIONS.items():
        for value in values:
            assert completion(**{name: value}) == completion()
    for name, values in NEUTRAL_OF_CHAT.items():
        for value in values:
            assert chat(**{name: value}) == chat()
    for name, values in NEUTRAL_OF_MESSAGES.items():
        for value in (*values, None):
            assert chat(messages=[{**USER, name: value}]) == chat()
    assert completion(frequency_penalty=0.0, repetition_penalty=1.0) == completion()
    assert completion(n=3, best_of=3) == completion(n=3)


def test_a_completion_s_fields_are_read() -> None:
    body = completion(
        n=2, stop=["a", "b"], seed=MAX_SEED, temperature=0, top_p=1, top_k=-1, max_tokens=7,
        stream=True, stream_options={"include_usage": True}, logprobs=0, ignore_eos=True,
        user="me", safety_identifier="x", stop_token_ids=None,
    )  # fmt: skip
    assert body.stops == ("a", "b")
    assert (body.seed, body.temperature, body.asked_max_tokens) == (MAX_SEED, 0.0, 7)
    assert (body.num_choices, body.num_logprobs) == (2, 0)
    assert (body.streams_usage, body.streams_usage_always) == (True, False)
    assert body.sampling.top_k == 0
    plain = completion()
    assert (plain.temperature, plain.seed, plain.stops) == (1.0, None, ())
    assert (plain.num_logprobs, plain.asked_max_tokens) == (None, None)
    assert (plain.streams_usage, plain.streams_usage_always) == (False, False)
    assert completion(stop="x").stops == ("x",)
    assert completion(stop=[]).stops == ()


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        ("", [""]),
        ([1, 0, (1 << 32) - 1], [[1, 0, (1 << 32) - 1]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_a_prompt_is_text_or_ids_once_or_several_times(prompt: Any, prompts: list[Any]) -> None:
    body = completion(prompt=prompt, n=3)
    ids = [each for each in body.prompts if not isinstance(each, str)]
    assert all(each.itemsize == 4 for each in ids), "as large as the queue counts them"
    assert [list(each) if each in ids else each for each in body.prompts] == prompts
    assert body.num_choices == 3 * len(prompts)


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ([1, "a"], "prompt.1"),
        (["a", 1], "prompt.1"),
        ([[1], "a"], "prompt.1"),
        ([[1], []], "prompt.1"),
        ([[1], [1.0]], "prompt.1.0"),
        ([1, True], "prompt.1"),
        ([1, 2.0], "prompt.1"),
        ([-1], "prompt.0"),
        ([1 << 32], "prompt.0"),
        ([None], "prompt.0"),
    ],
)
def test_prompts_of_two_kinds_and_ids_that_are_none_are_refused(prompt: Any, field: str) -> None:
    assert refused(completion, prompt=prompt).field == field


def test_a_chat_s_fields_are_read() -> None:
    assert chat(logprobs=True).num_logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).num_logprobs == 20
    assert chat().num_logprobs is None
    assert chat(max_tokens=3).asked_max_tokens == 3
    assert chat(max_completion_tokens=4).asked_max_tokens == 4
    assert chat(max_tokens=4, max_completion_tokens=4).asked_max_tokens == 4
    assert chat(n=5).num_choices == 5


def test_fields_that_contradict_each_other_are_refused() -> None:
    assert refused(chat, max_tokens=3, max_completion_tokens=4).field == "max_tokens"
    assert refused(chat, top_logprobs=0).field == "top_logprobs"
    assert refused(chat, logprobs=False, top_logprobs=2).field == "top_logprobs"
    for read in (chat, completion):
        assert refused(read, stream_options={}).field == "stream_options"
        assert refused(read, stream=False, stream_options={}).field == "stream_options"
    assert refused(completion, n=2, best_of=3).field == "best_of"
    assert refused(completion, n=1, best_of=True).field == "best_of"
    assert refused(completion, n=[], best_of=[]).field in ("n", "best_of")


def test_stream_options_are_read_and_refused_by_name() -> None:
    body = chat(
        stream=True,
        stream_options={"continuous_usage_stats": True, "include_obfuscation": False},
    )
    assert body.stream_options == StreamOptions(
        continuous_usage_stats=True, include_obfuscation=False
    )
    assert body.streams_usage_always
    for name, value in (("include_usage", 1), ("include_obfuscation", True), ("more", 1)):
        ending = refused(chat, stream=True, stream_options={name: value})
        assert ending.field == f"stream_options.{name}"


def test_a_request_has_so_many_choices_at_most() -> None:
    check_choices(completion(n=4, prompt=["a", "b"]), 8)
    assert refused(check_choices, completion(n=5, prompt=["a", "b"]), 8).field == "n"
    assert refused(check_choices, completion(prompt=["a"] * 9), 8).field == "prompt"
    assert refused(check_choices, chat(n=9), 8).field == "n"


def test_tokenize_takes_a_text_or_a_conversation() -> None:
    text = tokenize_of(b'{"prompt": "a"}')
    assert (text.prompt, text.model, text.adds_special) == ("a", None, True)
    talk = tokenize_of(json.dumps({"model": "m", "messages": [USER]}).encode())
    assert talk.messages == (Message(role="user", content="hello"),)
    assert not talk.adds_special
    assert not tokenize_of(b'{"prompt": "a", "add_special_tokens": false}').adds_special
    for raw in (b"{}", b'{"prompt": "a", "messages": []}', b'{"prompt": 1}'):
        assert refused(tokenize_of, raw).field == "prompt"
    assert refused(tokenize_of, b'{"prompt": "a", "x": 1}').field == "x"


def options(body: Body, defaults: RequestConfig | None = None, **more: Any) -> RequestOptions:
    return options_of(body, defaults or RequestConfig(), max_tokens=9, seed=3, **more)


def test_a_body_becomes_the_options_of_a_request() -> None:
    plain = options(completion(), stop_tokens=(7,))
    assert plain.route == "whole"
    assert (plain.max_tokens, plain.stop_tokens, plain.sampling.seed) == (9, (7,), 3)
    assert (plain.sampling.temperature, plain.sampling.top_p, plain.sampling.top_k) == (1.0, 1.0, 0)
    asked = options(
        chat(
            route="streamed", group_layers=2, digest=True, deadline_s=1.5, prefix="shared",
            on_failure="retry", temperature=0.5, top_p=0.9, top_k=4, ignore_eos=True,
        ),
        stop_tokens=(7,),
        route="chunked",
    )  # fmt: skip
    assert (asked.route, asked.group_layers, asked.digest) == ("streamed", 2, True)
    assert (asked.prefix, asked.on_failure) == ("shared", "retry")
    assert asked.deadline_s is None  # the request's, which counts from its arrival
    assert (asked.sampling.temperature, asked.sampling.top_k) == (0.5, 4)
    assert asked.stop_tokens == ()


def test_a_body_goes_before_a_header_and_that_before_the_configuration() -> None:
    defaults = RequestConfig(route="streamed", group_layers=3, digest=True, prefix="identical")
    assert options(completion(), defaults).route == "streamed"
    assert options(completion(), defaults, route="chunked").route == "chunked"
    body = completion(route="whole", digest=False, prefix="off")
    asked = options(body, defaults, route="chunked")
    assert (asked.route, asked.digest, asked.prefix) == ("whole", False, "off")
    assert options(completion(), defaults).group_layers == 3


def test_auto_sets_by_itself_what_the_configuration_has_for_other_routes() -> None:
    defaults = RequestConfig(group_layers=3, chunk=64)
    asked = options(completion(route="auto"), defaults)
    assert (asked.group_layers, asked.chunk) == (1, 0)
    assert refused(options, completion(route="auto", chunk=8), defaults).field == "chunk"
    assert refused(options, completion(route="auto", group_layers=2)).field == "group_layers"


def test_a_refusal_names_the_field_as_the_body_has_it() -> None:
    asked = Refused("too many", field="max_tokens")
    assert refusal_of(asked, completion()).field == "max_tokens"
    assert refusal_of(asked, chat(max_tokens=1)).field == "max_tokens"
    assert refusal_of(asked, chat(max_completion_tokens=1)).field == "max_completion_tokens"
    assert refusal_of(Refused("no", field="emission"), chat()).field is None
    assert refusal_of(Refused("no"), chat()).field is None


def test_choices_have_seeds_of_their_own() -> None:
    assert [seed_of_choice(5, choice) for choice in range(3)] == [5, 6, 7]
    assert seed_of_choice(MAX_SEED, 1) == 0


VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=8),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)  # fmt: skip
NAMES = sorted({*WRONG_OF_COMPLETIONS, *WRONG_OF_CHAT, "role", "content", "type", "text"})


@given(
    st.sampled_from(READERS),
    st.one_of(
        st.binary(max_size=40),
        st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6).map(
            lambda told: json.dumps({"model": "m", "prompt": "p", **told}).encode()
        ),
        st.lists(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4), max_size=3).map(
            lambda told: json.dumps({"model": "m", "messages": told}).encode()
        ),
    ),
)
def test_any_bytes_are_a_body_or_the_client_s_mistake(read: Reader, raw: bytes) -> None:
    try:
        body = read(raw)
        if not isinstance(body, TokenizeBody):
            assert 1 <= body.num_choices <= 128 * 128
            options_of(body, RequestConfig(), max_tokens=1, seed=0)
    except Ending as exc:
        told = exc
    else:
        return
    assert told.terminal is Terminal.INVALID
    assert len(told.text) <= 400


@pytest.mark.parametrize(
    ("route", "cuts", "field"),
    [
        ("whole", {"group_layers": 2}, "group_layers"),
        ("chunked", {"group_layers": 2}, "group_layers"),
        ("whole", {"chunk": 16}, "chunk"),
        (None, {"chunk": 16}, "chunk"),
        ("whole", {"chunk": 0}, None),
        ("chunked", {"chunk": 16}, None),
        ("streamed", {"chunk": 16, "group_layers": 2}, None),
    ],
)
def test_cuts_that_a_route_does_not_make_are_refused(
    route: str | None, cuts: dict[str, int], field: str | None
) -> None:
    told = {"model": "m", "prompt": "p", **cuts, **({"route": route} if route else {})}
    body = completion_of(json.dumps(told).encode())
    if field is None:
        assert options_of(body, RequestConfig(), max_tokens=1, seed=1).route == route
        return
    with pytest.raises(Ending) as caught:
        options_of(body, RequestConfig(), max_tokens=1, seed=1)
    assert caught.value.field == field
