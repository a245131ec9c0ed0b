"""From the queue to the owners: who is next, and on which decoder."""

from __future__ import annotations

import asyncio
import itertools
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from headrace.plan import TOKEN_NBYTES
from headrace.runtime.requests import RequestOptions
from headrace.server import events
from headrace.server.choices import Choice
from headrace.server.config import QueueConfig
from headrace.server.decoders import ServedDecoder
from headrace.server.queue import CHOICE_NBYTES, FairQueue, Job, QueueFull
from headrace.server.terminals import Ending, Terminal


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was found good: what is to be done, and for whom.

    prompts, options: one of each per choice. deadline_ns: until when it must be published, on the
    clock of time.monotonic_ns.
    """

    request: int
    client: str
    model: str
    prompts: Sequence[array[int]]
    options: Sequence[RequestOptions]
    deadline_ns: int | None


class Dispatcher:
    """Admits requests, gives each choice to a decoder that has room, and ends what is too late."""

    def __init__(self, queue: FairQueue, config: QueueConfig, told: events.Events) -> None:
        self._queue = queue
        self._config = config
        self._told = told
        self._decoders: list[ServedDecoder] = []
        self._waiting: dict[int, Choice] = {}  # by job id
        self._job_ids = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._due = False
        self._told_queue = (0, 0)
        self.draining = False

    def serve(self, decoders: Sequence[ServedDecoder]) -> None:
        """Give work to these."""
        self._decoders = list(decoders)

    @property
    def num_waiting(self) -> int:
        """Choices in the queue."""
        return len(self._waiting)

    def check_room(self, model: str, num_choices: int) -> None:
        """Refuse what could not be admitted now, however short its prompts are.

        Raises:
            Ending: as `admit`.
        """
        self._check_served(model)
        try:
            nbytes = num_choices * CHOICE_NBYTES
            self._queue.check_room(num_choices, nbytes, time.monotonic_ns())
        except QueueFull as exc:
            raise _full(exc) from exc

    def admit(self, asked: Asked, news: asyncio.Event) -> list[Choice]:
        """Take a request into the queue, all its choices or none.

        Raises:
            Ending: no decoder can serve it now or soon, or the queue is full.
        """
        self._check_served(asked.model)
        now_ns = time.monotonic_ns()
        choices = []
        for index, (prompt, options) in enumerate(zip(asked.prompts, asked.options, strict=True)):
            nbytes = CHOICE_NBYTES + TOKEN_NBYTES * len(prompt)
            job = Job(
                next(self._job_ids),
                asked.client,
                asked.model,
                len(prompt),
                options.max_tokens,
                nbytes,
                now_ns,
                asked.deadline_ns,
            )
            choices.append(Choice(asked.request, index, job, prompt, options, news))
        try:
            self._queue.offer([choice.job for choice in choices])
        except QueueFull as exc:
            raise _full(exc) from exc
        for choice in choices:
            self._waiting[choice.job.id] = choice
            choice.withdraw = self._withdrawal(choice)
        self.look_soon()
        return choices

    def look_soon(self) -> None:
        """Something changed: see in this turn of the loop who can go on."""
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._look)

    def close(self) -> None:
        """Fail what waits, and take no more."""
        self.draining = True
        text = "the server is shutting down"
        for choice in list(self._waiting.values()):
            self._leave(choice)
            choice.fail(Ending(Terminal.SHUTTING_DOWN, text, retry_after_s=5.0))
        if self._timer is not None:
            self._timer.cancel()

    def finished(self, choice: Choice) -> None:
        """A choice that was dispatched is over: its client is charged for what it came to."""
        self._queue.served(choice.job, choice.num_tokens)
        measured = None if choice.ended is None else choice.ended.measured
        if measured is not None and not (choice.ended and choice.ended.reuse):
            prefill_ns = measured.source_final_ns - measured.prefill_begun_ns
            self._queue.measured(choice.job.num_prompt_tokens, prefill_ns / 1e9)

    def _check_served(self, model: str) -> None:
        if self.draining:
            text = "the server is shutting down"
            raise Ending(Terminal.SHUTTING_DOWN, text, retry_after_s=5.0)
        self._check_hope(model)

    def _check_hope(self, model: str) -> None:
        serving = [each for each in self._decoders if model in each.settings.models]
        if all(each.hopeless for each in serving):
            reasons = "; ".join(f"{each.name}: {each.reason}" for each in serving)
            raise Ending(Terminal.NOT_READY, f"no decoder serves {model} any more: {reasons}")

    def _look(self) -> None:
        self._due = False
        now_ns = time.monotonic_ns()
        for late in self._queue.expired(now_ns):
            choice = self._waiting.get(late.id)
            if choice is not None:
                self._leave(choice)
                waited_s = (now_ns - late.arrived_ns) / 1e9
                text = f"its deadline passed in the queue, after {waited_s:.1f} s"
                choice.fail(Ending(Terminal.DEADLINE, text))
        self._drop_hopeless()
        while (job := self._queue.take(now_ns, self._fits)) is not None:
            choice = self._waiting.pop(job.id)
            decoder = min(self._fitting(job), key=lambda each: each.load)
            choice.options = _with_deadline(choice.options, job.deadline_ns, now_ns)
            decoder.submit(choice)
        self._tell_queue(now_ns)
        self._wake_at_deadline(now_ns)

    def _tell_queue(self, now_ns: int) -> None:
        held = len(self._waiting), self._queue.statistics()["nbytes"]
        if held != self._told_queue:
            self._told_queue = held
            self._told.tell(events.QueueChanged(now_ns, *held))

    def _drop_hopeless(self) -> None:
        """Nobody will serve these: their decoders were set aside while they waited."""
        if not any(each.hopeless for each in self._decoders):
            return
        for choice in list(self._waiting.values()):
            try:
                self._check_hope(choice.job.model)
            except Ending as exc:
                self._leave(choice)
                choice.fail(exc)

    def _fits(self, job: Job) -> bool:
        return bool(self._fitting(job))

    def _fitting(self, job: Job) -> list[ServedDecoder]:
        long_from = self._config.long_prompt_tokens
        return [
            each
            for each in self._decoders
            if job.model in each.settings.models and each.has_room(job.num_prompt_tokens, long_from)
        ]

    def _withdrawal(self, choice: Choice) -> Callable[[], None]:
        def withdraw() -> None:
            if choice.job.id in self._waiting:
                self._leave(choice)
                choice.fail(Ending(Terminal.CLIENT_LEFT, "withdrawn while it waited"))
                self.look_soon()

        return withdraw

    def _leave(self, choice: Choice) -> None:
        del self._waiting[choice.job.id]
        self._queue.remove(choice.job.id)

    def _wake_at_deadline(self, now_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_ns = self._queue.next_deadline_ns()
        if due_ns is not None:
            delay_s = max(0.0, (due_ns - now_ns) / 1e9)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.look_soon)


def _full(exc: QueueFull) -> Ending:
    if exc.never:
        return Ending(Terminal.TOO_LARGE, str(exc))
    return Ending(Terminal.QUEUE_FULL, str(exc), retry_after_s=exc.retry_after_s)


def _with_deadline(options: RequestOptions, deadline_ns: int | None, now_ns: int) -> RequestOptions:
    """What is left of the deadline, which an owner counts from when it is told."""
    if deadline_ns is None:
        return options
    return replace(options, deadline_s=max(1e-3, (deadline_ns - now_ns) / 1e9))
