"""Where a request is prefilled, and what its body becomes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.proxy import asking
from headrace.proxy.asking import PREFILLER_HEADER, Asked, Prompt, fields_of, prompt_tokens
from headrace.proxy.config import ProxyConfig
from headrace.server.config import HttpConfig
from headrace.server.http import Headers
from headrace.server.terminals import Ending

REMOTE = {"do_remote_prefill": True, "do_remote_decode": False}


def config(**more: Any) -> ProxyConfig:
    return ProxyConfig(decoders=("http://one:1",), http=HttpConfig(), **more)


def asked_of(raw: bytes, headers: Headers, config: ProxyConfig, of: Prompt = "prompt") -> Asked:
    return asking.asked_of(raw, headers, config, of)


def encoded(**body: Any) -> bytes:
    return json.dumps(body).encode()


def test_a_completion_is_prefilled_remotely_and_its_fields_stay_as_written() -> None:
    raw = b'{"prompt": "h\\u00e9", "temperature": 1.50, "seed": 123456789012345678901234567890}'
    asked = asked_of(raw, [], config())
    assert asked.where == "remote"
    assert json.loads(asked.body) == {**json.loads(raw), "kv_transfer_params": REMOTE}
    for written in (b'"h\\u00e9"', b"1.50", b"123456789012345678901234567890"):
        assert written in asked.body


def test_the_route_is_told_to_the_connector() -> None:
    asked = asked_of(encoded(prompt="x"), [], config(route="streamed"))
    assert json.loads(asked.body)["kv_transfer_params"] == {**REMOTE, "headrace_route": "streamed"}


@pytest.mark.parametrize("own", [{}, {"do_remote_prefill": False}, {"headrace_route": "whole"}, 1])
def test_a_clients_own_word_stands(own: Any) -> None:
    raw = encoded(prompt="x", kv_transfer_params=own)
    assert asked_of(raw, [], config(route="streamed", min_tokens=9)) == (raw, "client")


def test_null_is_as_good_as_no_word() -> None:
    asked = asked_of(b'{"kv_transfer_params": null}', [], config())
    assert json.loads(asked.body) == {"kv_transfer_params": REMOTE}


def test_vllm_is_told_to_prefill_whatever_its_connector_would_do() -> None:
    given = config(prefill="local", route="streamed")
    asked = asked_of(encoded(prompt="x"), [(PREFILLER_HEADER, b"h:1")], given)
    assert asked.where == "local"
    local = {"do_remote_prefill": False}
    assert json.loads(asked.body) == {"prompt": "x", "kv_transfer_params": local}


def test_by_header_it_counts_whether_it_is_there() -> None:
    raw, by_header = encoded(prompt="x"), config(prefill="by-header")
    assert asked_of(raw, [], by_header).where == "local"
    assert asked_of(raw, [(PREFILLER_HEADER, b"10.0.0.1:8100")], by_header).where == "remote"


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": [1, 2, 3]}, 3),
        ({"prompt": [[1], [1, 2]]}, 2),
        ({"prompt": "x" * 40}, 10),
        ({"prompt": "é" * 20}, 10),
        ({"prompt": ["x" * 8, "x" * 40]}, 10),
        ({"prompt": []}, 0),
        ({"prompt": 7}, 0),
        ({}, 0),
        ({"messages": [{"content": "x" * 20}, {"content": "x" * 20}]}, 10),
        ({"messages": [{"content": [{"type": "text", "text": "x" * 40}, {"image": "y"}]}]}, 10),
        ({"messages": [{"content": None}, {}, 3]}, 0),
        ({"messages": 3}, 0),
    ],
)
def test_prompts_are_counted_about(body: dict[str, Any], tokens: int) -> None:
    of: Prompt = "messages" if "messages" in body else "prompt"
    assert prompt_tokens(fields_of(encoded(**body)), of) == tokens


@pytest.mark.parametrize(("least", "where"), [(10, "remote"), (11, "local")])
def test_short_prompts_are_prefilled_by_vllm(least: int, where: str) -> None:
    raw = encoded(prompt="x" * 40)
    assert asked_of(raw, [], config(min_tokens=least)).where == where


@pytest.mark.parametrize(("of", "where"), [("prompt", "local"), ("messages", "remote")])
def test_the_endpoint_says_which_field_is_the_prompt(of: Prompt, where: str) -> None:
    raw = encoded(prompt="x", messages=[{"content": "x" * 400}])
    assert asked_of(raw, [], config(min_tokens=10), of).where == where


@pytest.mark.parametrize("number", [b"1e999", b"[1, 2, 1e400]", b'[["a"], -1e999]'])
@pytest.mark.parametrize("of", ["prompt", "messages"])
def test_a_number_that_cannot_be_read_is_refused_where_it_is_read(
    number: bytes, of: Prompt
) -> None:
    raw = b'{"%s": %s}' % (of.encode(), number)
    with pytest.raises(Ending, match=f"field `{of}` is no JSON that can be read") as refused:
        asked_of(raw, [], config(min_tokens=1), of)
    assert (refused.value.status, refused.value.field) == (400, of)
    assert number in asked_of(raw, [], config(), of).body


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"nothing", b'{"a": "\xff"}', b'{"a":' + b"[" * 100_000, b'{"a": NaN}', b"{} {}"],
)
def test_a_body_that_is_no_json_is_refused(raw: bytes) -> None:
    with pytest.raises(Ending, match="the body is no JSON: ") as refused:
        asked_of(raw, [], config())
    assert refused.value.status == 400


@pytest.mark.parametrize("raw", [b"[]", b"1", b'"{}"', b"null"])
def test_a_body_that_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(Ending, match="JSON and no object") as refused:
        fields_of(raw)
    assert refused.value.status == 400


def test_a_prompt_nested_as_deep_as_can_be_read_is_counted_or_refused() -> None:
    refused = set()
    for depth in range(1, 1100):
        raw = b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}"
        try:
            assert asked_of(raw, [], config(min_tokens=1)).where in ("local", "remote")
        except Ending as exc:
            refused.add(exc.field)
    assert refused <= {None, "prompt"}
