"""The goals of `bench load`, on invented rows."""

from __future__ import annotations

from typing import Any

from headrace.bench.load_table import figures, serving_lines, token_lines


def token_row(
    arm: str, block: int, gaps_ms: list[float], nbytes: int = 100, route: str = "streamed"
) -> dict[str, Any]:
    return {
        "measure": "token",
        "model": "m",
        "rate_mb_s": 100.0,
        "neighbours": 2,
        "arm": arm,
        "route": None if arm == "none" else route,
        "block": block,
        "gaps_ns": [int(ms * 1e6) for ms in gaps_ms],
        "span_ns": 10**9,
        "imported_nbytes": nbytes,
    }


def serving_row(route: str, repeat: int, ttft_ms: list[float]) -> dict[str, Any]:
    return {
        "measure": "serving",
        "model": "m",
        "source": "paced",
        "rate_mb_s": 100.0,
        "in_flight": 4,
        "route": route,
        "repeat": repeat,
        "requests_per_s": 1.0,
        "kv_nbytes_per_s": 1e6,
        "elapsed_ns": 10**9,
        "ttft_ns": [int(ms * 1e6) for ms in ttft_ms],
        "tail_ns": [10**6],
        "decode_in_the_way_ns": [0],
        "choices": [{"route": "streamed"}] if route == "auto" else [],
    }


def test_the_token_time_goal_is_of_mean_and_median() -> None:
    def verdicts(real: list[float]) -> dict[str, bool | None]:
        rows = [token_row("real", 0, real), token_row("discarded", 0, [100, 100, 100])]
        rows.append(token_row("none", 0, [90, 90, 90]))
        return {figure.name: figure.met for figure in figures(rows)}

    where = "m, KV paced at 100 MB/s and streamed, 2 decoding, real to discarded"
    met = verdicts([102, 102, 102])
    assert met[f"token time, mean, {where}"] is True
    assert met[f"token time, median, {where}"] is True
    assert met[f"token time, p99, {where}"] is None
    assert met[f"token time, mean, {where.replace('discarded', 'none')}"] is None
    bursts = verdicts([100, 100, 110])
    assert bursts[f"token time, mean, {where}"] is False
    assert bursts[f"token time, median, {where}"] is True
    assert verdicts([103, 103, 103])[f"token time, median, {where}"] is False


def test_token_ratios_are_paired_by_block() -> None:
    rows = [
        token_row("real", 0, [10]),
        token_row("discarded", 0, [10], nbytes=50),
        token_row("real", 1, [20]),  # the machine was slower then
        token_row("discarded", 1, [20], nbytes=50),
        token_row("real", 2, [99]),  # has no partner
    ]
    results = {figure.name: figure.result for figure in figures(rows)}
    where = "m, KV paced at 100 MB/s and streamed, 2 decoding, real to discarded"
    assert results[f"token time, mean, {where}"] == "1.0000 [1.0000, 1.0000] n=2"
    assert results[f"KV imported per token, {where}"].startswith("2.0000")
    line = next(iter(token_lines(rows)))
    assert (line.arm, line.gap_ms.samples, line.p99_ms) == ("real", 3, 99)


def test_arrivals_of_each_route_are_compared_with_the_same_none() -> None:
    rows = [token_row("none", 0, [10])]
    for route, ms in (("streamed", 20.0), ("whole", 30.0)):
        rows += [
            token_row("real", 0, [ms], route=route),
            token_row("discarded", 0, [ms], route=route),
        ]
    results = {figure.name: figure.result for figure in figures(rows)}
    for route, ratio in (("streamed", "2.0000"), ("whole", "3.0000")):
        where = f"m, KV paced at 100 MB/s and {route}, 2 decoding, real to"
        assert results[f"token time, mean, {where} none"].startswith(ratio)
        assert results[f"token time, mean, {where} discarded"].startswith("1.0000")


def test_blocks_of_two_runs_are_no_pair() -> None:
    rows = [token_row("real", 0, [10]), {**token_row("discarded", 0, [10]), "run": 1}]
    assert list(figures(rows)) == []


def test_auto_must_not_be_slower_than_whole_under_load() -> None:
    def met(auto_ms: float) -> bool | None:
        rows = [serving_row("whole", 0, [100, 100, 900]), serving_row("auto", 0, [auto_ms] * 3)]
        rows.append(serving_row("streamed", 0, [50]))
        found = {figure.name: figure.met for figure in figures(rows)}
        assert found["TTFT, m, paced source at 100 MB/s, 4 in flight, streamed to whole"] is None
        return found["TTFT, m, paced source at 100 MB/s, 4 in flight, auto to whole"]

    assert met(102) is True
    assert met(103) is False
    rows = [serving_row("whole", 0, [100, 120]), serving_row("streamed", 0, [50, 60])]
    rows.append({**serving_row("auto", 0, [100, 55, 56]), "nth": 1})
    best = {figure.name: figure for figure in figures(rows)}[
        "TTFT, m, paced source at 100 MB/s, 4 in flight, auto to streamed, the best fixed"
    ]
    assert best.result == "1.0182 [1.0000, 1.8182] n=3; first request 2.0000"
    assert best.met is True
    (line,) = serving_lines([serving_row("auto", 0, [1, 2, 3])])
    assert (line.ttft_ms.median, line.note) == (2, "1 x streamed")
    assert list(figures([])) == []
