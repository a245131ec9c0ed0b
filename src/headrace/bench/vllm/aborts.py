"""Case `aborts`: many prompts of random lengths, several at a time, and every other one given up.

A prompt that is given up is so after a time that was drawn for it, wherever it is then: not told to
the source, being prefilled, being imported, decoding. What a prompt that was not given up answers
is compared with what vLLM answers to it alone, by its own prefill. At the end all blocks must be
free, and vLLM must know of no request. The emulated link makes imports long enough to be hit.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from headrace.bench.rows import RowFile
from headrace.bench.vllm.engine import Engine
from headrace.bench.vllm.setting import ROUTES, Place, Setting, consumer, torch_source

CASE: Final = "aborts"
LINK_MB_S: Final = 60.0
ABORTED_SHARE: Final = 0.5
LATEST_ABORT_MS: Final = 2000
REST_S: Final = 1.0  # of steps at the end, in which what is on its way is over


def run(setting: Setting, place: Place, file: RowFile, say: Callable[[str], None]) -> None:
    """Measure all of it."""
    sizes = setting.sizes
    kv = consumer(torch_source(place))
    options = setting.engine(place, sizes.most, kv_transfer_config=kv, max_num_seqs=sizes.at_once)
    with Engine(place.python, options) as engine:
        prompts = prompts_of(setting)
        own = [engine.ask(prompt, sizes.answer)["tokens"] for prompt in prompts]
        before = engine.tell("blocks")
        plan = plan_of(setting, prompts)
        say(f"{len(plan)} prompts, {sizes.at_once} at a time")
        asked = engine.tell("crowd", plan=plan, at_once=sizes.at_once, link=LINK_MB_S)
        for each, got in zip(plan, asked["answers"], strict=True):
            wanted = own[each["prompt"]][: each["max_tokens"]]
            row = {name: each[name] for name in ("prompt", "max_tokens", "route", "abort_ms")}
            row |= {"prompt_tokens": len(each["tokens"]), **got}
            if got["end"] == "finished":
                row["right"] = got["tokens"] == wanted
            file.append({"case": CASE, "measure": "request", "number": each["number"], **row})
        engine.tell("steps", seconds=REST_S)
        after = engine.tell("blocks")
        file.append({"case": CASE, "measure": "blocks", "before": before, "after": after})


def prompts_of(setting: Setting) -> list[list[int]]:
    """The different prompts, of random lengths."""
    sizes, draw = setting.sizes, random.Random(setting.seed)
    lengths = [draw.randint(sizes.least, sizes.most) for _ in range(sizes.pool)]
    return [setting.prompt(length, number) for number, length in enumerate(lengths, 1)]


def plan_of(setting: Setting, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Every request: which prompt, how many tokens, by which route, and when it is given up, in ms
    after it was asked; 0 for never.
    """
    sizes, draw = setting.sizes, random.Random(setting.seed + 1)
    plan = []
    for number in range(sizes.requests):
        chosen = draw.randrange(len(prompts))
        aborted = draw.random() < ABORTED_SHARE
        plan.append(
            {
                "number": number,
                "prompt": chosen,
                "tokens": prompts[chosen],
                "max_tokens": draw.randint(1, sizes.answer),
                "route": draw.choice(ROUTES),
                "abort_ms": draw.randint(1, LATEST_ABORT_MS) if aborted else 0,
            }
        )
    return plan


class Asked(Protocol):
    """What of the child's server is needed."""

    def add(self, tokens: list[int], max_tokens: int, params: dict[str, Any] | None) -> str: ...
    def step(self) -> list[Any]: ...
    def abort(self, name: str) -> None: ...


@dataclass
class _Live:
    number: int
    abort_s: float | None
    tokens: list[int] = field(default_factory=list)


class Crowd:
    """The requests of a plan, `at_once` at a time, in the process of the engine."""

    def __init__(
        self,
        engine: Asked,
        plan: list[dict[str, Any]],
        at_once: int,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._plan = plan
        self._at_once = at_once
        self._clock_s = clock_s
        self._live: dict[str, _Live] = {}
        self._answers: dict[int, dict[str, Any]] = {}

    def run(self) -> list[dict[str, Any]]:
        """Each request's end: `finished` with its tokens, or `aborted` with those it had."""
        waiting = list(reversed(self._plan))
        while waiting or self._live:
            while waiting and len(self._live) < self._at_once:
                self._begin(waiting.pop())
            for output in self._engine.step():
                self._take(output)
            self._abort_what_is_due()
        return [self._answers[each["number"]] for each in self._plan]

    def _begin(self, each: dict[str, Any]) -> None:
        params = {"do_remote_prefill": True, "headrace_route": each["route"]}
        name = self._engine.add(each["tokens"], each["max_tokens"], params)
        due = self._clock_s() + each["abort_ms"] / 1e3 if each["abort_ms"] else None
        self._live[name] = _Live(each["number"], due)

    def _take(self, output: Any) -> None:
        live = self._live.get(output.request_id)
        if live is None:
            return
        live.tokens = list(output.outputs[0].token_ids)
        if output.finished:
            reason = output.outputs[0].finish_reason
            self._end(output.request_id, "finished" if reason == "length" else str(reason))

    def _abort_what_is_due(self) -> None:
        now_s = self._clock_s()
        for name, live in list(self._live.items()):
            if live.abort_s is not None and live.abort_s <= now_s:
                self._engine.abort(name)
                self._end(name, "aborted")

    def _end(self, name: str, end: str) -> None:
        live = self._live.pop(name)
        self._answers[live.number] = {"end": end, "tokens": live.tokens}
