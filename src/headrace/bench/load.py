"""Many requests at once: throughput and TTFT by route, and what imports cost those who decode.

`serving`: as many requests in flight as asked, one following the other, through one owner, one
source and the cpu decoder. `auto` has an owner, a source and a decoder of its own, which serve
nothing else but one short prompt before it; `nth` tells which of its requests, at this many in
flight, a row begins with. `token`: see `headrace.bench.neighbours`. The source is paced unless
torch is asked for: KV then comes faster than this machine's CPU would compute it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headrace.backends.base import Decoder
from headrace.backends.load import open_decoder
from headrace.bench import paced
from headrace.bench.discarding import DiscardingDecoder
from headrace.bench.families import prefill_s, random_prompt
from headrace.bench.neighbours import (
    ARRIVAL_ROUTES,
    NEIGHBOUR_PROMPT,
    ArrivalRoute,
    Neighbourhood,
    arms_of,
)
from headrace.bench.rows import RowFile, busy_share
from headrace.bench.stand import Stand, choice_of, finished, load_1min, pairing_facts
from headrace.bench.ttft import measured_of
from headrace.bench.ttft_points import AUTO, MARGIN, order_of
from headrace.engine.text import max_positions_of
from headrace.errors import Refused
from headrace.geometry import Manifest
from headrace.messages import AskedRoute
from headrace.runtime.requests import Request, RequestOptions
from headrace.runtime.worker import SourceHandle

CLAIM = "load"
KEY = (
    "measure",
    "model",
    "source",
    "rate_mb_s",
    "in_flight",
    "route",
    "repeat",
    "neighbours",
    "arm",
    "block",
)
ROUTES: tuple[AskedRoute, ...] = ("whole", "streamed", "auto")
WARM_UP_TOKENS = 4  # of the prompt that the owner of `auto` served before
LEAST_REQUESTS = 6  # of one serving row, and twice as many as are in flight
NEIGHBOUR_TOKENS = 1000
WINDOW_S = 0.1  # of the idle check

# For the estimate: a decode step, the start of a stand, and KV of the default model.
_STEP_S, _START_S, _NBYTES_PER_TOKEN = 0.045, 6.0, 46_080


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is measured. Prompts in tokens, rates in MB/s (1e6 bytes) of KV within a prefill.

    prompt, tokens: of a served request. import_prompt: of one that is imported beside neighbours.
    block_s: how long an arm is looked at in each block. decoder, dtype: of the model's decoder.
    """

    model: str
    directory: Path
    source: Literal["paced", "torch"] = "paced"
    rates_mb_s: tuple[float, ...] = (100.0, 400.0)
    in_flight: tuple[int, ...] = (1, 2, 4, 8)
    prompt: int = 256
    tokens: int = 4
    repeats: int = 10
    neighbours: tuple[int, ...] = (1, 2, 4)
    import_prompt: int = 512
    blocks: int = 10
    block_s: float = 1.0
    decoder: str = "cpu"
    dtype: str = "float32"

    @property
    def rounds(self) -> int:
        """A round has two blocks: each arm once, and once more in the reverse order."""
        return -(-self.blocks // 2)

    @property
    def context(self) -> int:
        """Positions of a lane beside neighbours."""
        wanted = max(NEIGHBOUR_PROMPT + NEIGHBOUR_TOKENS, self.import_prompt + MARGIN)
        return min(wanted, max_positions_of(self.directory))

    def check(self) -> None:
        """Refuse prompts that the model does not hold."""
        longest = max_positions_of(self.directory)
        needed = max(
            self.prompt + self.tokens + MARGIN if self.in_flight else 0,
            self.import_prompt + MARGIN if self.neighbours else 0,
        )
        if needed > longest:
            raise Refused(
                f"{self.model} holds {longest} positions and {needed} are needed; ask for shorter "
                "prompts",
                field="prompt",
            )

    def seconds(self) -> float:
        """About how long it takes on slow cores."""
        if self.source == "torch":
            prefill = prefill_s(self.directory, self.prompt)
        else:
            prefill = self.prompt * _NBYTES_PER_TOKEN / (self.rates_mb_s[0] * 1e6) + 0.02
        decode = (self.tokens - 1) * _STEP_S
        served = sum(
            requests_of(n) * (prefill + decode if n == 1 else 1.25 * max(prefill, decode))
            for n in self.in_flight
        )
        arms = len(self.neighbours) * len(self.rates_mb_s) * self.rounds * len(arms_of())
        beside = arms * (self.block_s + 6 * _STEP_S)
        beside += len(self.neighbours) * len(self.rates_mb_s) * len(ARRIVAL_ROUTES) * self.block_s
        stands = 2 * bool(self.in_flight) + len(self.rates_mb_s) * bool(self.neighbours)
        return stands * _START_S + len(ROUTES) * self.repeats * served + beside


def requests_of(in_flight: int) -> int:
    """How many requests one serving row is of."""
    return max(LEAST_REQUESTS, 2 * in_flight)


def run(setting: Setting, file: RowFile) -> Iterator[dict[str, Any]]:
    """Measure what `file` does not hold yet, append it there, and yield each row.

    Where the second stand of `auto` has no room, its rows say so.

    Raises:
        RequestFailed: a request did not end as it must.
    """
    for row in _rows(setting, file):
        yield file.append(row)


def _rows(setting: Setting, file: RowFile) -> Iterator[dict[str, Any]]:
    missing = [cell for cell in _cells(setting) if cell not in file]
    if missing:
        yield from _serving_rows(setting, missing)
    for rate_mb_s in setting.rates_mb_s:
        left = [
            (each, number)
            for each in setting.neighbours
            for number in range(setting.rounds)
            if any(row not in file for row in _round(setting, rate_mb_s, each, number))
        ]
        if left:
            yield from _token_rows(setting, rate_mb_s, left, file)


# Serving.


def _cells(setting: Setting) -> Iterator[dict[str, Any]]:
    rate_mb_s = setting.rates_mb_s[0] if setting.source == "paced" else 0.0
    for repeat in range(setting.repeats):
        for in_flight in setting.in_flight:
            for order, route in enumerate(order_of(ROUTES, repeat)):
                yield {
                    "measure": "serving",
                    "model": setting.model,
                    "source": setting.source,
                    "rate_mb_s": rate_mb_s,
                    "in_flight": in_flight,
                    "route": route,
                    "repeat": repeat,
                    "order": order,
                }


def _serving_rows(setting: Setting, missing: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    served: Counter[int] = Counter()  # requests of `auto` by how many are in flight
    with ExitStack() as stack:
        stands, refusal = _serving_stands(setting, {cell["route"] for cell in missing}, stack)
        for cell in missing:
            route, in_flight = cell["route"], cell["in_flight"]
            if route == AUTO and refusal:
                yield cell | {"skipped": refusal}
                continue
            row = cell | _serve(stands[route == AUTO], setting, route, in_flight)
            nth = served[in_flight] + 1 if route == AUTO else 0
            if route == AUTO:
                served[in_flight] += row["requests"]
            yield row | {"nth": nth}


def _serving_stands(
    setting: Setting, routes: set[AskedRoute], stack: ExitStack
) -> tuple[dict[bool, Stand], str]:
    """What serves the routes, warm: False is for the fixed ones and True for `auto`.

    With it why there is nothing for `auto`, if there is no room for it.
    """
    stands: dict[bool, Stand] = {}
    for of_auto in sorted({route == AUTO for route in routes}):
        try:
            stand = stack.enter_context(_open_serving(setting))
        except Refused as exc:
            if not stands:
                raise
            return stands, str(exc)
        stands[of_auto] = stand
        if of_auto:
            few = random_prompt(WARM_UP_TOKENS, stand.decoder.manifest().vocab_size)
            stand.serve(few, RequestOptions(max_tokens=setting.tokens))
        else:
            for route in ROUTES:
                if route != AUTO:
                    _serve(stand, setting, route, 1)
    return stands, ""


def _serve(stand: Stand, setting: Setting, route: AskedRoute, in_flight: int) -> dict[str, Any]:
    """One row: a closed loop of requests, from an idle owner to an idle owner."""
    prompt = random_prompt(setting.prompt, stand.decoder.manifest().vocab_size)
    options = RequestOptions(route=route, max_tokens=setting.tokens)
    busy = busy_share(WINDOW_S)
    begun_ns = time.monotonic_ns()
    ended: list[Request] = []
    running: list[Request] = []
    left = requests_of(in_flight)
    while left or running:
        while left and len(running) < in_flight:
            running.append(stand.owner.submit(prompt, options))
            left -= 1
        stand.owner.turn(1.0)
        ended += [finished(request) for request in running if request.done]
        running = [request for request in running if not request.done]
    elapsed_ns = time.monotonic_ns() - begun_ns
    stand.owner.drain()
    measured = [measured_of(request) for request in ended]
    kv_nbytes = sum(each["kv_nbytes"] for each in measured)
    choices = [choice for request in ended if (choice := choice_of(request))]
    return {
        "prompt_tokens": setting.prompt,
        "tokens": setting.tokens,
        "requests": len(ended),
        "elapsed_ns": elapsed_ns,
        "requests_per_s": len(ended) / elapsed_ns * 1e9,
        "kv_nbytes_per_s": kv_nbytes / elapsed_ns * 1e9,
        **{
            name: [each[name] for each in measured]
            for name in ("ttft_ns", "tail_ns", "prefill_ns", "decode_in_the_way_ns", "parked_ns")
        },
        "choices": choices,
        "pairing": stand.facts,
        "busy_before": round(busy, 3),
        "load_1min": load_1min(),
    }


# Token time beside imports.


def _round(
    setting: Setting, rate_mb_s: float, neighbours: int, number: int
) -> list[dict[str, Any]]:
    """The keys of a round's rows, in their order."""
    return [
        {
            "measure": "token",
            "model": setting.model,
            "source": "paced",
            "rate_mb_s": rate_mb_s,
            "neighbours": neighbours,
            "arm": arm,
            "route": route,
            "block": 2 * number + block,
            "order": order,
        }
        for order, (block, arm, route) in enumerate(arms_of())
    ]


def _token_rows(
    setting: Setting, rate_mb_s: float, left: Sequence[tuple[int, int]], file: RowFile
) -> Iterator[dict[str, Any]]:
    """The missing rows of rounds, each told as (neighbours, number)."""
    real = _decoder_beside(setting)
    decoder = DiscardingDecoder(real)
    manifest = decoder.manifest()
    prompt = random_prompt(setting.import_prompt, manifest.vocab_size)
    nominal_ns = round(paced.kv_nbytes(manifest, len(prompt)) / rate_mb_s * 1e3)
    source = _paced(manifest, len(prompt), rate_mb_s)
    periods_ns: dict[int, dict[ArrivalRoute, int]] = {}
    with _stand(source, decoder, setting.context) as stand:
        near = Neighbourhood(
            stand, decoder, prompt, context=setting.context, block_s=setting.block_s
        )
        for neighbours, number in left:
            busy = busy_share(WINDOW_S)
            if neighbours not in periods_ns:
                with near.decoding(neighbours):
                    periods_ns[neighbours] = {
                        route: near.carried_period_ns(nominal_ns, route) for route in ARRIVAL_ROUTES
                    }
            facts = {
                "prompt_tokens": len(prompt),
                "nominal_period_ns": nominal_ns,
                "busy_before": round(busy, 3),
                "pairing": pairing_facts(real),
            }
            with near.decoding(neighbours):
                for row in _round(setting, rate_mb_s, neighbours, number):
                    period_ns = periods_ns[neighbours].get(row["route"], nominal_ns)
                    measured = near.block(row["arm"], period_ns, row["route"])
                    if row not in file:
                        took = {"period_ns": period_ns, "load_1min": load_1min()}
                        yield row | facts | measured | took


def _open_serving(setting: Setting) -> Stand:
    context = setting.prompt + setting.tokens + MARGIN
    decoder = open_decoder(
        setting.decoder, _model(setting) | {"lanes": max(setting.in_flight), "context": context}
    )
    source = SourceHandle("torch", _model(setting))
    if setting.source == "paced":
        source = _paced(decoder.manifest(), setting.prompt, setting.rates_mb_s[0])
    return _stand(source, decoder, context, pairing_facts(decoder))


def _decoder_beside(setting: Setting) -> Decoder:
    """A decoder for all neighbours and what is imported beside them."""
    lanes = max(setting.neighbours) + 1
    return open_decoder(
        setting.decoder, _model(setting) | {"lanes": lanes, "context": setting.context}
    )


def _paced(decoder: Manifest, num_tokens: int, rate_mb_s: float) -> SourceHandle:
    return SourceHandle(paced.FACTORY, paced.options_for(decoder, num_tokens, rate_mb_s * 1e6))


def _model(setting: Setting) -> dict[str, Any]:
    return {"model": str(setting.directory), "dtype": setting.dtype, "threads": 1}


def _stand(
    source: SourceHandle, decoder: Decoder, context: int, facts: Mapping[str, Any] | None = None
) -> Stand:
    with ExitStack() as undo:
        undo.callback(decoder.close)
        undo.callback(source.close)
        source.start()
        stand = Stand(source, decoder, context=context, facts=facts)
        undo.pop_all()
        return stand
