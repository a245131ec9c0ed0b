"""The serving benchmark at smoke size: real servers, a cheap pair, and figures of known rows."""

from __future__ import annotations

import asyncio
import json
import os
import time
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.bench import serve
from headrace.bench.faults.table import Figure
from headrace.bench.rows import RowFile, read_rows
from headrace.bench.serve import disconnects, holding, kills, load, malformed, mixed, overhead
from headrace.bench.serve.asking import Answer, client_of, prompts_of
from headrace.bench.serve.child import Served, ServerFailed, memory_of, parent_of, toml
from headrace.bench.serve.kills import verdict
from headrace.bench.serve.malformed import is_well
from headrace.bench.serve.mixed import arrivals as mixed_arrivals
from headrace.bench.serve.nonsense import mutated, table
from headrace.bench.serve.overload import arrivals
from headrace.bench.serve.setting import QUICK, Setting
from headrace.bench.serve.table import READ, figures
from headrace.bench.serve.trends import is_flat, trend
from headrace.cli import run_command
from headrace.errors import Refused

pytest.importorskip("httpx")
pytest.importorskip("starlette")
pytest.importorskip("tokenizers")

DECODER = "tests.served:open_decoder"
GEOMETRY: dict[str, Any] = {"layers": 4, "heads": 2, "head_dim": 8, "vocab_size": 256}
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """A model of a tokenizer alone, one token a byte: replay computes nothing."""
    from tests.served import MODEL, model_directory

    directory = model_directory(tmp_path_factory.mktemp("served") / MODEL)
    return Setting(
        model=MODEL,
        directory=directory,
        source="replay",
        source_options={**GEOMETRY, "layer_ms": 1.0},
        decoder=DECODER,
        context=128,
        sizes=QUICK,
    )


@pytest.fixture(scope="module")
def served(setting: Setting) -> Iterator[Served]:
    """One server for all cases that need no config of their own."""
    with Served(setting.config(page={"look_every_s": 0.1})) as found:
        yield found
        assert found.alive


def read(case: str, rows: Rows, *, but: str = "") -> dict[str, Figure]:
    """The figures of a case, by name, of which none may be missed, but for one."""
    found = {figure.name: figure for figure in READ[case](rows)}
    assert [figure for figure in found.values() if figure.met is False and figure.name != but] == []
    return found


def test_a_load_fails_nothing_and_leaves_nothing(served: Served, setting: Setting) -> None:
    rows: Rows = []
    asyncio.run(load.measure(served, setting, rows.append))
    found = read("load", rows)
    assert found["requests that failed"].met
    assert found["ledger as at the start"].met
    requests = [row for row in rows if row["measure"] == "request"]
    assert {row["tokens"] for row in requests} == {QUICK.tokens}
    assert {row["prompt"] for row in requests} == set(QUICK.lengths)
    assert all(0 < row["ttft_ms"] <= row["took_ms"] for row in requests)
    assert {row["role"] for row in rows if row["measure"] == "memory"} == {
        "server",
        "owner",
        "source-0",
    }


def test_who_leaves_leaves_nothing(served: Served, setting: Setting) -> None:
    rows: Rows = []
    asyncio.run(disconnects.measure(served, setting, rows.append))
    found = read("disconnects", rows, but="clients that left a live request")  # a fast pair
    assert found["generations of the slots"].met
    assert found["a request afterwards"].met
    left = [row for row in rows if row["measure"] == "leave"]
    assert sorted(row["number"] for row in left) == list(range(QUICK.disconnects))
    assert any(not row["finished"] for row in left), "nobody left before the end"


def test_nonsense_is_refused(served: Served, setting: Setting) -> None:
    rows: Rows = []
    asyncio.run(malformed.measure(served, setting, rows.append))
    found = read("malformed", rows)
    assert found[f"{QUICK.malformed} requests that are none"].met
    assert found[f"{QUICK.fuzz} mutated bodies"].met
    assert found["a request afterwards"].met


def test_http_and_the_library_take_turns(served: Served, setting: Setting) -> None:
    rows: Rows = []
    overhead.measure(served, setting, rows.append)
    for prompt in QUICK.overhead_prompts:
        arms = [row["arm"] for row in rows if row["prompt"] == prompt]
        assert arms == [*overhead.ARMS] * QUICK.overhead_repeats
    assert {row["tokens"] for row in rows} == {QUICK.overhead_tokens}
    over_http = [row for row in rows if row["arm"] == "http"]
    assert all(0 < row["outside_ms"] < row["ttft_ms"] for row in over_http)
    names = [figure.name for figure in READ["overhead"](rows)]
    assert [name for name in names if name.startswith("TTFT") and name.endswith("added")]


@pytest.mark.usefixtures("nothing_left")
def test_cases_are_run_by_name_and_gone_on_with(
    setting: Setting,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What needs configs of its own; of kills and of mixed lengths one arm."""
    monkeypatch.setattr(kills, "SOURCES", (2,))
    monkeypatch.setattr(mixed, "ARMS", ("rule",))
    out = tmp_path / "serve.jsonl"
    words = ["--model", str(setting.directory), "--source", setting.source, "--quick"]
    words += ["--source-options", json.dumps(setting.source_options), "--context", "128"]
    words += ["--decoder", setting.decoder, "--out", str(out)]
    assert run_command(["bench", "serve", "overload", *words]) == 0
    assert run_command(["bench", "serve", "overload", "kills", "mixed", "--resume", *words]) == 0
    assert "overload: its rows are there" in capsys.readouterr().out
    rows = read_rows(out)
    assert str(setting.directory) not in out.read_text(), "a place of this machine"
    ends = [row["case"] for row in rows if row["measure"] == "end"]
    assert ends == ["overload", "kills", "mixed"]
    check_overload([row for row in rows if row["case"] == "overload"])
    check_kills([row for row in rows if row["case"] == "kills"])
    check_mixed([row for row in rows if row["case"] == "mixed"])


def check_overload(rows: Rows) -> None:
    arms = [row["arm"] for row in rows if row["measure"] == "request"]
    assert set(arms) == {"closed", "1x", "4x"}
    found = {figure.name: figure.met for figure in READ["overload"](rows)}
    assert found["other failures, 4x"]
    assert "refused with 429, 4x" in found  # whether any is, a slow machine decides in 0.2 s


def check_kills(rows: Rows) -> None:
    assert any(row["measure"] == "kill" and row["killed"] for row in rows)
    verdicts = {row["verdict"] for row in rows if row["measure"] == "request"}
    assert verdicts <= {"exact", "error"}
    assert sum(row["restarts"] for row in rows if row["measure"] == "restarts") > 0
    read("kills", rows)


def check_mixed(rows: Rows) -> None:
    requests = [row for row in rows if row["measure"] == "request"]
    assert {row["length"] for row in requests} == {"long", "short"}
    assert {row["kind"] for row in requests} == {"ok"}
    both = {row["client"] for row in rows if row["measure"] == "share" and row["beside"]}
    assert both == {"modest", "greedy"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["sleep"], "unknown case 'sleep'; known are load, overload"),
        (["--route", "sideways"], "unknown route 'sideways'"),
        (["--context", "64"], "--context is 64 positions, and the longest request needs 68"),
        (["--clients", "0"], "--clients is 0; it must be at least 1"),
        (["--minutes", "0"], "--minutes is 0"),
    ],
)
def test_a_mistake_is_one_sentence(
    words: list[str], sentence: str, setting: Setting, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run_command(["bench", "serve", *words, "--quick", "--model", str(setting.directory)]) == 2
    )
    complaint = capsys.readouterr().err
    assert sentence in complaint
    assert complaint.count("\n") == 1


@pytest.mark.usefixtures("nothing_left")
def test_a_server_that_does_not_start_tells_why(setting: Setting) -> None:
    config = setting.config(queue={"max_requests": 0})
    with pytest.raises(ServerFailed, match="max_requests"):
        Served(config)


def test_a_config_is_read_back_as_it_was(setting: Setting) -> None:
    config = setting.config(sources=2, queue={"patience": 0.0}, page={"enabled": False})
    assert tomllib.loads(toml(config)) == config


def test_a_process_tells_its_memory_and_its_parent() -> None:
    found = memory_of(os.getpid())
    assert found["rss_nbytes"] >= found["anon_nbytes"] > 1 << 20
    assert found["fds"] == len(os.listdir("/proc/self/fd"))
    assert parent_of(os.getpid()) == os.getppid()
    assert parent_of(2**22 + 1) == 0


def test_tokens_of_one_chunk_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((1000, 4000, 4500, 9000))
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(clock))
    answer = Answer(0, status=200)
    for text, tokens in (("a", 1), ("bcd", 4), ("", 4), ("e", 5)):
        event = {"choices": [{"text": text}], "usage": {"completion_tokens": tokens}}
        answer.hear(f"data: {json.dumps(event)}")
    answer.hear("")
    assert answer.kind == "200: cut short"
    answer.hear("data: [DONE]")
    assert (answer.ttft_ns, answer.gaps_ns, answer.merged) == (1000, [1000, 1000, 1000, 5000], 3)
    assert (answer.text, answer.tokens, answer.kind) == ("abcde", 5, "ok")


def test_an_error_in_a_stream_is_no_end() -> None:
    answer = Answer(0, status=200)
    answer.hear('data: {"error": {"code": "source-died", "message": "it died"}}')
    assert answer.kind == "in the stream: source-died"


def test_prompts_have_their_lengths(setting: Setting) -> None:
    prompts = prompts_of(setting.directory, (5, 9), 4, 3)
    assert [len(prompt) for prompt in prompts] == [5, 9, 5, 9]
    assert prompts == prompts_of(setting.directory, (5, 9), 4, 3)
    assert prompts[0] != prompts[2]


def test_what_leaks_is_not_flat() -> None:
    mib = float(1 << 20)
    steady = [(float(at), 500 * mib) for at in range(40)]
    leaking = [(at, value + at * mib / 2) for at, value in steady]
    once = [(at, value + (3 * mib if at > 3 else 0)) for at, value in steady]
    assert is_flat(trend(steady))
    assert is_flat(trend(once))
    assert not is_flat(trend(leaking))
    assert trend(leaking).per_minute == pytest.approx(30 * mib)
    assert trend([(0.0, mib)]) == (mib, mib, 0.0)


def test_arrivals_come_at_their_rate() -> None:
    due = arrivals(10.0, 5.0, 1)
    assert len(due) == 50
    assert due == sorted(due)
    assert due[0] >= 0
    assert due[-1] <= 5.0
    assert len(arrivals(0.01, 5.0, 1)) == 1
    kinds = [kind for _, kind in mixed_arrivals(1.0, 400.0, 1)]
    assert 3 < kinds.count("short") / kinds.count("long") < 5
    assert {kind for _, kind in mixed_arrivals(1e6, 1.0, 1)} == {"long", "short"}


def test_a_text_is_exact_or_wrong_or_belongs_to_an_error() -> None:
    assert verdict("ok", "abc", "abc") == "exact"
    assert verdict("ok", "ab", "abc") == "wrong"
    assert verdict("in the stream: source-died", "ab", "abc") == "error"
    assert verdict("in the stream: source-died", "ax", "abc") == "wrong"
    assert verdict("503: source-died", "", "abc") == "error"


def test_an_outcome_is_well_below_500() -> None:
    assert all(map(is_well, ("400", "200", "431", "closed")))
    assert not any(map(is_well, ("500", "503", "hang", "ReadError", "200 and an error event")))


def test_nonsense_has_many_kinds() -> None:
    found = table("m", 200)
    assert len(found) == 200
    assert {each.whole for each in found} == {True, False}
    assert table("m", 10) == found[:10]
    bodies = list(mutated("m", 500, 1))
    assert bodies == list(mutated("m", 500, 1))
    assert bodies != list(mutated("m", 500, 2))
    assert len(set(bodies)) > 300


def request(at: int, **more: Any) -> dict[str, Any]:
    row = {"measure": "request", "at_s": float(at), "took_ms": 100.0, "status": 200, "kind": "ok"}
    times = {"ttft_ms": 10.0, "gaps_us": [1000] * 4, "tokens": 5, "merged": 0, "prompt": 8}
    return {**row, **times, "retry_after": False, **more}


def test_a_failed_request_misses_the_goal_of_a_load() -> None:
    rows = [request(at) for at in range(10)]
    good = next(READ["load"](rows))
    bad = next(READ["load"]([*rows, request(11, kind="503: no-source", status=503)]))
    assert (good.met, bad.met) == (True, False)
    assert bad.result == "1 of 11 in 11 s (10 x ok, 1 x 503: no-source)"


@pytest.mark.parametrize(("gap_us", "met"), [(1090, True), (1110, False)])
def test_overload_is_compared_by_token_time(gap_us: int, met: bool) -> None:
    rows = [request(at, arm="1x", steady=True) for at in range(5)]
    rows += [request(at, arm="4x", steady=True, gaps_us=[gap_us] * 4) for at in range(5)]
    rows += [request(9, arm="4x", steady=False, gaps_us=[9**9])]
    rows += [request(9, arm="4x", status=429, kind="429: queue-full", retry_after=met)]
    found = {figure.name: figure.met for figure in READ["overload"](rows)}
    assert found["token time of accepted requests, 4x to 1x"] is met
    assert found["refused with 429, 4x"] is met
    assert found["other failures, 4x"]


@pytest.mark.parametrize(("ttft_ms", "gap_us", "met"), [(19.0, 1020, True), (21.0, 1040, False)])
def test_overhead_is_the_median_over_whole_repeats(ttft_ms: float, gap_us: int, met: bool) -> None:
    rows = []
    for repeat in range(3):
        for arm in overhead.ARMS:
            own = {"ttft_ms": 10.0, "gaps_us": [1000] * 4}
            outside_ms = ttft_ms - 10.0 if repeat else 999.0
            http = {"ttft_ms": ttft_ms, "gaps_us": [gap_us] * 4, "outside_ms": outside_ms}
            row = request(0, arm=arm, repeat=repeat, **(http if arm == "http" else own))
            rows.append({**row, "measure": "paired"})
    rows.append({**request(0, arm="http", repeat=3, ttft_ms=999.0), "measure": "paired"})
    found = {figure.name: figure for figure in READ["overhead"](rows)}
    assert found["TTFT, 8 tokens, added"].met is met
    assert found["TTFT, 8 tokens, spent outside the owner"].met is met
    assert found["token time, 8 tokens, added"].met is met
    assert "n=3" in found["TTFT, 8 tokens, added"].result


def test_kills_without_a_kill_prove_nothing() -> None:
    ended = request(0, sources=2, on_failure="fail", verdict="exact")
    kill = {"measure": "kill", "sources": 2, "killed": True}
    name = "2 sources, wrong texts"

    def met(rows: Rows) -> bool | None:
        return {figure.name: figure.met for figure in READ["kills"](rows)}[name]

    assert met([ended, kill])
    assert met([ended, {**kill, "killed": False}]) is False
    assert met([ended, kill, {**ended, "verdict": "wrong"}]) is False


@pytest.mark.parametrize(
    ("kind", "met"),
    [
        ("ok", True),
        ("503: source-died", True),
        ("500: corrupt", True),
        ("in the stream: source-died", True),
        ("200: cut short", False),
        ("200: RemoteProtocolError", False),
        ("0: ReadTimeout", False),
        ("0: ConnectError", False),
        ("503: no error body", False),
        ("in the stream: ReadTimeout", False),
    ],
)
def test_what_hangs_or_is_cut_short_beside_a_kill_is_no_end(kind: str, met: bool) -> None:
    verdict = "exact" if kind == "ok" else "error"
    ended = request(0, sources=2, on_failure="fail", kind=kind, verdict=verdict)
    found = {figure.name: figure for figure in READ["kills"]([ended])}
    end = found["2 sources, ends that are neither whole nor an error"]
    assert (end.met, end.result) == (met, "0" if met else f"1 x {kind}")


@pytest.mark.parametrize(("arm", "met"), [("1x", True), ("4x", False)])
def test_more_than_can_be_served_has_refusals(arm: str, met: bool) -> None:
    found = {figure.name: figure.met for figure in READ["overload"]([request(0, arm=arm)])}
    assert found[f"refused with 429, {arm}"] is met


@pytest.mark.parametrize("phase", ["ended", "over", "not admitted"])
def test_who_leaves_what_is_over_has_not_left(phase: str) -> None:
    leave = {"measure": "leave", "error": ""}
    live = [{**leave, "phase": "decoding"}] * 9

    def met(rows: Rows) -> bool | None:
        found = {figure.name: figure.met for figure in READ["disconnects"](rows)}
        return found["clients that left a live request"]

    assert met([*live, {**leave, "phase": phase}])
    assert met([*live, *[{**leave, "phase": phase}] * 2]) is False
    assert met([]) is False


def test_a_server_that_does_not_come_to_rest_is_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"decoders": [], "num_open": 1, "queue": {"waiting": 0}}

    async def status(client: object) -> dict[str, Any]:
        return told

    monkeypatch.setattr(holding, "status", status)
    monkeypatch.setattr(holding, "SETTLE_WITHIN_S", 0.0)
    served: Any = SimpleNamespace(pid=os.getpid())
    with pytest.raises(ServerFailed, match=r"not at rest after 0 s: .*'open': 1"):
        asyncio.run(holding.rest(served, partial(client_of, "http://127.0.0.1:9")))


def test_short_prompts_and_clients_are_told_apart() -> None:
    rows = [request(0, arm="rule", length="short", ttft_ms=5.0)]
    rows += [request(0, arm="FIFO", length="short", ttft_ms=10.0)]
    rows += [request(0, arm="rule", length="long", ttft_ms=70.0)]
    share = {**request(0), "measure": "share", "beside": True}
    rows += [{**share, "client": who} for who in ("modest", "greedy", "greedy")]
    found = {figure.name: figure for figure in READ["mixed"](rows)}
    assert found["short prompts, rule to FIFO"].result == "0.50"
    assert "worst 70" in found["TTFT of long prompts, rule, ms"].result
    assert found["requests served while both asked"].result == "2 x greedy, 1 x modest"


def test_only_cases_that_came_to_their_end_have_figures(setting: Setting) -> None:
    """Rows of a run that was cut short count for nothing, also where a later one was whole."""
    file = RowFile(None, serve.CLAIM, serve.KEY)
    cut = [{"case": "load", **request(at, kind="503: no-source")} for at in range(3)]
    assert list(figures(cut)) == []
    whole = [{"case": "load", **request(0), "run": 1}, {"case": "load", "measure": "end", "run": 1}]
    (first, *_) = figures([*cut, *whole])
    assert (first.name, first.met) == ("load: requests that failed", True)
    assert {"case": "load", "measure": "end"} not in file


def test_the_context_holds_the_longest_request(setting: Setting) -> None:
    setting.check()
    with pytest.raises(Refused, match="letters holds 4096"):
        replace(setting, context=8192, sizes=replace(QUICK, long=5000)).check()
