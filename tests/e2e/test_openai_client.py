"""The `openai` package against a real server: what its users write is what is tested here."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")

import httpx
import openai

from tests.served import CONTEXT, MODEL, Served, Steps, decoder_table

GREETING: Any = [{"role": "user", "content": "hi"}]
TEXT = "EFGHIJKL"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("served"), decoder_table(lanes=4)) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client: Any, **more: Any) -> Any:
    """Greedy and of 8 tokens, unless `more` says otherwise."""
    asked = {"model": MODEL, "prompt": "hi", "max_tokens": 8, "temperature": 0} | more
    return client.completions.create(**asked)


def chat(client: Any, **more: Any) -> Any:
    asked = {"model": MODEL, "messages": GREETING, "max_tokens": 8, "temperature": 0} | more
    return client.chat.completions.create(**asked)


def test_a_completion_and_its_usage(client: Any) -> None:
    said = complete(client)
    assert (said.choices[0].text, said.choices[0].finish_reason) == (TEXT, "length")
    usage = said.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (2, 8, 10)
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert usage.prompt_tokens_details.transferred_tokens == 2
    assert said.id.startswith("cmpl-")


def test_a_chat_and_its_stream_say_the_same(client: Any) -> None:
    said = chat(client).choices[0]
    assert (said.message.role, said.finish_reason) == ("assistant", "length")
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == said.message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 8)


def test_the_chat_template_makes_the_prompt(client: Any, served: Served) -> None:
    usage = chat(client).usage
    prompt = "user: hi\nassistant: "
    assert usage.prompt_tokens == len(prompt)
    told = httpx.post(f"{served.url}/tokenize", json={"model": MODEL, "messages": GREETING}).json()
    assert bytes(told["tokens"]).decode() == prompt
    assert (
        complete(client, prompt=prompt).choices[0].text == chat(client).choices[0].message.content
    )


def test_a_stream_of_a_completion(client: Any) -> None:
    chunks = list(complete(client, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_async_whole_and_streamed_side_by_side(served: Served) -> None:
    async def test() -> None:
        url = f"{served.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

            async def streamed() -> str:
                stream = await complete(client, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            async def whole() -> str:
                return str((await complete(client)).choices[0].text)

            assert await asyncio.gather(*(f() for f in [streamed, whole] * 4)) == [TEXT] * 8

    asyncio.run(test())


def test_several_choices_and_prompts(client: Any) -> None:
    said = complete(client, n=3)
    assert [(each.index, each.text) for each in said.choices] == [(at, TEXT) for at in range(3)]
    assert (said.usage.prompt_tokens, said.usage.completion_tokens) == (2, 24)
    several = complete(client, prompt=["hi", "abc"])
    assert several.choices[0].text == TEXT != several.choices[1].text
    assert complete(client, prompt=[[104, 105]] * 2).choices[1].text == TEXT
    by_index = dict.fromkeys(range(2), "")
    for chunk in complete(client, n=2, stream=True):
        by_index[chunk.choices[0].index] += chunk.choices[0].text
    assert by_index == {0: TEXT, 1: TEXT}


@pytest.mark.parametrize("stop", ["GH", ["zz", "GH"]])
def test_a_stop_string_ends_the_text_before_it(client: Any, stop: Any) -> None:
    said = complete(client, stop=stop)
    assert (said.choices[0].text, said.choices[0].finish_reason) == ("EF", "stop")
    assert said.usage.prompt_tokens_details.transferred_tokens == 2
    assert "".join(c.choices[0].text for c in complete(client, stop=stop, stream=True)) == "EF"


def test_a_seed_makes_samples_again(client: Any) -> None:
    def sampled(seed: int) -> list[str]:
        said = complete(client, seed=seed, temperature=1.0, n=2)
        return [each.text for each in said.choices]

    first = sampled(1)
    assert sampled(1) == first
    assert sampled(2) != first
    assert first[0] != first[1]


def test_logprobs_in_both_styles(client: Any) -> None:
    logprobs = complete(client, logprobs=2).choices[0].logprobs
    assert "".join(logprobs.tokens) == TEXT
    assert logprobs.text_offset == list(range(8))
    assert all(value < 0 for value in logprobs.token_logprobs)
    assert [len(top) for top in logprobs.top_logprobs] == [2] * 8
    content = chat(client, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert [len(each.top_logprobs) for each in content] == [3] * 8
    assert all(each.top_logprobs[0].logprob >= each.logprob for each in content)
    assert chat(client).choices[0].logprobs is None


def test_models_are_listed_and_found(client: Any) -> None:
    names = [model.id for model in client.models.list()]
    assert names == [MODEL, "left"]
    model = client.models.retrieve(MODEL)
    assert (model.id, model.max_model_len) == (MODEL, CONTEXT)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody's")


def test_raw_responses_carry_the_ids_of_the_client(client: Any) -> None:
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt="hi", max_tokens=1, extra_headers={"X-Request-Id": "mine"}
    )
    assert (raw.status_code, raw.headers["x-request-id"]) == (200, "mine")
    assert raw.parse()._request_id == "mine"


MISTAKES: list[tuple[type[Exception], dict[str, Any], str | None]] = [
    (openai.BadRequestError, {"temperature": 3}, "temperature"),
    (openai.BadRequestError, {"frequency_penalty": 1.5}, "frequency_penalty"),
    (openai.BadRequestError, {"extra_body": {"guided_json": {}}}, "guided_json"),
    (openai.BadRequestError, {"max_tokens": CONTEXT}, "prompt"),
    (openai.BadRequestError, {"prompt": ""}, "prompt"),
    (openai.BadRequestError, {"prompt": [999]}, "prompt"),
    (openai.BadRequestError, {"extra_headers": {"X-Headrace-Route": "?"}}, "x-headrace-route"),
    (openai.NotFoundError, {"model": "nobody's"}, "model"),
]


@pytest.mark.parametrize(("kind", "more", "field"), MISTAKES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_mistake_is_an_error_of_its_class_that_names_the_field(
    client: Any, kind: type[Exception], more: dict[str, Any], field: str, stream: bool
) -> None:
    with pytest.raises(kind) as told:
        complete(client, stream=stream, **more)
    error: Any = told.value
    assert error.param == field
    assert error.code in ("invalid", "unknown-model")


def test_routes_by_field_and_header_say_the_same(client: Any) -> None:
    for route in ("whole", "chunked", "streamed", "auto"):
        by_field = complete(client, extra_body={"route": route}).choices[0].text
        by_header = complete(client, extra_headers={"X-Headrace-Route": route}).choices[0].text
        assert (by_field, by_header) == (TEXT, TEXT)


# A server whose decode steps are let through one by one.


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[tuple[Served, Steps]]:
    steps = Steps(tmp_path / "steps")
    queue = "[queue]\nmax_requests = 1\n"
    restart = "[restart]\nfirst_delay_s = 0.01\n"
    table = decoder_table(lanes=1, slots=1, steps=str(steps.path))
    with Served(tmp_path, table, queue, restart) as served:
        yield served, steps
        steps.open()


def until_one_waits(served: Served) -> None:
    def waits() -> bool:
        return bool(httpx.get(f"{served.url}/status").json()["queue"]["waiting"])

    served.until(waits, "a request waits")


def waiting_request(served: Served) -> socket.socket:
    """A request whose client does not read, once it waits in the queue."""
    body = json.dumps({"model": MODEL, "prompt": "hi"})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Length: {len(body)}\r\n\r\n"
    sock = socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])))
    sock.sendall((head + body).encode())
    until_one_waits(served)
    return sock


async def cancelled_while_it_waits(served: Served) -> None:
    url = f"{served.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        task = asyncio.ensure_future(complete(client))
        await asyncio.to_thread(until_one_waits, served)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()


def test_leaving_timing_out_a_full_queue_and_a_failure_in_a_stream(
    gated: tuple[Served, Steps],
) -> None:
    """One server with one lane, in the order in which its states follow each other."""
    served, steps = gated
    url = f"{served.url}/v1"
    steps.allow(1)
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        stream = complete(client, stream=True, max_tokens=100)
        assert next(stream).choices[0].text
        with pytest.raises(openai.APITimeoutError):  # it waits for the lane
            complete(client.with_options(timeout=0.2))
        served.wait_for("client-left 499")
        stream.close()
        served.wait_for("client-left 499", 2)

        steps.allow(2)  # one for the stream that was left, which is withdrawn between two steps
        stream = complete(client, stream=True, max_tokens=100)
        assert next(stream).choices[0].text
        with waiting_request(served):
            with pytest.raises(openai.RateLimitError) as full:
                complete(client)
            assert full.value.code == "queue-full"
            assert int(full.value.response.headers["retry-after"]) == 1
            with pytest.raises(openai.RateLimitError):  # comes again when it was told to
                complete(client.with_options(max_retries=1))
            served.wait_for("queue-full 429", 3)
        served.wait_for("client-left 499", 3)
        asyncio.run(cancelled_while_it_waits(served))
        served.wait_for("client-left 499", 4)

        os.kill(served.owners()[0], signal.SIGKILL)
        with pytest.raises(openai.APIError) as failed:
            list(stream)
        assert failed.value.code == "owner-died"
        assert not isinstance(failed.value, openai.APIStatusError)  # the status was sent, as 200
        steps.open()
        served.wait_for("decoder left: ready", 2)
        assert complete(client).choices[0].text == TEXT


# A real model.


@pytest.mark.real_model
def test_texts_of_a_real_model_are_those_of_run(tmp_path: Path) -> None:
    """Through HTTP, on both routes, to the letter what `headrace run` says of the same prompt."""
    prompt, asked = "The capital of France is", ["--model=smollm2-135m", "--context=128"]
    from tests.e2e.real_models import directory_of

    directory_of("smollm2-135m")  # or it is skipped
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "headrace",
            "run",
            *asked,
            "--json",
            "--max-tokens=6",
            f"--prompt={prompt}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    expected = json.loads(run.stdout)["text"]
    with (
        Served(tmp_path, arguments=["--port=0", "--lanes=1", *asked]) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):
        for route in ("whole", "streamed"):
            more: Any = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": 6}
            more["extra_body"] = {"route": route}
            assert complete(client, **more).choices[0].text == expected
            chunks = complete(client, stream=True, **more)
            assert "".join(chunk.choices[0].text for chunk in chunks) == expected
