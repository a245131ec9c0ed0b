"""What became of the hand-offs of a schedule that were granted a slot before they had storage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from headrace.ids import AttemptId
from headrace.protocol.commands import Command, Report, Reserve, Retry, StartImport, StartPrefill
from headrace.testing.facts import Account

AccountOf = Callable[[AttemptId], Account]


class Parking:
    """Counts, from an owner's commands alone: who was parked, and what followed.

    parked: grants without storage. got the lane: of these, those that had it later; some cells
    told, all told: what of them lay in the slot by then. imports: begun for these. Every other word
    is the end of one that never had it, or `retried`: another attempt followed; or how one that
    had it ended (`then ...`).
    """

    def __init__(self, account_of: AccountOf) -> None:
        self.counts: Counter[str] = Counter()
        self._account_of = account_of
        self._with_storage: set[int] = set()  # requests: a retry keeps what it has
        self._waiting: dict[int, AttemptId] = {}  # parked now, by request
        self._served: set[AttemptId] = set()  # parked before, and then given a lane

    def saw(self, command: Command) -> None:
        """The owner gave this command, after those before it."""
        match command:
            case Reserve(attempt=attempt):
                self._with_storage.add(attempt.counter)
                self._serve(attempt.counter)
            case StartPrefill(attempt=attempt) if attempt.counter not in self._with_storage:
                self.counts["parked"] += 1
                self._waiting[attempt.counter] = attempt
            case StartImport(attempt=attempt):
                self.counts["imports"] += attempt in self._served
            case Retry(attempt=attempt):
                self._end(attempt.counter, "retried")
            case Report(request=request, outcome=outcome, cause=cause):
                self._end(request.counter, outcome.value if cause is None else cause.value)
            case _:
                pass

    def _serve(self, request: int) -> None:
        attempt = self._waiting.pop(request, None)
        if attempt is None:
            return
        account = self._account_of(attempt)
        self._served.add(attempt)
        self.counts["got the lane"] += 1
        self.counts["some cells told"] += account.num_progress > 0
        self.counts["all told"] += account.final

    def _end(self, request: int, how: str) -> None:
        if self._waiting.pop(request, None) is not None:
            self.counts[how] += 1
        for attempt in [each for each in self._served if each.counter == request]:
            self._served.remove(attempt)
            self.counts[f"then {how}"] += 1
