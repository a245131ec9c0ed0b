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
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import Refused
from headrace.messages import AskedRoute
from headrace.runtime.requests import ASKED_ROUTES
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
    reads_cache: whether vLLM takes what is computed already; not where all logits are asked for.
    """

    request_id: str
    tokens: Sequence[int] | None
    params: Mapping[str, Any] | None
    plain: bool
    reads_cache: bool = True


@dataclass(frozen=True, slots=True)
class Told:
    """What the worker half told of its sources.

    max_positions: the longest prompt. starts_anywhere: whether all of them go on from a prefix.
    in_service: whether there is one, or one that died is about to be started again. num_slots: of
    those that serve. routes: that all of them offer.
    """

    max_positions: int
    starts_anywhere: bool
    in_service: bool = True
    num_slots: int = 0
    routes: tuple[AskedRoute, ...] = ASKED_ROUTES


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
    """The loads of one engine.

    block_size: what a load's end must be a multiple of. clock_ns: what tells the time, in ns.
    """

    def __init__(
        self,
        settings: Settings,
        block_size: int,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._settings = settings
        self._block_size = block_size
        self._clock_ns = clock_ns
        self._live = 0  # requests that vLLM has
        self._told: Told | None = None
        self._asks = False  # for the worker's word
        self._pending: dict[str, Load] = {}
        self._begun: set[str] = set()
        self._aborted: list[str] = []
        self._dropped: list[str] = []
        self._left: set[str] = set()  # the request is finished, the load is not over
        self._over: set[str] = set()  # loaded once, and the request lives
        self._local = Counter[str]()
        self._counted: set[str] = set()  # requests in it
        self._computed: dict[str, int] = {}  # what vLLM had of a prompt when it asked last
        self._waiting: dict[str, int] = {}  # since when a prompt waits for a slot, by the clock

    @property
    def loading(self) -> int:
        """Loads that the worker has not reported."""
        return len(self._pending) + len(self._begun)

    def hear(self, told: Told) -> None:
        """The worker's word for its sources."""
        self._told = told

    def arrived(self) -> None:
        """vLLM has a new request. The first after a rest has the worker asked for its word: no
        step brought it meanwhile.
        """
        self._live += 1
        if self._live == 1:
            self._told, self._asks = None, True

    def take_asks(self) -> bool:
        """Whether the worker is to be asked in this step."""
        asks, self._asks = self._asks, False
        return asks

    def matched(self, prompt: Prompt, num_computed: int) -> int | None:
        """How many positions after `num_computed` will be loaded; None: ask again.

        Nothing is begun by it. A prompt waits where the worker half has not told of its sources
        yet, and where as many are being loaded as the sources have slots for: each further one
        would hold blocks and only wait. Too many of those, and one that waited for as long as a
        load may take, are vLLM's own.
        """
        reason = self._why_local(prompt, num_computed)
        if reason is not None:
            return self._leave(prompt, reason)
        if self._told is None:
            return None
        if self.loading >= self._told.num_slots:
            return None if self._may_wait(prompt) else self._leave(prompt, "busy")
        self._computed[prompt.request_id] = num_computed
        return self._end(prompt) - num_computed

    def allocated(
        self, prompt: Prompt, block_ids: Iterable[Iterable[int]], num_external: int
    ) -> None:
        """vLLM reserved a prompt's blocks, with `num_external` positions to be loaded into them."""
        if num_external <= 0 or prompt.tokens is None:
            return
        self._waiting.pop(prompt.request_id, None)
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
        self._waiting.pop(request_id, None)
        self._live = max(0, self._live - 1)

    def take_local(self) -> dict[str, int]:
        """Counts of prompts that were left to vLLM, by the reason, since this was called last."""
        counts, self._local = dict(self._local), Counter()
        return counts

    def _leave(self, prompt: Prompt, reason: str) -> int:
        """The prompt is vLLM's own; the reason is empty if nobody asked for more."""
        self._waiting.pop(prompt.request_id, None)
        if reason and prompt.request_id not in self._counted:  # vLLM may ask many times
            self._counted.add(prompt.request_id)
            self._local[reason] += 1
        return 0

    def _may_wait(self, prompt: Prompt) -> bool:
        now_ns, waiting = self._clock_ns(), self._waiting
        if prompt.request_id not in waiting and len(waiting) >= self._settings.max_waiting:
            return False
        since_ns = waiting.setdefault(prompt.request_id, now_ns)
        longest_s = self._settings.deadline_s
        return longest_s is None or now_ns - since_ns <= longest_s * 1e9

    def _why_local(self, prompt: Prompt, num_computed: int) -> str | None:
        """Why vLLM prefills a prompt, empty if nobody asked for more; None if a source shall."""
        if prompt.request_id in self._over:
            return ""
        try:
            route = route_of(prompt.params, self._settings)
        except Refused as exc:
            if prompt.request_id not in self._counted:
                _log.warning("%s: vLLM prefills it by itself, since %s", prompt.request_id, exc)
            return "mistaken"
        if route is None:
            return ""
        if prompt.tokens is None or not prompt.plain:
            return "not-text"
        if not prompt.reads_cache:
            return "prompt-logprobs"
        end = self._end(prompt)
        if end <= num_computed or len(prompt.tokens) < self._settings.min_tokens:
            return "short"
        return None if self._told is None else _why_not(self._told, route, end, num_computed)

    def _end(self, prompt: Prompt) -> int:
        """The end of the last full block that leaves vLLM a token to compute."""
        count = len(prompt.tokens or ())
        return max(0, count - 1) // self._block_size * self._block_size


def _why_not(told: Told, route: AskedRoute, end: int, num_computed: int) -> str | None:
    """Why the sources do not prefill such a prompt; None if they do."""
    if not told.in_service:
        return "out-of-service"
    if route not in told.routes:
        return "mistaken"
    if end > told.max_positions:
        return "long"
    return "prefix" if num_computed and not told.starts_anywhere else None
