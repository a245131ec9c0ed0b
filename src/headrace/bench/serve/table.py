"""The figures of the serving benchmark, each with its goal, from rows alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import median
from typing import Any, Final

from headrace.bench.faults.table import Figure
from headrace.bench.rows import percentile, spread
from headrace.bench.serve.malformed import is_well
from headrace.bench.serve.nonsense import kinds_of
from headrace.bench.serve.trends import memory_figures, rest_figures

Rows = list[dict[str, Any]]
MOST_TTFT_MS: Final = 10.0
MOST_TOKEN_TIME: Final = 0.03
MOST_SLOWER: Final = 0.10
LEAST_LIVE: Final = 0.90
NOT_LIVE: Final = ("not admitted", "ended", "over")
_TOLD = re.compile(r"(in the stream|[45]\d\d): [a-z-]+")  # a kind that is an error with its code


def figures(rows: Iterable[dict[str, Any]]) -> Iterator[Figure]:
    """All figures of the cases that came to their end, each from its last run."""
    found = list(rows)
    for case, read in READ.items():
        ends = [row for row in found if row["case"] == case and row["measure"] == "end"]
        if not ends:
            continue
        run = ends[-1].get("run", 0)
        mine = [row for row in found if row["case"] == case and row.get("run", 0) == run]
        for figure in read(mine):
            yield figure._replace(name=f"{case}: {figure.name}")


def of(rows: Rows, measure: str, **place: Any) -> Rows:
    """The rows of a measure that have these values."""
    return [
        row
        for row in rows
        if row["measure"] == measure and all(row.get(key) == place[key] for key in place)
    ]


def gaps_ms(rows: Rows) -> list[float]:
    """Token times of all requests that ended well, ms."""
    return [us / 1e3 for row in rows if row["kind"] == "ok" for us in row["gaps_us"]]


def _load(rows: Rows) -> Iterator[Figure]:
    requests = of(rows, "request")
    counts = Counter(row["kind"] for row in requests)
    failed = len(requests) - counts["ok"]
    took_s = max(row["at_s"] + row["took_ms"] / 1e3 for row in requests)
    result = f"{failed} of {len(requests)} in {took_s:.0f} s ({kinds_of(counts)})"
    yield Figure("requests that failed", "0", result, failed == 0)
    ttft = [row["ttft_ms"] for row in requests if row["ttft_ms"] is not None]
    yield _stated("TTFT, ms", _p50_p99(ttft))
    for prompt in sorted({row["prompt"] for row in requests}):
        some = [row["ttft_ms"] for row in of(requests, "request", prompt=prompt) if row["ttft_ms"]]
        yield _stated(f"TTFT, prompts of {prompt} tokens, ms", _p50_p99(some))
    yield _stated("token time, ms", _p50_p99(gaps_ms(requests)))
    tokens, merged = (sum(row[name] for row in requests) for name in ("tokens", "merged"))
    told = f"{tokens / took_s:.1f} tokens/s; {merged} of {tokens} tokens shared a chunk"
    yield _stated("throughput", told)
    yield from memory_figures(of(rows, "memory"))
    yield from rest_figures(of(rows, "rest"))


def _overload(rows: Rows) -> Iterator[Figure]:
    for row in of(rows, "capacity"):
        told = f"{row['requests_per_s']:.2f} requests/s, {row['clients']} clients"
        yield _stated("capacity", told)
    for arm in ("1x", "4x"):
        yield from _arm(of(rows, "request", arm=arm), arm)
    times = {
        arm: [_mean(row["gaps_us"]) / 1e3 for row in _steady(rows, arm) if row["gaps_us"]]
        for arm in ("closed", "1x", "4x")
    }
    for arm, found in times.items():
        if found:
            yield _stated(f"token time, mean of a request, {arm}, ms", str(spread(found)))
    if times["1x"] and times["4x"]:
        slower = median(times["4x"]) / median(times["1x"]) - 1
        goal = f"at most +{MOST_SLOWER:.0%}"
        name = "token time of accepted requests, 4x to 1x"
        yield Figure(name, goal, f"{slower:+.1%}", slower <= MOST_SLOWER)
        if times["closed"]:
            full = median(times["4x"]) / median(times["closed"]) - 1
            yield _stated("the same to the closed loop", f"{full:+.1%}")
    yield from memory_figures(of(rows, "memory"))
    yield from rest_figures(of(rows, "rest"))


def _steady(rows: Rows, arm: str) -> Rows:
    return [
        row
        for row in of(rows, "request", arm=arm)
        if row["kind"] == "ok" and row.get("steady", True)
    ]


def _arm(requests: Rows, arm: str) -> Iterator[Figure]:
    refused = [row for row in requests if row["status"] == 429]
    told = sum(row["retry_after"] for row in refused)
    some = arm == "4x"  # which is more than it can serve
    goal = "some, all with Retry-After" if some else "all with Retry-After"
    result = f"{len(refused)} of {len(requests)} requests, {told} with it"
    met = told == len(refused) and (bool(refused) or not some)
    yield Figure(f"refused with 429, {arm}", goal, result, met)
    others = Counter(
        row["kind"] for row in requests if row["status"] != 429 and row["kind"] != "ok"
    )
    count = sum(others.values())
    text = f"{count} ({kinds_of(others)})" if count else "0"
    yield Figure(f"other failures, {arm}", "0", text, count == 0)
    ttft = [row["ttft_ms"] for row in requests if row["kind"] == "ok"]
    yield _stated(f"TTFT of accepted requests, {arm}, ms", _p50_p99(ttft))
    if refused:
        yield _stated(f"time to a 429, {arm}, ms", _p50_p99([row["took_ms"] for row in refused]))


def _disconnects(rows: Rows) -> Iterator[Figure]:
    left = of(rows, "leave")
    phases = Counter(row["phase"] for row in left)
    live = len(left) - sum(phases[phase] for phase in NOT_LIVE)
    told, met = f"{live} of {len(left)}: {kinds_of(phases)}", live >= LEAST_LIVE * len(left) > 0
    yield Figure("clients that left a live request", f"at least {LEAST_LIVE:.0%}", told, met)
    errors = Counter(row["error"] for row in left if row["error"])
    yield Figure("requests that failed before", "0", kinds_of(errors) or "0", not errors)
    starts, ends = of(rows, "rest", when="start"), of(rows, "rest", when="end")
    for start, end in zip(starts, ends, strict=False):
        rose = end["generations"] - start["generations"]
        yield Figure("generations of the slots", "risen", f"+{rose}", rose > 0)
    yield from memory_figures(of(rows, "memory"))
    yield from rest_figures(of(rows, "rest"))
    yield from _after(rows)


def _kills(rows: Rows) -> Iterator[Figure]:
    for sources in sorted({row["sources"] for row in of(rows, "request")}, reverse=True):
        mine = [row for row in rows if row.get("sources") == sources]
        requests = of(mine, "request")
        where = f"{sources} source{'s' if sources > 1 else ''}"
        kills = [row for row in of(mine, "kill") if row["killed"]]
        restarted = sum(row["restarts"] for row in of(mine, "restarts"))
        told = f"{len(kills)} kills, {restarted} restarts"
        yield _stated(f"{where}, of {len(of(mine, 'kill'))} moments to kill", told)
        wrong = sum(row["verdict"] == "wrong" for row in requests)
        result = f"{wrong} of {len(requests)}"
        yield Figure(f"{where}, wrong texts", "0", result, wrong == 0 and bool(kills))
        lost = Counter(row["kind"] for row in requests if not is_told(row["kind"]))
        name = f"{where}, ends that are neither whole nor an error"
        yield Figure(name, "0", kinds_of(lost) or "0", not lost)
        for on_failure in ("fail", "retry"):
            some = of(requests, "request", on_failure=on_failure)
            counts = Counter("exact" if row["verdict"] == "exact" else row["kind"] for row in some)
            yield _stated(f"{where}, on_failure {on_failure}", kinds_of(counts))
        for figure in (*rest_figures(of(mine, "rest")), *_after(mine)):
            yield figure._replace(name=f"{where}, {figure.name}")


def is_told(kind: str) -> bool:
    """Whether a request ended whole, or with an error that the server told: by a status with its
    code or by an event in the stream. What hangs, is cut short or loses its connection did not.
    """
    return kind == "ok" or _TOLD.fullmatch(kind) is not None


def _malformed(rows: Rows) -> Iterator[Figure]:
    sent = of(rows, "malformed")
    counts = Counter(row["outcome"] for row in sent)
    bad = [row["name"] for row in sent if not is_well(row["outcome"])]
    goal = "no 5xx, no hang"
    told = kinds_of(counts) + (f"; {', '.join(bad[:5])}" if bad else "")
    yield Figure(f"{len(sent)} requests that are none", goal, told, not bad)
    for row in of(rows, "fuzz"):
        total = sum(row["counts"].values())
        well = all(is_well(outcome) for outcome in row["counts"])
        told = f"{kinds_of(row['counts'])}; {row['took_s']:.0f} s"
        yield Figure(f"{total} mutated bodies", goal, told, well)
    yield from memory_figures(of(rows, "memory"))
    yield from rest_figures(of(rows, "rest"))
    yield from _after(rows)


def _overhead(rows: Rows) -> Iterator[Figure]:
    paired = of(rows, "paired")
    for prompt in sorted({row["prompt"] for row in paired}):
        mine = of(paired, "paired", prompt=prompt)
        ttft = by_arm(mine, lambda row: row["ttft_ms"])
        token = by_arm(mine, _token_ms)
        for name, arms in (("TTFT", ttft), ("token time", token)):
            for arm, means in arms.items():
                if means:
                    found = str(spread(list(means.values())))
                    yield _stated(f"{name}, {prompt} tokens, {arm}, mean of two, ms", found)
        if ttft["http"]:
            added, share = added_by(ttft)
            goal, met = f"at most +{MOST_TTFT_MS:.0f} ms", median(added) <= MOST_TTFT_MS
            told = f"{spread(added)} ms, {median(share):+.1%}"
            yield Figure(f"TTFT, {prompt} tokens, added", goal, told, met)
        outside = [row["outside_ms"] for row in mine if row.get("outside_ms") is not None]
        if outside:
            goal, met = f"at most {MOST_TTFT_MS:.0f} ms", median(outside) <= MOST_TTFT_MS
            told = f"{spread(outside)} ms"
            yield Figure(f"TTFT, {prompt} tokens, spent outside the owner", goal, told, met)
        if token["http"]:
            added, share = added_by(token)
            goal, met = f"at most +{MOST_TOKEN_TIME:.0%}", median(share) <= MOST_TOKEN_TIME
            told = f"{median(share):+.1%} [{_range(share)}], {median(added):+.3f} ms"
            yield Figure(f"token time, {prompt} tokens, added", goal, told, met)


def by_arm(
    rows: Rows, value: Callable[[dict[str, Any]], float | None]
) -> Mapping[str, dict[int, float]]:
    """The mean of each arm's two requests by repeat, of the repeats that have all four."""
    found: dict[str, dict[int, list[float]]] = {"library": {}, "http": {}}
    for row in rows:
        one = value(row)
        if one is not None:
            found[row["arm"]].setdefault(row["repeat"], []).append(one)
    library, http = found["library"], found["http"]
    whole = [at for at in http if len(http[at]) == 2 == len(library.get(at, ()))]
    return {arm: {at: sum(each[at]) / 2 for at in whole} for arm, each in found.items()}


def added_by(arms: Mapping[str, dict[int, float]]) -> tuple[list[float], list[float]]:
    """What HTTP adds in each repeat, and as a share of the library's."""
    pairs = [(arms["http"][at], arms["library"][at]) for at in arms["http"]]
    return [http - own for http, own in pairs], [http / own - 1 for http, own in pairs]


def _token_ms(row: dict[str, Any]) -> float | None:
    """The mean time of a token after the first chunk, ms."""
    return _mean(row["gaps_us"]) / 1e3 if row["gaps_us"] else None


def _mixed(rows: Rows) -> Iterator[Figure]:
    medians: dict[str, float] = {}
    for arm in ("rule", "FIFO"):
        mine = of(rows, "request", arm=arm)
        failed = sum(row["kind"] != "ok" for row in mine)
        yield Figure(f"failed, {arm}", "0", f"{failed} of {len(mine)}", failed == 0)
        for length in ("short", "long"):
            ttft = [row["ttft_ms"] for row in of(mine, "request", length=length) if row["ttft_ms"]]
            if not ttft:
                continue
            told = f"{_p50_p99(ttft)}, worst {max(ttft):.0f}, n={len(ttft)}"
            yield _stated(f"TTFT of {length} prompts, {arm}, ms", told)
            medians[f"{arm} {length}"] = median(ttft)
    if {"rule short", "FIFO short"} <= medians.keys():
        ratio = medians["rule short"] / medians["FIFO short"]
        yield Figure("short prompts, rule to FIFO", "below 1", f"{ratio:.2f}", ratio < 1)
    share = of(rows, "share", kind="ok")
    for beside in (False, True):
        ttft = [row["ttft_ms"] for row in of(share, "share", client="modest", beside=beside)]
        if ttft:
            where = "beside the greedy one" if beside else "alone"
            yield _stated(f"TTFT of the modest client, {where}, ms", _p50_p99(ttft))
    counts = Counter(row["client"] for row in of(share, "share", beside=True))
    yield _stated("requests served while both asked", kinds_of(counts))


def _after(rows: Rows) -> Iterator[Figure]:
    for row in of(rows, "after"):
        word = "exact" if row["exact"] else "another text"
        yield Figure("a request afterwards", "exact", word, row["exact"])


def _p50_p99(samples: list[float]) -> str:
    if not samples:
        return "none"
    return f"p50 {percentile(samples, 50):.4g}, p99 {percentile(samples, 99):.4g}"


def _range(samples: list[float]) -> str:
    return f"{percentile(samples, 10):+.1%}, {percentile(samples, 90):+.1%}"


def _mean(samples: list[Any]) -> float:
    return float(sum(samples)) / len(samples)


def _stated(name: str, result: str) -> Figure:
    return Figure(name, "stated", result, None)


READ: Final[Mapping[str, Callable[[Rows], Iterator[Figure]]]] = {
    "load": _load,
    "overload": _overload,
    "disconnects": _disconnects,
    "kills": _kills,
    "malformed": _malformed,
    "overhead": _overhead,
    "mixed": _mixed,
}
