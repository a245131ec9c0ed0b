"""The figures of one traced run, computed from its intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from headrace.messages import Interval
from headrace.telemetry.claim import Evidence, Overlap, overlap_of
from headrace.telemetry.clocks import Aligned, ClockCheck
from headrace.telemetry.spans import of_one_layer
from headrace.telemetry.tail import PARTS, Part, length_of, pieces
from headrace.telemetry.times import length_ns, union_of

Alone: TypeAlias = Literal["whole-route run", "own imports"]

_Wholes: TypeAlias = dict[tuple[str, int], Aligned]
"""The whole-route run to compare with, by prompt and bytes."""

TIMER_NOISE_NS: Final = 100_000
"""A hand-over between two processes waits for a wake-up, tens of us that vary as much from one to
the next: a share of a T below this would be a share of noise.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The figures of one run: ns, bytes, shares of 1; None where there is no such figure.

    local: the owner computed it by itself, in one thread: nothing overlaps and nothing is hidden.
    overlap: what the intervals show of it. compute_ns, write_ns: what the source told; both_ns:
    where it computed and wrote in turn, see `computes_too`. early_nbytes: imported before the
    prefill ended. alone_ns: T, the time that the same import takes alone, and where it is from.
    bound: the share of all bytes but those of the last layer group. saved_ns: how much sooner the
    first token was there than on the whole route, whose tail is whole_tail_ns. parts_ns: the tail,
    part by part; they add up to it. parked_ns: for how long it held a slot without storage, no part
    of the tail; None if it had storage first. cancel_ns: from the grant to the cancel.
    drain_ns: from the terminal until the storage was free.
    """

    name: str
    route: str
    choice: str
    num_tokens: int
    outcome: str
    reason: str
    clock: ClockCheck
    published: bool
    local: bool
    overlap: Overlap
    prefill_ns: int | None
    compute_ns: int
    write_ns: int
    both_ns: int
    kv_nbytes: int
    imported_nbytes: int
    early_nbytes: int | None
    tail_ns: int | None
    tail_from_last_group_ns: int | None
    alone_ns: int | None
    alone: Alone | None
    hidden_share: float | None
    bound: float | None
    saved_ns: int | None
    whole_tail_ns: int | None
    parts_ns: dict[Part, int]
    parked_ns: int | None
    cancel_ns: int | None
    drain_ns: int | None

    @property
    def evidence(self) -> Evidence:
        """What the overlap was read from: the weaker of both sides."""
        return self.overlap.evidence

    @property
    def overlap_ns(self) -> int | None:
        """How long imports ran while the source was at work."""
        return self.overlap.length_ns if self.clock.comparable and not self.local else None

    @property
    def kernel_overlap_ns(self) -> int | None:
        """As much of it as may be called kernel overlap."""
        return None if self.overlap_ns is None else self.overlap.kernels_ns


def reports_of(runs: Sequence[Aligned]) -> list[Report]:
    """The figures of each run of one file."""
    wholes = _wholes(runs)
    return [_report(run, wholes) for run in runs]


def report_of(run: Aligned, among: Iterable[Aligned] = ()) -> Report:
    """The figures of `run`; `among`: the runs of its file, for one that tells T."""
    return _report(run, _wholes(among))


def _report(run: Aligned, wholes: _Wholes) -> Report:
    tail_ns = _length_of(run.tail)
    whole = wholes.get(_same(run))
    alone_ns, alone = _alone(run, whole)
    both = [each for each in run.of("write") if computes_too(run, each)]
    write = [each for each in run.of("write") if not computes_too(run, each)]
    return Report(
        name=run.run.name,
        route=run.run.route,
        choice=run.run.choice,
        num_tokens=run.run.num_tokens,
        outcome=run.run.outcome,
        reason=run.run.reason,
        clock=run.clock,
        published=run.published_ns is not None,
        local=run.is_local,
        overlap=overlap_of(run),
        prefill_ns=_between(run.begun_ns, run.final_ns),
        compute_ns=length_ns(union_of(run.of("compute"))),
        write_ns=length_ns(union_of(write)),
        both_ns=length_ns(union_of(both)),
        kv_nbytes=_kv_nbytes(run),
        imported_nbytes=_nbytes(run.of("import")),
        early_nbytes=_early_nbytes(run),
        tail_ns=tail_ns,
        tail_from_last_group_ns=_from_last_group_ns(run) if run.tail else None,
        alone_ns=alone_ns,
        alone=alone,
        hidden_share=_hidden_share(tail_ns, alone_ns),
        bound=_bound(run),
        saved_ns=None if whole is None else _saved_ns(run, whole),
        whole_tail_ns=None if whole is None else _length_of(whole.tail),
        parts_ns=_parts_ns(run),
        parked_ns=None if run.parked is None else run.parked.ended_ns - run.parked.begun_ns,
        cancel_ns=_between(_first_ns(run.of("granted")), _first_ns(run.of("cancel"))),
        drain_ns=_drain_ns(run),
    )


def computes_too(run: Aligned, interval: Interval) -> bool:
    """Whether what is told as a write holds computing as well.

    A source begins to write a message with the first cells of it. If cells of a later layer are in
    it too, that layer may be computed after them, unless the prefill had ended before. A device
    tells the two apart.
    """
    told_apart = interval.kind != "write" or interval.clock != "host"
    if told_apart or of_one_layer(interval.name):
        return False
    return run.final_ns is None or interval.begun_ns < run.final_ns


def _wholes(among: Iterable[Aligned]) -> _Wholes:
    """The first of each prompt on the whole route, between two processes that nobody disturbed.

    Nobody else decoded, and it was not parked: what it did until it had storage is not in its tail.
    """
    found: _Wholes = {}
    for run in among:
        two = run.run.route == "whole" and run.tail is not None and not run.is_local
        if two and run.parked is None and length_of("neighbours", pieces(run)) == 0:
            found.setdefault(_same(run), run)
    return found


def _same(run: Aligned) -> tuple[str, int]:
    """What runs that may be compared have in common."""
    return run.run.prompt, _kv_nbytes(run)


def _alone(run: Aligned, whole: Aligned | None) -> tuple[int | None, Alone | None]:
    """T: the time in which any of the imports of `whole` was in flight, or any of the run's own.

    The tail of a whole-route run is more: its source may write all cells in it. A route that moves
    this writing into the prefill does not hide it.
    """
    if run.is_local:
        return None, None
    if whole is not None and whole.of("import"):
        return length_ns(union_of(whole.of("import"))), "whole-route run"
    imports = run.of("import")
    if run.published_ns is None or not imports:
        return None, None
    return length_ns(union_of(imports)), "own imports"


def _saved_ns(run: Aligned, whole: Aligned) -> int | None:
    """How much sooner than on the whole route the first token was there, from each submission.

    None where it was parked: it waited for whoever had the lane.
    """
    ours, theirs = run.run.measured, whole.run.measured
    if run.run.route == "whole" or run.parked is not None or ours is None or theirs is None:
        return None
    if not ours.first_token_ns or not theirs.first_token_ns:
        return None
    ttft_ns = ours.first_token_ns - ours.submitted_ns
    return theirs.first_token_ns - theirs.submitted_ns - ttft_ns


def _hidden_share(tail_ns: int | None, alone_ns: int | None) -> float | None:
    if tail_ns is None or alone_ns is None or alone_ns < TIMER_NOISE_NS:
        return None
    return 1 - tail_ns / alone_ns


def _bound(run: Aligned) -> float | None:
    measured = run.run.measured
    if measured is None or not measured.kv_nbytes:
        return None
    return 1 - measured.last_group_nbytes / measured.kv_nbytes


def _kv_nbytes(run: Aligned) -> int:
    """Of the whole transfer set, or all that was announced until the run failed."""
    measured = run.run.measured
    return _nbytes(run.of("announced")) if measured is None else measured.kv_nbytes


def _early_nbytes(run: Aligned) -> int | None:
    """What was imported before the prefill ended."""
    final_ns = run.final_ns
    if final_ns is None or not run.clock.comparable:
        return None
    return _nbytes(each for each in run.of("import") if each.ended_ns <= final_ns)


def _from_last_group_ns(run: Aligned) -> int | None:
    last_ns = run.last_group_ns
    if last_ns is not None and run.parked is not None:
        last_ns = max(last_ns, run.parked.ended_ns)
    return _between(last_ns, run.published_ns)


def _parts_ns(run: Aligned) -> dict[Part, int]:
    found = pieces(run)
    return {part: length_of(part, found) for part in PARTS} if run.tail is not None else {}


def _nbytes(intervals: Iterable[Interval]) -> int:
    return sum(each.nbytes for each in intervals)


def _first_ns(intervals: Sequence[Interval]) -> int | None:
    return intervals[0].begun_ns if intervals else None


def _between(begun_ns: int | None, ended_ns: int | None) -> int | None:
    if begun_ns is None or ended_ns is None or ended_ns < begun_ns:
        return None
    return ended_ns - begun_ns


def _length_of(stretch: tuple[int, int] | None) -> int | None:
    return None if stretch is None else stretch[1] - stretch[0]


def _drain_ns(run: Aligned) -> int | None:
    drains = run.of("drain")
    return _between(drains[0].begun_ns, drains[0].ended_ns) if drains else None
