"""The scheduler half of a consumer: which prompts are loaded, and what the worker is told of them.

vLLM's scheduler asks for each new prompt how much of it can be loaded. What is answered is all of
it up to its last full block, less what vLLM has in its own prefix cache; the rest, one token at
least, vLLM computes itself. It then reserves the blocks, parks the request, and has them free again
only when the worker reported the load, whether it was loaded, failed or aborted.

So a load is *pending*, not told to the worker yet; *begun*; or *over*, since it was reported. A
pending load whose request is aborted is told as dropped, since vLLM waits for its report, too. A
prompt is loaded once: when vLLM asks again, after a preemption or to recompute what failed, the
answer is nothing.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import Refused
from headrace.messages import AskedRoute
from headrace.vllm.settings import Settings, route_of

_log = logging.getLogger("headrace.vllm")


@dataclass(frozen=True, slots=True)
class Load:
    """One prompt's load, as the worker is told of it.

    tokens: the prompt up to its last full block. start: positions that vLLM has already. block_ids:
    by cache group.
    """

    request_id: str
    tokens: tuple[int, ...]
    start: int
    block_ids: tuple[tuple[int, ...], ...]
    route: AskedRoute


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the scheduler half looks at of a vLLM request.

    tokens: None if it is given as embeddings. plain: text alone, by the model's own weights.
    """

    request_id: str
    tokens: Sequence[int] | None
    params: Mapping[str, Any] | None
    plain: bool


@dataclass(frozen=True, slots=True)
class Told:
    """What the worker half told of its sources: the longest prompt, whether they can begin
    anywhere, and whether there is an owner at all.
    """

    max_positions: int
    starts_anywhere: bool
    in_service: bool = True


@dataclass(frozen=True, slots=True)
class Orders:
    """What the worker is told in one step.

    loads: to begin. aborted: requests whose begun loads are to be ended. dropped: requests that
    were aborted before their loads were told; vLLM waits for the report of these, too.
    """

    loads: tuple[Load, ...] = ()
    aborted: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


class Scheduling:
    """The loads of one engine. block_size: what a load's end must be a multiple of."""

    def __init__(self, settings: Settings, block_size: int) -> None:
        self._settings = settings
        self._block_size = block_size
        self._most_loads = sum(source.num_slots for source in settings.sources)
        self._told: Told | None = None
        self._pending: dict[str, Load] = {}
        self._begun: set[str] = set()
        self._aborted: list[str] = []
        self._dropped: list[str] = []
        self._left: set[str] = set()  # the request is finished, the load is not over
        self._over: set[str] = set()  # loaded once, and the request lives
        self._local = Counter[str]()
        self._counted: set[str] = set()  # requests in it; vLLM may ask for one many times
        self._computed: dict[str, int] = {}  # what vLLM had of a prompt when it asked last

    @property
    def loading(self) -> int:
        """Loads that the worker has not reported."""
        return len(self._pending) + len(self._begun)

    def hear(self, told: Told) -> None:
        """The worker's word for its sources."""
        self._told = told

    def matched(self, prompt: Prompt, num_computed: int) -> int | None:
        """How many positions after `num_computed` will be loaded; None: ask again.

        Nothing is begun by it. vLLM waits where the worker half has not told of its sources yet,
        and where as many prompts are being loaded as the sources have slots for: each further one
        would hold blocks and only wait.
        """
        route, reason = self._decide(prompt, num_computed)
        if route is None:
            if reason and prompt.request_id not in self._counted:
                self._counted.add(prompt.request_id)
                self._local[reason] += 1
            return 0
        if self._told is None or self.loading >= self._most_loads:
            return None
        self._computed[prompt.request_id] = num_computed
        return self._end(prompt) - num_computed

    def allocated(
        self, prompt: Prompt, block_ids: Iterable[Iterable[int]], num_external: int
    ) -> None:
        """vLLM reserved a prompt's blocks, with `num_external` positions to be loaded into them."""
        if num_external <= 0 or prompt.tokens is None:
            return
        start = self._computed.pop(prompt.request_id)
        route = route_of(prompt.params, self._settings) or self._settings.route
        self._pending[prompt.request_id] = Load(
            prompt.request_id,
            tuple(prompt.tokens[: start + num_external]),
            start,
            tuple(tuple(ids) for ids in block_ids),
            route,
        )

    def step(self) -> Orders:
        """What the worker is told in this step; the orders must reach it."""
        orders = Orders(tuple(self._pending.values()), tuple(self._aborted), tuple(self._dropped))
        self._begun.update(self._pending)
        self._pending, self._aborted, self._dropped = {}, [], []
        return orders

    def reported(self, request_ids: Iterable[str]) -> None:
        """The worker reported these loads; their blocks are vLLM's again."""
        for request_id in request_ids:
            if request_id in self._aborted:  # vLLM ended the request for its failed load
                self._aborted.remove(request_id)
            if request_id in self._begun:
                self._begun.discard(request_id)
                if request_id not in self._left:
                    self._over.add(request_id)
            self._left.discard(request_id)

    def finished(self, request_id: str) -> None:
        """vLLM is done with a request, in whatever state its load is."""
        if request_id in self._pending:
            del self._pending[request_id]
            self._begun.add(request_id)
            self._left.add(request_id)
            self._dropped.append(request_id)
        elif request_id in self._begun:
            self._left.add(request_id)
            self._aborted.append(request_id)
        self._over.discard(request_id)
        self._counted.discard(request_id)
        self._computed.pop(request_id, None)

    def take_local(self) -> dict[str, int]:
        """Counts of prompts that were left to vLLM, by the reason, since this was called last."""
        counts, self._local = dict(self._local), Counter()
        return counts

    def _decide(self, prompt: Prompt, num_computed: int) -> tuple[AskedRoute | None, str]:
        """The route, or None with the reason why vLLM prefills; empty if nobody asked."""
        try:
            route = route_of(prompt.params, self._settings)
        except Refused as exc:
            _log.warning("%s: vLLM prefills it by itself, since %s", prompt.request_id, exc)
            return None, "mistaken"
        if route is None or prompt.request_id in self._over:
            return None, ""
        if prompt.tokens is None or not prompt.plain:
            return None, "not-text"
        end = self._end(prompt)
        if end <= num_computed or len(prompt.tokens) < self._settings.min_tokens:
            return None, "short"
        told = self._told
        if told is not None and not told.in_service:
            return None, "out-of-service"
        if told is not None and end > told.max_positions:
            return None, "long"
        if num_computed and not (told is not None and told.starts_anywhere):
            return None, "prefix"
        return route, ""

    def _end(self, prompt: Prompt) -> int:
        """The end of the last full block that leaves vLLM a token to compute."""
        count = len(prompt.tokens or ())
        return max(0, count - 1) // self._block_size * self._block_size
