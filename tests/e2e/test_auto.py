"""Route `auto` through real processes: it changes when bytes move and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from headrace.cli import run_command
from headrace.messages import RouteChoice
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.requests import Request, RequestOptions
from tests.e2e.test_replay import GEOMETRY, served

AUTO = RequestOptions(route="auto", max_tokens=1, audit=True)
LARGE: dict[str, Any] = {"layers": 16, "heads": 8, "head_dim": 128, "layer_ms": 4.0}


@contextmanager
def owner_of(geometry: dict[str, Any], context: int) -> Iterator[DecoderOwner]:
    with served(geometry, context=context) as owner:
        yield owner


def served_by(owner: DecoderOwner, options: RequestOptions, num_tokens: int) -> Request:
    request = owner.submit([token % 7 for token in range(num_tokens)], options)
    owner.run_until_done(request)
    assert request.outcome == "finished", request.reason
    owner.drain()
    return request


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("prefill_chunk", [0, 16])
@pytest.mark.parametrize("digest", [False, True])
def test_it_gives_what_the_other_routes_give(prefill_chunk: int, digest: bool) -> None:
    with owner_of(GEOMETRY, 96) as owner:
        options = replace(AUTO, prefill_chunk=prefill_chunk, digest=digest)
        whole = served_by(owner, replace(options, route="whole"), 90)
        auto = served_by(owner, options, 90)
        assert (auto.tokens, auto.kv_digests) == (whole.tokens, whole.kv_digests)
        assert whole.choice is None
        assert isinstance(auto.choice, RouteChoice)
        assert auto.choice.reason
        assert owner.statistics()["auto"] == {auto.choice.route: 1}


@pytest.mark.usefixtures("nothing_left")
def test_a_long_prompt_is_streamed_and_a_short_one_is_not() -> None:
    with owner_of(LARGE, 2048) as owner:
        for _ in range(3):  # one of which goes whole, to be measured
            long = served_by(owner, AUTO, 2048)
        short = served_by(owner, AUTO, 1)
        assert long.choice is not None
        assert short.choice is not None
        assert long.measured is not None
        assert (long.choice.route, short.choice.route) == ("streamed", "whole")
        assert "compute" in long.choice.reason
        assert long.measured.groups > 1


@pytest.mark.usefixtures("nothing_left")
def test_a_later_attempt_is_chosen_for_anew() -> None:
    failing = {**GEOMETRY, "fail_at_layer": 3}
    with owner_of(failing, 96) as owner:
        request = owner.submit([1] * 90, replace(AUTO, on_failure="retry", max_attempts=2))
        owner.run_until_done(request)
        assert (request.outcome, len(request.attempts)) == ("failed", 1)
        assert sum(owner.statistics()["auto"].values()) == 2


def test_the_command_tells_the_choice_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["run", "--source", "replay", "--decoder", "null", "--max-tokens", "1"]
    assert run_command([*asked, "--prompt", "to be or not", "--route", "auto", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["route"] == "auto"
    assert told["auto"]["route"] in ("whole", "streamed")
    assert told["auto"]["reason"]
    assert run_command([*asked, "--prompt", "to be or not", "--route", "auto"]) == 0
    assert "auto took" in capsys.readouterr().err
