"""Who is next: the admission queue, bounded in requests and bytes, without a clock of its own.

The rule, in three parts:

Between clients, shares are equal. A client's account is charged the tokens of a job (its prompt and
the most that it may decode) when the job is taken, and gets back at its end what it did not decode.
The client with the lowest account is next; of equal ones, who came first. Having been away is no
credit: whoever comes back starts at least at the average account of those who wait. So of two
clients that always have something waiting, neither is ahead by more than one job, and no debt keeps
a client waiting for ever while new ones come.

Within a client, the lowest rank is next: the arrival, plus `patience` times the time that the
prompt's prefill is expected to take. A short prompt overtakes a long one only if it came at most
`patience` times the difference of their prefill times later, so that no job waits for ever. Lengths
are rounded up by less than a quarter for this, and equal ones keep their order.

A job that does not fit now is passed over: other jobs of its client, and other clients, go on.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from msgspec import Struct

from headrace.errors import HeadraceError, LocalProtocolError

CHOICE_NBYTES: Final = 512  # of a choice that waits, beside its prompt
_RECENT_TAKES: Final = 32
_IDLE_CLIENTS: Final = 4096  # whose accounts are remembered; the longest away is forgotten first
_KEPT: Final = 0.9  # of the running estimate of prefill times, at each measurement
_SOONEST_S: Final = 1.0
_LATEST_S: Final = 60.0


class Job(Struct, frozen=True):
    """One choice of a request that waits.

    id: our own, never used again. nbytes: what it holds while it waits. deadline_ns: when it is too
    late, on the clock of arrived_ns.
    """

    id: int
    client: str
    model: str
    num_prompt_tokens: int
    max_tokens: int
    nbytes: int
    arrived_ns: int
    deadline_ns: int | None


class QueueFull(HeadraceError):
    """There is no room. retry_after_s: when half of what waits will have been taken, estimated.

    never: not even an empty queue has room for it.
    """

    def __init__(self, text: str, retry_after_s: float, *, never: bool) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s
        self.never = never


class FairQueue:
    """Jobs that wait, and the accounts of their clients; see the module for the rule.

    max_requests, max_bytes: of all that wait. patience: how many times the difference of their
    prefill times a short prompt may come later than a long one and still go first.
    """

    def __init__(self, max_requests: int, max_bytes: int, *, patience: float = 4.0) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._patience = patience
        self._jobs: dict[int, Job] = {}
        self._nbytes = 0
        self._clients: dict[str, _Client] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()  # neither waiting nor running
        self._order: list[tuple[int, int, _Client]] = []  # a heap; see `_Client.turn`
        self._running: dict[int, _Client] = {}  # by job
        self._lengths: dict[str, list[tuple[int, int]]] = {}  # by model, a heap of (length, id)
        self._deadlines: list[tuple[int, int]] = []  # a heap of (time, id)
        self._num_in_line = 0  # clients that wait
        self._accounts = 0  # of the clients that wait, together
        self._last_account = 0  # of the client that was taken from last
        self._turns = 0
        self._takes: deque[int] = deque(maxlen=_RECENT_TAKES)
        self._prefill = (0.0, 0.0)  # tokens and seconds, both fading
        self._counts = dict.fromkeys(("offered", "taken", "removed", "expired", "refused"), 0)

    def offer(self, jobs: Sequence[Job]) -> None:
        """Let all of these wait, or none.

        Raises:
            QueueFull: they do not fit.
            LocalProtocolError: an id is waiting or running already.
        """
        if len({job.id for job in jobs} - self._jobs.keys() - self._running.keys()) < len(jobs):
            raise LocalProtocolError(f"jobs {[job.id for job in jobs]}: an id is in use")
        nbytes = sum(job.nbytes for job in jobs)
        self.check_room(len(jobs), nbytes, max((job.arrived_ns for job in jobs), default=0))
        self._counts["offered"] += len(jobs)
        for job in jobs:
            self._jobs[job.id] = job
            self._nbytes += job.nbytes
            lengths = self._lengths.setdefault(job.model, [])
            _drop_gone(lengths, self._jobs)
            heapq.heappush(lengths, (job.num_prompt_tokens, job.id))
            if job.deadline_ns is not None:
                _drop_gone(self._deadlines, self._jobs)
                heapq.heappush(self._deadlines, (job.deadline_ns, job.id))
            self._wait(job)

    def take(self, now_ns: int, fits: Callable[[Job], bool]) -> Job | None:
        """The next job of those that fit, which no longer waits; None if none fits.

        fits: must not refuse a prompt and take a longer one of the same model.
        """
        asked = _Fits(fits, self._shortest)
        passed: list[tuple[int, int, _Client]] = []
        taken = None
        while taken is None and self._order and not asked.nothing_more(self._lengths):
            turn = heapq.heappop(self._order)
            if turn[:2] == turn[2].turn:
                passed.append(turn)
                taken = turn[2].best(asked, self._patience * self.seconds_per_token)
        for turn in passed:
            heapq.heappush(self._order, turn)
        if taken is not None:
            self._charge(taken)
            self._takes.append(now_ns)
        return taken

    def remove(self, job_id: int) -> bool:
        """Let a job wait no longer; whether it did."""
        return self._drop(job_id, "removed")

    def expired(self, now_ns: int) -> list[Job]:
        """The jobs whose deadlines have passed, which no longer wait."""
        late = []
        while (due_ns := self.next_deadline_ns()) is not None and due_ns <= now_ns:
            job = self._jobs[heapq.heappop(self._deadlines)[1]]
            self._drop(job.id, "expired")
            late.append(job)
        return late

    def next_deadline_ns(self) -> int | None:
        """When the next job is too late."""
        while self._deadlines and self._deadlines[0][1] not in self._jobs:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def served(self, job: Job, num_tokens: int) -> None:
        """A job that was taken has ended: its client gets back what was not decoded.

        Raises:
            LocalProtocolError: it was not taken, or ended before.
        """
        client = self._running.pop(job.id, None)
        if client is None:
            raise LocalProtocolError(f"job {job.id} ended, and was not running")
        client.running -= 1
        back = job.max_tokens - min(num_tokens, job.max_tokens)
        client.account -= back
        if client.num_waiting:
            self._accounts -= back
            self._line_up(client)
        self._settle(client)

    def measured(self, num_tokens: int, seconds: float) -> None:
        """A prefill of so many tokens took so long: what later ones are expected to take."""
        if num_tokens > 0 and seconds > 0:
            tokens, total = self._prefill
            self._prefill = (tokens * _KEPT + num_tokens, total * _KEPT + seconds)

    @property
    def seconds_per_token(self) -> float:
        """The expected time of a prefill, 0 before anything was measured."""
        tokens, seconds = self._prefill
        return seconds / tokens if tokens else 0.0

    def statistics(self) -> dict[str, int]:
        """What waits and runs now, and what came of all jobs so far."""
        return {
            "waiting": len(self._jobs),
            "nbytes": self._nbytes,
            "running": len(self._running),
            "clients": len(self._clients),
            **self._counts,
        }

    def check_room(self, num: int, nbytes: int, now_ns: int) -> None:
        """Refuse so many jobs of so many bytes together. Raises: QueueFull: they do not fit."""
        if len(self._jobs) + num <= self._max_requests and self._nbytes + nbytes <= self._max_bytes:
            return
        self._counts["refused"] += num
        never = num > self._max_requests or nbytes > self._max_bytes
        if never:
            text = (
                f"one request may have at most {self._max_requests} choices with "
                f"{self._max_bytes} bytes, and this has {num} with {nbytes}; ask for less at once"
            )
        else:
            text = (
                f"the queue is full: {len(self._jobs)} of {self._max_requests} requests and "
                f"{self._nbytes} of {self._max_bytes} bytes wait, {num} with {nbytes} bytes came"
            )
        raise QueueFull(text, self._retry_after_s(now_ns), never=never)

    def _retry_after_s(self, now_ns: int) -> float:
        if len(self._takes) < 2:
            return _SOONEST_S
        each_s = (max(now_ns, self._takes[-1]) - self._takes[0]) / 1e9 / (len(self._takes) - 1)
        return min(max(each_s * len(self._jobs) / 2, _SOONEST_S), _LATEST_S)

    def _wait(self, job: Job) -> None:
        client = self._clients.get(job.client)
        if client is None:
            client = self._clients[job.client] = _Client(job.client)
        self._idle.pop(job.client, None)
        if not client.num_waiting:
            client.account = max(client.account, self._least_account())
            self._accounts += client.account
            self._num_in_line += 1
            self._line_up(client)
        client.add(job)

    def _least_account(self) -> int:
        """What a client starts with that comes to wait: the others' average, or if none wait, as
        the last.

        From their lowest, those with more would wait for as long as new clients kept coming.
        """
        if not self._num_in_line:
            return self._last_account
        return -(-self._accounts // self._num_in_line)

    def _line_up(self, client: _Client) -> None:
        """Give the client its turn by its account as it is now, behind its equals."""
        self._turns += 1
        client.turn = (client.account, self._turns)
        heapq.heappush(self._order, (*client.turn, client))
        if len(self._order) > 2 * len(self._clients) + 64:  # most are turns that were replaced
            self._order = [turn for turn in self._order if turn[:2] == turn[2].turn]
            heapq.heapify(self._order)

    def _charge(self, job: Job) -> None:
        client = self._clients[job.client]
        self._last_account = client.account
        client.account += job.num_prompt_tokens + job.max_tokens
        self._accounts += job.num_prompt_tokens + job.max_tokens
        client.running += 1
        self._running[job.id] = client
        self._drop(job.id, "taken")
        if client.num_waiting:
            self._line_up(client)

    def _drop(self, job_id: int, because: str) -> bool:
        job = self._jobs.pop(job_id, None)
        if job is None:
            return False
        self._counts[because] += 1
        self._nbytes -= job.nbytes
        self._shortest(job.model)
        client = self._clients[job.client]
        client.discard(job)
        if not client.num_waiting:
            client.turn = None
            self._num_in_line -= 1
            self._accounts -= client.account
        self._settle(client)
        return True

    def _settle(self, client: _Client) -> None:
        """Forget accounts that no longer matter: all when nothing is left, else the oldest."""
        if not self._jobs and not self._running:
            self._clients.clear()
            self._idle.clear()
            self._order.clear()
            self._last_account = 0
        elif not client.num_waiting and not client.running:
            self._idle[client.name] = None
            if len(self._idle) > _IDLE_CLIENTS:
                del self._clients[self._idle.popitem(last=False)[0]]

    def _shortest(self, model: str) -> Job | None:
        """The waiting job of a model with the shortest prompt."""
        lengths = self._lengths.get(model, [])
        while lengths and lengths[0][1] not in self._jobs:
            heapq.heappop(lengths)
        if not lengths:
            self._lengths.pop(model, None)
            return None
        return self._jobs[lengths[0][1]]


class _Client:
    """What one client has waiting, by model and rounded length, and its account in tokens.

    turn: its place in the heap of turns; entries there that are not it were replaced.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.account = 0
        self.turn: tuple[int, int] | None = None
        self.num_waiting = 0
        self.running = 0
        self._lines: dict[tuple[str, int], OrderedDict[int, Job]] = {}

    def add(self, job: Job) -> None:
        key = (job.model, rounded(job.num_prompt_tokens))
        self._lines.setdefault(key, OrderedDict())[job.id] = job
        self.num_waiting += 1

    def discard(self, job: Job) -> None:
        key = (job.model, rounded(job.num_prompt_tokens))
        line = self._lines[key]
        del line[job.id]
        self.num_waiting -= 1
        if not line:
            del self._lines[key]

    def best(self, asked: _Fits, s_per_token: float) -> Job | None:
        """The job of the lowest rank of those that fit; s_per_token: with patience in it."""
        heads = [
            (next(iter(line.values())).arrived_ns + 1e9 * s_per_token * length, length, model)
            for (model, length), line in self._lines.items()
        ]
        heapq.heapify(heads)
        while heads:
            _, length, model = heapq.heappop(heads)
            found = asked.first(model, _least(length), self._lines[model, length].values())
            if found is not None:
                return found
        return None


class _Fits:
    """Asks what fits in one turn, about no length twice: what does not fit, no longer one does."""

    def __init__(self, fits: Callable[[Job], bool], shortest: Callable[[str], Job | None]) -> None:
        self._fits = fits
        self._shortest = shortest
        self._too_long: dict[str, int] = {}  # by model: from this length on, nothing fits
        self._full: set[str] = set()  # models of which nothing fits

    def nothing_more(self, models: dict[str, list[tuple[int, int]]]) -> bool:
        return self._full.issuperset(models)

    def first(self, model: str, least: int, line: Iterable[Job]) -> Job | None:
        """The first of a line that fits."""
        too_long = self._too_long.get(model)
        if model in self._full or (too_long is not None and too_long <= least):
            return None
        return next((job for job in line if self._asks(job)), None)

    def _asks(self, job: Job) -> bool:
        too_long = self._too_long.get(job.model)
        if too_long is not None and job.num_prompt_tokens >= too_long:
            return False
        if self._fits(job):
            return True
        self._too_long[job.model] = job.num_prompt_tokens
        if too_long is None:  # whether anything of this model is worth asking about
            shortest = self._shortest(job.model)
            if shortest is None or shortest is job or not self._fits(shortest):
                self._full.add(job.model)
        return False


def rounded(num_tokens: int) -> int:
    """A length rounded up to one of four between powers of two."""
    shift = max(0, num_tokens.bit_length() - 3)
    return -(-num_tokens >> shift) << shift


def _least(length: int) -> int:
    """The least number that is rounded up to this length."""
    return length - (1 << max(0, (length - 1).bit_length() - 3)) + 1


def _drop_gone(heap: list[tuple[int, int]], jobs: Mapping[int, Job]) -> None:
    """Take jobs that wait no longer off a heap, once they are most of it."""
    if len(heap) > 2 * len(jobs) + 64:
        heap[:] = [entry for entry in heap if entry[1] in jobs]
        heapq.heapify(heap)
