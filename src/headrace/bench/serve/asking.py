"""Asking a server over HTTP: prompts, streamed answers with the times of their tokens."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from headrace.engine.text import ModelText

if TYPE_CHECKING:
    import httpx

TIMEOUT_S: Final = 300.0
PATH: Final = "/v1/completions"
_TEXT: Final = (
    "water runs down the narrow channel to a wheel that turns all day while people bring grain and "
    "carry flour home before winter comes over the long valley where rivers meet near old bridges"
)


def prompts_of(directory: Path, lengths: Sequence[int], count: int, seed: int) -> list[list[int]]:
    """Prompts of words at random, as ids of the model; lengths in tokens, by turns."""
    codec, draw, vocabulary = ModelText(directory), random.Random(seed), _TEXT.split()
    found = []
    for at in range(count):
        length = lengths[at % len(lengths)]
        words = draw.choices(vocabulary, k=length)  # each has a token at least
        found.append(codec.encode(" ".join(words), add_special=False)[:length])
    return found


def body_of(model: str, prompt: Sequence[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    """A greedy, streamed completion that tells with each chunk how many tokens there are by now."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **more,
    }


@dataclass
class Answer:
    """What came of one request.

    status: 0 where none came. error: the code of an error, or the name of what went wrong with the
    connection. gaps_ns: one for each token after those of the first chunk; tokens that came in one
    chunk share its time equally, and `merged` counts them. finished: `[DONE]` came.
    """

    begun_ns: int
    status: int = 0
    error: str = ""
    in_stream: bool = False
    retry_after: bool = False
    ttft_ns: int | None = None
    gaps_ns: list[int] = field(default_factory=list)
    merged: int = 0
    tokens: int = 0
    text: str = ""
    finished: bool = False
    ended_ns: int = 0
    more: asyncio.Event = field(default_factory=asyncio.Event)
    _last_ns: int = 0

    def hear(self, line: str) -> None:
        """Take a line of the stream."""
        if not line.startswith("data: "):
            return
        told = line[6:]
        if told == "[DONE]":
            self.finished = True
            return
        now_ns = time.perf_counter_ns()
        event = msgspec.json.decode(told)
        if "error" in event:
            self.error, self.in_stream = str(event["error"]["code"]), True
            return
        text = "".join(each["text"] for each in event["choices"])
        usage = event.get("usage") or {}
        new = int(usage.get("completion_tokens", self.tokens)) - self.tokens
        self.text += text
        if new <= 0:
            return
        self.tokens += new
        if self.ttft_ns is None:
            self.ttft_ns = now_ns - self.begun_ns
        else:
            self.gaps_ns += [(now_ns - self._last_ns) // new] * new
            self.merged += new if new > 1 else 0
        self._last_ns = now_ns
        self.more.set()

    @property
    def kind(self) -> str:
        """`ok`, or what went wrong."""
        if self.finished and self.status == 200:
            return "ok"
        where = "in the stream" if self.in_stream else str(self.status)
        return f"{where}: {self.error or 'cut short'}"

    def row(self, origin_ns: int) -> dict[str, Any]:
        """As a row; times from `origin_ns`."""
        return {
            "measure": "request",
            "at_s": round((self.begun_ns - origin_ns) / 1e9, 4),
            "took_ms": round((self.ended_ns - self.begun_ns) / 1e6, 3),
            "status": self.status,
            "kind": self.kind,
            "retry_after": self.retry_after,
            "ttft_ms": None if self.ttft_ns is None else round(self.ttft_ns / 1e6, 3),
            "tokens": self.tokens,
            "merged": self.merged,
            "gaps_us": [ns // 1000 for ns in self.gaps_ns],
        }


def begun() -> Answer:
    """An answer that is waited for from now on."""
    return Answer(time.perf_counter_ns())


async def ask(
    client: httpx.AsyncClient,
    body: Mapping[str, Any],
    *,
    answer: Answer | None = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Ask, and hear the answer to its end; what goes wrong is told by it."""
    import httpx

    answer = answer or begun()
    try:
        async with client.stream("POST", PATH, json=body, headers=headers) as response:
            answer.status = response.status_code
            if response.status_code == 200:
                async for line in response.aiter_lines():
                    answer.hear(line)
            else:
                answer.retry_after = "retry-after" in response.headers
                answer.error = _code_of(await response.aread())
    except httpx.HTTPError as exc:
        answer.error = type(exc).__name__
    answer.ended_ns = time.perf_counter_ns()
    return answer


def client_of(url: str, key: str | None = None) -> httpx.AsyncClient:
    """A client without a limit of its own on connections."""
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(
        base_url=url, timeout=TIMEOUT_S, limits=limits, headers=headers, trust_env=False
    )


async def texts_of(client: httpx.AsyncClient, bodies: Sequence[Mapping[str, Any]]) -> list[str]:
    """Ask for these one after the other; their texts.

    Raises:
        RequestFailed: one did not finish.
    """
    from headrace.bench.stand import RequestFailed

    texts = []
    for body in bodies:
        answer = await ask(client, body)
        if answer.kind != "ok":
            raise RequestFailed(f"a request alone ended as {answer.kind}")
        texts.append(answer.text)
    return texts


def _code_of(content: bytes) -> str:
    try:
        return str(msgspec.json.decode(content)["error"]["code"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return "no error body"
