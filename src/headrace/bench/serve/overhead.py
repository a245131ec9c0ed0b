"""What HTTP adds: the same requests through a server, and through an owner of this process's own.

The second way is that of `headrace run`: the router in this process submits to an owner process and
takes tokens as they come. Both owners are up all the time, and one request at a time runs, by turns
in A/B/B/A order. The server does all that it does by default: it traces each request for its page,
and asks its owner once a second what it holds.

A prefill takes a few percent more or less each time, which is more than HTTP adds. So each request
over HTTP also tells how much of its own time to the first token its owner did not have: the time
that the client read, less what `headrace_request_prefill_time_seconds` grew by.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final, cast

from headrace.backends.load import size_options
from headrace.bench.rows import busy_share
from headrace.bench.serve.asking import PATH, TIMEOUT_S, Answer, begun, body_of, prompts_of
from headrace.bench.serve.child import Served
from headrace.bench.serve.holding import Write
from headrace.bench.serve.setting import Setting
from headrace.bench.stand import RequestFailed, load_1min
from headrace.messages import AskedRoute
from headrace.runtime.config import OwnerConfig, SourceConfig
from headrace.runtime.pairs import (
    REPLAY,
    dtype_for,
    interpreter_for,
    interpreter_for_decoder,
    options_for,
    options_of,
)
from headrace.runtime.requests import RequestOptions
from headrace.runtime.router import OwnerClient
from headrace.runtime.supervisor import RestartPolicy

if TYPE_CHECKING:
    import httpx

_OWNERS_TIME: Final = "headrace_request_prefill_time_seconds_sum"
ARMS: Final = ("library", "http", "http", "library")


async def run(setting: Setting, write: Write) -> None:
    """Start both, and measure; nothing else runs in this process meanwhile."""
    config = setting.config()
    write({"measure": "config", "config": setting.told(config)})
    with Served(config) as served:
        measure(served, setting, write)


def measure(served: Served, setting: Setting, write: Write) -> None:
    """Requests of each prompt length in turns; the first round of each is a warm-up."""
    import httpx

    owner = owner_config(setting)
    interpreter = interpreter_for_decoder(setting.decoder, None, owner.decoder_options)
    with (
        closing(OwnerClient(owner, interpreter=interpreter)) as library,
        httpx.Client(base_url=served.url, timeout=TIMEOUT_S, trust_env=False) as http,
    ):
        library.start()
        for row in _rows(library, http, setting):
            write(row)


def _rows(library: OwnerClient, http: httpx.Client, setting: Setting) -> Iterator[dict[str, Any]]:
    sizes = setting.sizes
    for length in sizes.overhead_prompts:
        (prompt,) = prompts_of(setting.directory, (length,), 1, setting.seed)
        texts = set()
        for repeat in range(-1, sizes.overhead_repeats):
            for order, arm in enumerate(ARMS):
                busy = busy_share(0.05)
                outside_ms = None
                if arm == "http":
                    answer, outside_ms = _over_http(http, setting, prompt)
                    texts.add(answer.text)
                else:
                    answer = _by_library(library, setting, prompt)
                if repeat < 0:
                    continue
                row = answer.row(answer.begun_ns)
                row |= {"measure": "paired", "arm": arm, "order": order, "repeat": repeat}
                row |= {"outside_ms": outside_ms}
                row |= {"prompt": length, "busy_before": round(busy, 3), "load_1min": load_1min()}
                yield row
        if len(texts) != 1:
            raise RequestFailed(f"one greedy request was answered in {len(texts)} ways")


def _over_http(http: httpx.Client, setting: Setting, prompt: Sequence[int]) -> tuple[Answer, float]:
    """The answer, and how much of its time to the first token its owner did not have, ms."""
    body = body_of(setting.model, prompt, setting.sizes.overhead_tokens)
    had_s = _owners_s(http)
    answer = begun()
    with http.stream("POST", PATH, json=body) as response:
        answer.status = response.status_code
        for line in response.iter_lines():
            answer.hear(line)
    answer.ended_ns = time.perf_counter_ns()
    if answer.kind != "ok" or answer.ttft_ns is None:
        raise RequestFailed(f"a request over HTTP ended as {answer.kind}")
    owners_s = _owners_s(http) - had_s
    return answer, round(answer.ttft_ns / 1e6 - 1e3 * owners_s, 3)


def _owners_s(http: httpx.Client) -> float:
    """Times to the first token that the server's owner had so far, added up, s."""
    lines = http.get("/metrics").raise_for_status().text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(_OWNERS_TIME))


def _by_library(library: OwnerClient, setting: Setting, prompt: Sequence[int]) -> Answer:
    options = RequestOptions(
        route=cast(AskedRoute, setting.route), max_tokens=setting.sizes.overhead_tokens
    )
    answer = begun()
    last_ns = answer.begun_ns

    def came(_token: int) -> bool:
        nonlocal last_ns
        now_ns = time.perf_counter_ns()
        if answer.ttft_ns is None:
            answer.ttft_ns = now_ns - answer.begun_ns
        else:
            answer.gaps_ns.append(now_ns - last_ns)
        answer.tokens += 1
        last_ns = now_ns
        return False

    result = library.result(library.submit(prompt, options), came)
    answer.ended_ns = time.perf_counter_ns()
    if result.ended.outcome != "finished":
        raise RequestFailed(
            f"a request by the library {result.ended.outcome}: {result.ended.reason}"
        )
    answer.status, answer.finished = 200, True
    return answer


def owner_config(setting: Setting) -> OwnerConfig:
    """What the owner is started with: as `headrace run` does, with the server's sizes."""
    dtype = dtype_for(setting.source, None)
    model = {"model": str(setting.directory), "dtype": dtype, "threads": setting.threads}
    source = options_for(setting.source, model)
    if setting.source == REPLAY:
        source["vocab_size"] = 256
    return OwnerConfig(
        decoder=setting.decoder,
        decoder_options={
            **options_of(setting.decoder, model, compiled=None),
            **size_options(setting.decoder, lanes=setting.lanes, context=setting.context),
            **setting.decoder_options,
        },
        sources=(
            SourceConfig(
                setting.source,
                {**source, **setting.source_options},
                python=interpreter_for(setting.source, None),
                num_slots=setting.slots,
            ),
        ),
        context=setting.context,
        restart=RestartPolicy(),
    )
