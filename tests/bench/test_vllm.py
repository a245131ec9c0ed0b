"""The vLLM benchmark without vLLM: what it plans, what it reads from rows, and what it refuses."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.backends.base import Done, Reservation, ReservesByLabel
from headrace.backends.paged import PagedDecoder
from headrace.bench import vllm
from headrace.bench.faults.table import Figure
from headrace.bench.rows import RowFile
from headrace.bench.vllm.aborts import Crowd, plan_of, prompts_of
from headrace.bench.vllm.engine import Engine, EngineFailed
from headrace.bench.vllm.idle import cpu_ns
from headrace.bench.vllm.paged_link import PagedLink
from headrace.bench.vllm.setting import BLOCK, QUICK, ROUTES, Setting
from headrace.bench.vllm.table import figures, points
from headrace.bench.vllm.tail import FIXED, LOCAL, ONE_BLOCK, answer_of, labels_of, missing
from headrace.cli import run_command

Rows = list[dict[str, Any]]
SETTING = Setting("smollm2-135m", sizes=QUICK)
MS = 1_000_000


def file_of(rows: Rows) -> RowFile:
    file = RowFile(None, vllm.CLAIM, vllm.KEY)
    for row in rows:
        file.append(row)
    return file


def read(case: str, rows: Rows) -> dict[str, Figure]:
    end = {"case": case, "measure": "end"}
    found = figures([{"case": case, **row} for row in rows] + [end])
    return {figure.name.removeprefix(f"{case}: "): figure for figure in found}


# tail


def load(label: str, repeat: int = 0, link_mb_s: float = 60.0, **more: Any) -> dict[str, Any]:
    times = {"tail_ns": 2 * MS, "import_ns": 100 * MS, "ttft_ns": 900 * MS, "right": True}
    sizes = {"kv_nbytes": 1000, "last_group_nbytes": 100, "nbytes_before_final": 900}
    at = {"prompt_tokens": 300, "link_mb_s": link_mb_s, "label": label, "repeat": repeat}
    return {"case": "tail", "measure": "load", **at, **times, **sizes, **more}


def test_a_round_takes_the_routes_in_the_other_order_than_the_one_before() -> None:
    assert labels_of(0, 30.0) == [FIXED, "whole", "chunked", "streamed"]
    assert labels_of(1, 30.0) == [FIXED, "streamed", "chunked", "whole"]
    assert labels_of(0, 0.0) == [FIXED, LOCAL, *ROUTES]


def test_short_prompts_have_more_rounds() -> None:
    setting = Setting("m")
    assert [setting.rounds(n) for n in setting.sizes.lengths] == [10, 6, 4, 4]


def test_what_a_file_holds_is_not_measured_again() -> None:
    setting = Setting("m", sizes=QUICK)
    everything = list(missing(setting, 300, 60.0, file_of([])))
    assert [label for _, label in everything] == labels_of(0, 60.0)
    rest = list(missing(setting, 300, 60.0, file_of([load("whole")])))
    assert rest == [each for each in everything if each[1] != "whole"]
    other_link = list(missing(setting, 300, 30.0, file_of([load("whole")])))
    assert other_link == everything


def test_the_goal_is_made_of_the_whole_routes_import_and_of_the_fixed_part() -> None:
    rows = [load(label) for label in ROUTES] + [load(FIXED, tail_ns=1 * MS)]
    rows[0]["import_ns"] = 40 * MS  # of the whole route; the others' say nothing of T
    (point,) = points(rows)
    assert (point.alone, point.last_share, point.fixed) == (40.0, 0.1, 1.0)
    assert point.bound == pytest.approx(1.25 * (40.0 * 0.1 + 1.0))
    assert point.early == 0.9
    assert point.met


@pytest.mark.parametrize(("tail_ms", "met"), [(6.24, True), (6.26, False)])
def test_a_tail_is_held_against_its_goal(tail_ms: float, met: bool) -> None:
    rows = [load("whole", import_ns=40 * MS), load("chunked"), load(FIXED, tail_ns=1 * MS)]
    rows.append(load("streamed", tail_ns=int(tail_ms * MS)))
    found = read("tail", rows)
    assert found["tail, streamed, 300 tokens, 60 MB/s"].met is met
    assert found["answers that are not vLLM's own"].met is True


def test_each_link_has_its_own_point_and_vllms_own_prefill_stands_beside_all() -> None:
    rows = [load(label, link_mb_s=link) for link in (0.0, 60.0) for label in ROUTES]
    rows += [load(FIXED), load(LOCAL, link_mb_s=0.0, ttft_ns=700 * MS)]
    found = points(rows)
    assert [str(point) for point in found] == ["300 tokens, no link", "300 tokens, 60 MB/s"]
    assert [point.ttft[LOCAL].median for point in found] == [700.0, 700.0]


def test_a_point_without_all_routes_is_none() -> None:
    assert points([load("whole"), load("streamed"), load(FIXED)]) == []


def test_one_wrong_answer_is_seen() -> None:
    rows = [load(label) for label in (*ROUTES, FIXED)] + [load("whole", 1, right=False)]
    figure = read("tail", rows)["answers that are not vLLM's own"]
    assert (figure.result, figure.met) == ("1 of 5", False)


def test_an_answer_is_right_if_its_tokens_are() -> None:
    told = {
        "tokens": [1, 2],
        "ttft_ns": 5,
        "took_ns": 9,
        "measured": {"tail_ns": 3},
        "params": None,
    }
    row = answer_of(told, [1, 2])
    assert row == {"tokens": [1, 2], "ttft_ns": 5, "took_ns": 9, "right": True, "tail_ns": 3}
    assert not answer_of({**told, "measured": None}, [1, 3])["right"]


class Blocks:
    """Blocks whose imports are over when they return."""

    caps = None

    def __init__(self) -> None:
        self.reserved: list[int | None] = []
        self.imported = 0

    def reserve_for(self, label: int | None, num_tokens: int) -> Reservation:
        self.reserved.append(label)
        return Reservation(0, num_tokens, 1)

    def begin_import(self, reservation: Reservation, slot: Any, copies: Any) -> Done:
        self.imported += 1
        return Done()


def test_imports_wait_for_the_link_and_go_straight_to_the_blocks_without_one() -> None:
    blocks = Blocks()
    made = PagedLink(cast("PagedDecoder", blocks))
    assert isinstance(made, ReservesByLabel)
    link: Any = made
    held = link.reserve_for(7, 32)
    assert blocks.reserved == [7]
    copies = [SimpleNamespace(nbytes=20_000)]
    assert isinstance(link.begin_import(held, None, copies), Done)
    link.set_mb_s(1.0)
    begun_s = time.monotonic()
    fences = [link.begin_import(held, None, copies) for _ in range(2)]
    while not fences[1].done():
        pass
    assert time.monotonic() - begun_s >= 0.04  # one behind the other
    assert fences[0].done()
    link.set_mb_s(0.0)
    assert isinstance(link.begin_import(held, None, copies), Done)
    assert blocks.imported == 4


# idle


def look(label: str, share: float, *, rest: bool = True, **more: Any) -> dict[str, Any]:
    cpu = {"cpu_ns": int(share * 1e9), "took_ns": 1_000_000_000}
    return {"measure": "cpu", "label": label, "executor": "uni", "rest": rest, **cpu, **more}


@pytest.mark.parametrize(("share", "met"), [(0.059, True), (0.061, False)])
def test_waiting_is_held_against_what_idle_takes(share: float, met: bool) -> None:
    rows = [look("idle", 0.01), look("waiting", share, right=True)]
    rows += [look("idle", 0.01, rest=False), look("waiting", 0.9, rest=False, right=True)]
    found = read("idle", rows)
    assert found["CPU of the engine while a load waits, executor uni"].met is met
    stated = found["CPU of the engine while a load waits, executor uni, idle_wait_ms 0"]
    assert stated.result.startswith("89.0% of a core above idle")
    assert found["answers that are not vLLM's own"].result == "0 of 2"


def test_cpu_time_is_what_a_process_has_used() -> None:
    before_ns, begun_s = cpu_ns(os.getpid()), time.process_time()
    while time.process_time() - begun_s < 0.05:
        math.sqrt(2.0)
    used_s = (cpu_ns(os.getpid()) - before_ns) / 1e9
    assert 0.02 < used_s < time.process_time() - begun_s + 0.05


# aborts


def test_a_plan_is_the_same_for_the_same_seed() -> None:
    setting = Setting("m", sizes=QUICK)
    prompts = prompts_of(setting)
    assert prompts == prompts_of(setting)
    assert all(QUICK.least <= len(prompt) <= QUICK.most for prompt in prompts)
    plan = plan_of(setting, prompts)
    assert plan == plan_of(setting, prompts)
    assert [each["number"] for each in plan] == list(range(QUICK.requests))
    assert plan != plan_of(Setting("m", seed=2, sizes=QUICK), prompts)
    many = plan_of(Setting("m"), prompts_of(Setting("m")))
    assert {each["route"] for each in many} == set(ROUTES)
    assert 0.4 < sum(each["abort_ms"] > 0 for each in many) / len(many) < 0.6


class Counting:
    """An engine that gives every live request one token in each step, which takes 10 ms."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.live: dict[str, tuple[int, list[int]]] = {}
        self.most = 0
        self.aborted: list[str] = []

    def add(self, tokens: list[int], max_tokens: int, params: dict[str, Any] | None) -> str:
        assert params is not None
        assert params["do_remote_prefill"]
        name = f"r{tokens[0]}"
        self.live[name] = max_tokens, []
        self.most = max(self.most, len(self.live))
        return name

    def step(self) -> list[Any]:
        self.now_s += 0.01
        outputs = []
        for name, (count, tokens) in list(self.live.items()):
            tokens.append(len(tokens))
            over = len(tokens) == count
            completion = SimpleNamespace(
                token_ids=list(tokens), finish_reason="length" if over else None
            )
            outputs.append(SimpleNamespace(request_id=name, outputs=[completion], finished=over))
            if over:
                del self.live[name]
        return outputs

    def abort(self, name: str) -> None:
        del self.live[name]
        self.aborted.append(name)


def test_a_crowd_answers_or_aborts_every_request() -> None:
    engine = Counting()
    aborts = [0, 25, 0, 500, 5]
    plan = [
        {"number": at, "tokens": [at], "max_tokens": 4, "route": "whole", "abort_ms": ms}
        for at, ms in enumerate(aborts)
    ]
    answers = Crowd(engine, plan, at_once=2, clock_s=lambda: engine.now_s).run()
    ends = [answer["end"] for answer in answers]
    assert ends == ["finished", "aborted", "finished", "finished", "aborted"]
    assert [len(answer["tokens"]) for answer in answers] == [4, 3, 4, 4, 1]
    assert (engine.aborted, engine.most, engine.live) == (["r1", "r4"], 2, {})


def asked(end: str, tokens: list[int], **more: Any) -> dict[str, Any]:
    return {"measure": "request", "end": end, "tokens": tokens, **more}


def test_aborts_count_wrong_answers_ends_and_blocks() -> None:
    full, less = {"free": 9, "requests": 0}, {"free": 8, "requests": 0}
    rows: Rows = [
        asked("finished", [1], right=True),
        asked("finished", [2], right=False),
        asked("aborted", []),
        asked("aborted", [3]),
        asked("error", []),
    ]
    found = read("aborts", [*rows, {"measure": "blocks", "before": full, "after": less}])
    assert found["answers that are not vLLM's own"].result == "1 of 2"
    assert "1 aborted before the first token" in found["ends"].result
    assert found["requests that ended otherwise"].met is False
    assert found["blocks free at the end"].met is False
    found = read("aborts", [rows[0], {"measure": "blocks", "before": full, "after": full}])
    assert all(figure.met is not False for figure in found.values())


# peer


def test_a_peer_stands_beside_headrace_with_its_parts_and_its_wrong_answers() -> None:
    at = {"measure": "load", "prompt_tokens": 300}
    rows: Rows = [
        {**at, "label": "headrace, torch -> vLLM, whole", "ttft_ns": 900 * MS, "right": True},
        {**at, "label": "ExampleConnector", "ttft_ns": 1000 * MS, "right": False}
        | {"p_ns": 700 * MS, "d_ns": 300 * MS},
        {"measure": "load", "label": "NixlConnector", "left_out": "there is no nixl"},
        {
            "measure": "rest",
            "label": "ExampleConnector",
            "cpu_ns": 3,
            "took_ns": 2,
            "each_ns": [1, 2],
        },
    ]
    found = read("peer", rows)
    peer = found["TTFT, 300 tokens, ExampleConnector, ms"].result
    assert "(P and D: 700 + 300), 1 of 1 answers differ" in peer
    assert found["NixlConnector"].result == "not run: there is no nixl"
    assert "1.50 cores of 2" in found["CPU with nothing to do, ExampleConnector"].result
    assert found["answers that are not vLLM's own"].result == "0 of 1"


# The command, and its child.


def test_only_cases_that_came_to_their_end_are_told_each_from_its_last_run() -> None:
    rows: Rows = [{"case": "aborts", **asked("error", []), "run": 0}]
    assert list(figures(rows)) == []
    rows.append({"case": "aborts", **asked("finished", [1], right=True), "run": 1})
    rows.append({"case": "aborts", "measure": "end", "run": 1})
    assert all(figure.met is not False for figure in figures(rows))
    assert vllm.pending(file_of(rows), ["tail", "aborts"]) == ["tail"]


def test_the_table_of_a_whole_file_is_printed_without_vllm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*(load(label) for label in (*ROUTES, FIXED, LOCAL)), {"case": "tail", "measure": "end"}]
    about = {"claim": vllm.CLAIM, "settings": SETTING.same(), "stamp": {}}
    out = tmp_path / "rows.jsonl"
    out.write_text("".join(json.dumps(line) + "\n" for line in (about, *rows)))
    status = run_command(["bench", "vllm", "tail", "--out", str(out), "--resume"])
    printed = capsys.readouterr()
    assert (status, printed.err) == (0, "")
    assert "tail: tail, streamed, 300 tokens, 60 MB/s" in printed.out
    assert "goals met" in printed.out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nothing"], "unknown case 'nothing'; known are tail, idle, aborts, peer"),
        (["--lengths", str(ONE_BLOCK - 1)], f"--lengths is {BLOCK}; it must be at least 33"),
        (["--links-mb-s", "-1"], "--links-mb-s is -1"),
        (["--links-mb-s", "nan"], "--links-mb-s is nan"),
        (["--rounds", "0"], "--rounds is 0"),
        (["--requests", "0"], "--requests is 0"),
        (["--prefill-chunk", "-1"], "--prefill-chunk is -1"),
        (["--vllm-python", ""], "--vllm-python is empty"),
        (["--resume"], "--resume goes on with the rows of --out"),
        (["idle", "--vllm-python", "/nowhere/python"], "'/nowhere/python' is missing"),
    ],
)
def test_mistakes_are_refused_in_one_sentence(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["bench", "vllm", *arguments]) == 2
    said = capsys.readouterr().err
    assert text in said
    assert said.count("\n") == 1


def test_an_environment_without_vllm_is_told_by_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "vllm.py").write_text("raise ImportError('there is no vLLM here')")
    (tmp_path / "torch.py").write_text("def set_num_threads(count): pass")
    inherited = os.environ.get("PYTHONPATH", "")
    paths = [str(tmp_path), str(Path(vllm.__file__).parents[3]), inherited]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    with pytest.raises(EngineFailed, match="ImportError: there is no vLLM here"):
        Engine(sys.executable, {})
