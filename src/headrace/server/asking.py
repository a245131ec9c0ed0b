"""From a body to what is asked of the owners: prompts as ids, options, deadline."""

from __future__ import annotations

import asyncio
import math
import re
import secrets
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast, get_args

from headrace.errors import Refused
from headrace.messages import AskedRoute
from headrace.runtime.requests import RequestOptions
from headrace.server.bodies import (
    MAX_SEED,
    Body,
    ChatBody,
    options_of,
    seed_of_choice,
)
from headrace.server.config import ServeConfig
from headrace.server.dispatch import Asked
from headrace.server.encoding import Encoding
from headrace.server.http import Receive
from headrace.server.models import ServedModel
from headrace.server.terminals import Ending, Terminal

MESSAGE_COST = 64  # what rendering one costs beside its text, in characters
ROUTE_HEADER = "x-headrace-route"
DEADLINE_HEADER = "x-headrace-deadline"
_SECONDS = re.compile(r"[0-9]{1,10}(\.[0-9]{0,9})?")


async def asked_of(
    request: int,
    client: str,
    body: Body,
    model: ServedModel,
    headers: Mapping[str, str],
    config: ServeConfig,
    encoding: Encoding,
    receive: Receive,
) -> Asked:
    """What a good body asks for, choice by choice.

    headers: those named above, where they were sent; the body's own fields outrank them.
    receive: of its request.

    Raises:
        Ending: as INVALID, with the field at fault; its deadline passed, or its client left.
    """
    route, deadline_s = _route_of(headers), _deadline_of(headers)
    deadline_s = body.deadline_s or deadline_s or config.queue.deadline_s
    deadline_ns = None if deadline_s is None else time.monotonic_ns() + int(deadline_s * 1e9)
    try:
        async with asyncio.timeout(deadline_s):
            prompts = await _prompts_of(client, body, model, encoding, receive)
    except TimeoutError:
        text = "its deadline passed before its text was encoded"
        raise Ending(Terminal.DEADLINE, text) from None
    choices = [prompt for prompt in prompts for _ in range(body.n)]
    options = _options_of(body, model, [len(prompt) for prompt in choices], route, config)
    return Asked(request, client, model.name, choices, options, deadline_ns)


def _options_of(
    body: Body,
    model: ServedModel,
    lengths: Sequence[int],
    route: AskedRoute | None,
    config: ServeConfig,
) -> list[RequestOptions]:
    """Of each choice; the deadline is the request's, and kept apart."""
    seed = secrets.randbelow(MAX_SEED) if body.seed is None else body.seed
    return [
        replace(
            options_of(
                body,
                config.requests,
                max_tokens=_max_tokens(body, model, length, config),
                seed=seed_of_choice(seed, choice),
                stop_tokens=model.codec.stop_tokens,
                route=route,
            ),
            trace=config.page.recent > 0,
            logprobs=body.num_logprobs,
            deadline_s=None,
        )
        for choice, length in enumerate(lengths)
    ]


async def _prompts_of(
    client: str, body: Body, model: ServedModel, encoding: Encoding, receive: Receive
) -> list[array[int]]:
    field = "messages" if isinstance(body, ChatBody) else "prompt"
    try:
        work = partial(_encoded, body, model)
        prompts = await encoding.run(work, _num_characters(body), client, receive)
    except Refused as exc:
        raise Ending(Terminal.INVALID, str(exc), field=exc.field or field) from exc
    for prompt in prompts:
        model.check(prompt, field)
    return prompts


def _encoded(body: Body, model: ServedModel) -> list[array[int]]:
    if isinstance(body, ChatBody):
        messages = [{"role": each.role, "content": each.content} for each in body.messages]
        return [model.encode_chat(messages)]
    return [model.encode(each) if isinstance(each, str) else each for each in body.prompts]


def _num_characters(body: Body) -> int:
    """What encoding costs, of all texts together; ids need none."""
    if isinstance(body, ChatBody):
        return sum(MESSAGE_COST + len(each.content) for each in body.messages)
    return sum(len(each) for each in body.prompts if isinstance(each, str))


def _max_tokens(body: Body, model: ServedModel, num_tokens: int, config: ServeConfig) -> int:
    asked = body.asked_max_tokens
    chat = isinstance(body, ChatBody)
    room = model.room(num_tokens, asked, "messages" if chat else "prompt")
    if asked is None and not chat:
        return min(room, config.requests.max_tokens)
    return room


def _route_of(headers: Mapping[str, str]) -> AskedRoute | None:
    route = headers.get(ROUTE_HEADER, "")
    if not route:
        return None
    if route not in get_args(AskedRoute):
        known = ", ".join(get_args(AskedRoute))
        text = f"the header {ROUTE_HEADER} is {route[:40]!r}; it is one of {known}"
        raise Ending(Terminal.INVALID, text, field=ROUTE_HEADER)
    return cast(AskedRoute, route)


def _deadline_of(headers: Mapping[str, str]) -> float | None:
    given = headers.get(DEADLINE_HEADER, "")
    if not given:
        return None
    seconds = float(given) if _SECONDS.fullmatch(given) else math.nan
    if not 0 < seconds <= 1e9:
        text = f"the header {DEADLINE_HEADER} is {given[:40]!r}; it is a time in seconds above 0"
        raise Ending(Terminal.INVALID, text, field=DEADLINE_HEADER)
    return seconds
