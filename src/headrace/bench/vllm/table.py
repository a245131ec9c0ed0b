"""What the rows of `bench vllm` say, and the figures against the goals, from rows alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from headrace.bench.faults.table import Figure
from headrace.bench.rows import Spread, spread
from headrace.bench.vllm.setting import ROUTES
from headrace.bench.vllm.tail import FIXED, LOCAL

Rows = list[dict[str, Any]]

TAIL_ALLOWANCE: Final = 1.25
MOST_CORE: Final = 0.05


@dataclass(frozen=True)
class Point:
    """One prompt length over one link, times in ms; see `tail` for what they are made of.

    ttft, tail: by label. alone: T. fixed: of all points. early: the share of the streamed route's
    bytes that was imported before the source-final time.
    """

    prompt_tokens: int
    link_mb_s: float
    ttft: Mapping[str, Spread]
    tail: Mapping[str, Spread]
    alone: float
    last_share: float
    fixed: float
    early: float

    def __str__(self) -> str:
        return f"{self.prompt_tokens} tokens, {link_of(self.link_mb_s)}"

    @property
    def bound(self) -> float:
        """The longest median tail of the streamed route that meets the goal, ms."""
        return TAIL_ALLOWANCE * (self.alone * self.last_share + self.fixed)

    @property
    def met(self) -> bool:
        return self.tail["streamed"].median <= self.bound


def link_of(mb_s: float) -> str:
    """How tables call a link."""
    return f"{mb_s:g} MB/s" if mb_s else "no link"


def points(rows: Iterable[dict[str, Any]]) -> list[Point]:
    """The points of `tail` at which every route was measured, in the order of the rows."""
    loads = [row for row in rows if row["case"] == "tail" and row["measure"] == "load"]
    fixed = [row["tail_ns"] / 1e6 for row in loads if row["label"] == FIXED]
    local: dict[int, list[float]] = {}
    found: dict[tuple[int, float], dict[str, Rows]] = {}
    for row in loads:
        if row["label"] == LOCAL:
            local.setdefault(row["prompt_tokens"], []).append(row["ttft_ns"] / 1e6)
        elif row["label"] != FIXED:
            at = found.setdefault((row["prompt_tokens"], row["link_mb_s"]), {})
            at.setdefault(row["label"], []).append(row)
    whole = [(at, labels) for at, labels in found.items() if set(ROUTES) <= labels.keys()]
    return [_point(*at, labels, local.get(at[0], []), median(fixed)) for at, labels in whole]


def _point(
    num_tokens: int, link_mb_s: float, labels: dict[str, Rows], local: list[float], fixed: float
) -> Point:
    streamed = labels["streamed"]
    ttft = {label: _ms(mine, "ttft_ns") for label, mine in labels.items()}
    return Point(
        num_tokens,
        link_mb_s,
        ttft={**({LOCAL: spread(local)} if local else {}), **ttft},
        tail={label: _ms(mine, "tail_ns") for label, mine in labels.items()},
        alone=_ms(labels["whole"], "import_ns").median,
        last_share=median(row["last_group_nbytes"] / row["kv_nbytes"] for row in streamed),
        fixed=fixed,
        early=median(row["nbytes_before_final"] / row["kv_nbytes"] for row in streamed),
    )


def _ms(rows: Rows, name: str) -> Spread:
    return spread([row[name] / 1e6 for row in rows])


def figures(rows: Iterable[dict[str, Any]]) -> Iterator[Figure]:
    """All figures of the cases that came to their end; but for `tail`, each from its last run."""
    found = list(rows)
    for case, read in READ.items():
        mine = [row for row in found if row["case"] == case]
        ends = [row for row in mine if row["measure"] == "end"]
        if not ends:
            continue
        if case != "tail":  # which goes on where it was cut short
            mine = [row for row in mine if row.get("run", 0) == ends[-1].get("run", 0)]
        for figure in read(mine):
            yield figure._replace(name=f"{case}: {figure.name}")


def _tail(rows: Rows) -> Iterator[Figure]:
    found = points(rows)
    for point in found:
        goal = f"at most {point.bound:.3g} ms"
        told = f"{point.tail['streamed']} ms"
        yield Figure(f"tail, streamed, {point}", goal, told, point.met)
    fixed = [row for row in rows if row.get("label") == FIXED]
    if fixed:
        yield _stated("fixed, ms", str(_ms(fixed, "tail_ns")))
    yield _right([row for row in rows if row["measure"] == "load" and row["label"] != LOCAL])


def _idle(rows: Rows) -> Iterator[Figure]:
    looks = [row for row in rows if row["measure"] == "cpu"]
    for executor, rest in dict.fromkeys((row["executor"], row["rest"]) for row in looks):
        mine = [row for row in looks if (row["executor"], row["rest"]) == (executor, rest)]
        by_label = {
            label: [row["cpu_ns"] / row["took_ns"] for row in mine if row["label"] == label]
            for label in ("idle", "waiting")
        }
        above = median(by_label["waiting"]) - median(by_label["idle"])
        told = ", ".join(
            f"{label} {' and '.join(f'{share:.1%}' for share in shares)}"
            for label, shares in by_label.items()
        )
        told = f"{above:.1%} of a core above idle ({told})"
        name = f"CPU of the engine while a load waits, executor {executor}"
        if rest:
            yield Figure(name, f"below {MOST_CORE:.0%} above idle", told, above < MOST_CORE)
        else:
            yield _stated(f"{name}, idle_wait_ms 0", told)
    yield _right([row for row in looks if "right" in row])


def _aborts(rows: Rows) -> Iterator[Figure]:
    asked = [row for row in rows if row["measure"] == "request"]
    yield _right([row for row in asked if row["end"] == "finished"])
    counts = Counter(_end_of(row) for row in asked)
    yield _stated("ends", ", ".join(f"{count} {end}" for end, count in counts.most_common()))
    others = sum(row["end"] not in ("finished", "aborted") for row in asked)
    yield Figure("requests that ended otherwise", "0", f"{others} of {len(asked)}", others == 0)
    for row in (row for row in rows if row["measure"] == "blocks"):
        before, after = row["before"], row["after"]
        told = f"{after['free']} of {before['free']}, {after['requests']} requests left"
        met = after["free"] == before["free"] and after["requests"] == 0
        yield Figure("blocks free at the end", "all, and no request left", told, met)


def _end_of(row: dict[str, Any]) -> str:
    if row["end"] != "aborted":
        return str(row["end"])
    return "aborted while decoding" if row["tokens"] else "aborted before the first token"


def _peer(rows: Rows) -> Iterator[Figure]:
    loads = [row for row in rows if row["measure"] == "load"]
    for row in (row for row in loads if "left_out" in row):
        yield _stated(row["label"], f"not run: {row['left_out']}")
    for row in (row for row in rows if row["measure"] == "rest"):
        cores = f"{row['cpu_ns'] / row['took_ns']:.2f} cores of {len(row['each_ns'])} engines"
        yield _stated(f"CPU with nothing to do, {row['label']}", cores)
    loads = [row for row in loads if "left_out" not in row]
    at = dict.fromkeys((row["prompt_tokens"], row["label"]) for row in loads)
    for num_tokens, label in at:
        mine = [r for r in loads if (r["prompt_tokens"], r["label"]) == (num_tokens, label)]
        told = f"{_ms(mine, 'ttft_ns')}"
        if all("p_ns" in row for row in mine):
            parts = " + ".join(f"{_ms(mine, name).median:.3g}" for name in ("p_ns", "d_ns"))
            told += f" (P and D: {parts})"
        wrong = sum(not row["right"] for row in mine)
        told += f", {wrong} of {len(mine)} answers differ from vLLM's own" if wrong else ""
        yield _stated(f"TTFT, {num_tokens} tokens, {label}, ms", told)
    yield _right([row for row in loads if row["label"].startswith("headrace")])


def _right(rows: Rows) -> Figure:
    wrong = sum(not row["right"] for row in rows)
    name = "answers that are not vLLM's own"
    return Figure(name, "0", f"{wrong} of {len(rows)}", wrong == 0 and bool(rows))


def _stated(name: str, result: str) -> Figure:
    return Figure(name, "stated", result, None)


READ: Final[Mapping[str, Callable[[Rows], Iterator[Figure]]]] = {
    "tail": _tail,
    "idle": _idle,
    "aborts": _aborts,
    "peer": _peer,
}
