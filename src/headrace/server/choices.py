"""One choice of a request, from the queue to its end: each is a hand-off of its own."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable

from headrace.messages import Ended, Interval, Token
from headrace.runtime.requests import RequestOptions
from headrace.server.queue import Job
from headrace.server.terminals import Ending, Terminal, terminal_of


class Choice:
    """What is asked of an owner, and what has come of it.

    `news` is set whenever something came. Once `over`, nothing more comes, and `failure` says why
    if it did not finish.
    """

    def __init__(
        self,
        request: int,
        index: int,
        job: Job,
        prompt: array[int],
        options: RequestOptions,
        news: asyncio.Event,
    ) -> None:
        self.request = request
        self.index = index
        self.job = job
        self.prompt = prompt
        self.options = options
        self.num_tokens = 0
        self.ended: Ended | None = None
        self.failure: Ending | None = None
        self.source_intervals: list[Interval] = []
        self.owner_intervals: list[Interval] = []
        self.withdraw: Callable[[], None] = _nothing  # set by whoever holds it now
        self.deadline: asyncio.TimerHandle | None = None  # of whoever holds it
        self._tokens: deque[Token] = deque()  # at most max_tokens
        self._news = news
        self._unwanted = False

    @property
    def over(self) -> bool:
        """Whether it had its end."""
        return self.ended is not None or self.failure is not None

    @property
    def num_cached(self) -> int:
        """Positions of its prompt that the decoder had kept, once it is over."""
        reuse = None if self.ended is None else self.ended.reuse
        return 0 if reuse is None else reuse.positions

    @property
    def num_transferred(self) -> int:
        """Positions whose cells a source sent, once it is over; none of what the owner computed."""
        reuse = None if self.ended is None else self.ended.reuse
        if self.ended is None or self.ended.local:
            return 0
        if reuse is not None and reuse.remainder == "owner":
            return 0
        return self.job.num_prompt_tokens - self.num_cached

    def drop(self) -> None:
        """Nobody wants more of it; whoever holds it ends it. Idempotent."""
        if not self._unwanted:
            self._unwanted = True
            self._tokens.clear()
            if not self.over:
                self.withdraw()

    def take(self) -> Token | None:
        """The next token that has come; None if there is none by now."""
        return self._tokens.popleft() if self._tokens else None

    @property
    def begun(self) -> bool:
        """Whether its first token came."""
        return self.num_tokens > 0

    def came(self, token: Token) -> None:
        """A token came from the owner."""
        self.num_tokens += 1
        if not self._unwanted:
            self._tokens.append(token)
            self._news.set()

    def end(self, ended: Ended) -> None:
        """The owner ended it."""
        self.ended = ended
        self._no_deadline()
        terminal = terminal_of(ended)
        if terminal is not Terminal.FINISHED and self.failure is None:
            field = ended.mistake if terminal is Terminal.INVALID else None
            self.failure = Ending(terminal, ended.reason or terminal.value, field=field)
        self._news.set()

    def fail(self, failure: Ending) -> None:
        """It ends without a word of an owner's."""
        if not self.over:
            self._no_deadline()
            self.failure = failure
            self._news.set()

    def _no_deadline(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None


def _nothing() -> None:
    pass
