"""Options are refused by their name, and before any process hears of them."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from headrace.backends.null import decoder_like
from headrace.backends.replay import open as open_replay
from headrace.errors import Refused
from headrace.geometry import MAX_POSITIONS, Manifest
from headrace.ids import RequestId
from headrace.messages import MAX_ATTEMPTS, MAX_LOGPROBS, Route, Sampling
from headrace.protocol.admission import FailurePolicy
from headrace.runtime.requests import Request, RequestOptions


def source(**changes: Any) -> Manifest:
    manifest = open_replay({"layers": 2}).manifest()
    fields = {name: getattr(manifest, name) for name in manifest.__struct_fields__}
    return Manifest(**fields | changes)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"route": "chunked", "chunk": 0, "prefill_chunk": 7},
        {"route": "streamed", "group_layers": 99, "emission": "cache_groups"},
        {"max_tokens": 0, "hold": True, "deadline_s": 1.5},
        {"sampling": Sampling(temperature=0.5), "audit": True},
        {"logprobs": 0},
        {"logprobs": MAX_LOGPROBS, "sampling": Sampling(temperature=0.5)},
    ],
)
def test_what_makes_sense_passes(options: dict[str, Any]) -> None:
    RequestOptions(**options).check(source(), decoder_like(source()))


@pytest.mark.parametrize(
    ("options", "field", "text"),
    [
        ({"route": "sideways"}, "route", "'sideways' is not one of whole, chunked, streamed"),
        ({"emission": "by luck"}, "emission", "'by luck' is not one of layers, cache_groups"),
        ({"group_layers": 0}, "group_layers", "group_layers is 0; it is a count from 1"),
        ({"chunk": -1}, "chunk", "chunk is -1; it is a count from 0"),
        ({"chunk": 1.5}, "chunk", "chunk is 1.5"),
        ({"chunk": True}, "chunk", "chunk is True"),
        ({"chunk": MAX_POSITIONS}, "chunk", f"from 0 to {MAX_POSITIONS - 1}"),
        ({"prefill_chunk": -7}, "prefill_chunk", "prefill_chunk is -7"),
        ({"max_tokens": -1}, "max_tokens", "max_tokens is -1"),
        ({"deadline_s": float("nan")}, "deadline_s", "deadline_s is nan"),
        ({"deadline_s": 1e300}, "deadline_s", "deadline_s is 1e"),
        ({"on_failure": "hope"}, "on_failure", "'hope' is not one of fail, retry, local"),
        ({"max_attempts": 0}, "max_attempts", "max_attempts is 0; it is a count from 1 to 16"),
        ({"max_attempts": MAX_ATTEMPTS + 1}, "max_attempts", "max_attempts is 17"),
        ({"max_attempts": None}, "max_attempts", "max_attempts is None"),
        ({"logprobs": -1}, "logprobs", "logprobs is -1; it is a count from 0 to 20, or None"),
        ({"logprobs": MAX_LOGPROBS + 1}, "logprobs", "logprobs is 21"),
        ({"logprobs": True}, "logprobs", "logprobs is True"),
        ({"logprobs": 1.0}, "logprobs", "logprobs is 1.0"),
    ],
)
def test_what_makes_none_is_refused_by_name(options: dict[str, Any], field: str, text: str) -> None:
    with pytest.raises(Refused) as caught:
        RequestOptions(**options).check(source(), decoder_like(source()))
    assert caught.value.field == field
    assert text in str(caught.value)


def test_what_a_whole_source_cannot_do() -> None:
    whole = source(emits=())
    RequestOptions().check(whole, decoder_like(source()))
    for route in ("chunked", "streamed"):
        with pytest.raises(Refused, match="gives whole results only") as caught:
            RequestOptions(route=route).check(whole, decoder_like(source()))
        assert caught.value.field == "route"


def test_an_emission_that_the_source_lacks() -> None:
    layers_only, both = source(emits=("layers",)), decoder_like(source())
    RequestOptions(route="chunked", emission="cache_groups").check(layers_only, both)
    with pytest.raises(Refused, match="this source does not take cache_groups") as caught:
        RequestOptions(route="streamed", emission="cache_groups").check(layers_only, both)
    assert caught.value.field == "emission"


def test_an_emission_that_the_decoder_lacks() -> None:
    decoder = replace(decoder_like(source()), emits=("layers",))
    RequestOptions(emission="cache_groups").check(source(), decoder)
    RequestOptions(route="streamed").check(source(), decoder)
    with pytest.raises(Refused, match="this decoder does not take cache_groups") as caught:
        RequestOptions(route="streamed", emission="cache_groups").check(source(), decoder)
    assert caught.value.field == "emission"


@pytest.mark.parametrize("side", ["source", "decoder"])
@pytest.mark.parametrize("route", ["whole", "chunked", "streamed"])
def test_a_digest_needs_both_sides(side: str, route: Route) -> None:
    pair = {"source": source(), "decoder": decoder_like(source())}
    RequestOptions(route=route, digest=True).check(**pair)
    pair[side] = replace(pair[side], digests=())
    RequestOptions(route=route).check(**pair)
    with pytest.raises(Refused, match=f"this {side} has no crc32 digests") as caught:
        RequestOptions(route=route, digest=True).check(**pair)
    assert caught.value.field == "digest"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"sampling": Sampling(temperature=0.5)}, "temperature"),
        ({"audit": True}, "audit"),
        ({"logprobs": 0}, "logprobs"),
    ],
)
def test_what_needs_logits_is_refused_by_a_token_source(
    options: dict[str, Any], field: str
) -> None:
    token_only = source(first="token")
    RequestOptions().check(token_only, decoder_like(source()))
    with pytest.raises(Refused, match=f"no logits, which {field} needs") as caught:
        RequestOptions(**options).check(token_only, decoder_like(source()))
    assert caught.value.field == field


def test_a_request_is_done_once_it_has_an_outcome() -> None:
    request = Request(RequestId(1, 2), 3, RequestOptions())
    assert not request.done
    request.outcome = "failed"
    assert request.done


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({}, FailurePolicy(1, local=False)),
        ({"max_attempts": 9}, FailurePolicy(1, local=False)),
        ({"on_failure": "retry"}, FailurePolicy(3, local=False)),
        ({"on_failure": "retry", "max_attempts": 9}, FailurePolicy(9, local=False)),
        ({"on_failure": "local", "max_attempts": 9}, FailurePolicy(1, local=True)),
    ],
)
def test_what_the_machine_is_told_of_failures(
    options: dict[str, Any], policy: FailurePolicy
) -> None:
    assert RequestOptions(**options).policy == policy
