"""`bench peers` at smoke size, and what it must see: wrong bytes, peers that hang, die or lack."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headrace.bench.faults.table import Figure
from headrace.bench.peers import runner
from headrace.bench.peers.ends.memory import BLOCK_NBYTES, Pattern, Region
from headrace.bench.peers.environments import Environment
from headrace.bench.peers.pair import Pair, TransferFailed
from headrace.bench.peers.table import comparisons, figures, lines
from headrace.bench.peers.transports import HEADRACE, NAMES, PEERS, Transport
from headrace.bench.rows import RowFile, read_rows
from headrace.cli import run_command

HERE = Environment(sys.executable, {})
PLAIN = ("memcpy", "process_vm_readv", "unix-stream", "fresh-memfd")
NBYTES = 1 << 20

FAULTY = """
import os, signal
from ends import unix_stream

class Source(unix_stream.Source):
    def send(self, nbytes):
        if self.options["fault"] == "hang":
            signal.pause()
        if self.options["fault"] == "die":
            print("no more memory", flush=True)
            os._exit(3)
        if self.options["fault"] == "raise":
            raise OSError("no route")
        super().send(nbytes)

class Target(unix_stream.Target):
    def receive(self, nbytes):
        super().receive(nbytes - 4096 if self.options["fault"] == "early" else nbytes)
"""

FAMILY = """
import multiprocessing, os
from ends import unix_stream
from ends.unix_stream import Source, Target

def start_source(serve, transport, options, links):
    context = multiprocessing.get_context("spawn")
    arguments = (os.getpid(), transport, options, *links)
    context.Process(target=serve, args=arguments, daemon=True).start()
"""


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[Any]:
    """Makes a transport with a fault."""
    path = tmp_path / "faulty.py"
    path.write_text(FAULTY)
    yield lambda fault: Transport(
        f"faulty-{fault}", str(path), 2, "faulty", options={"fault": fault}
    )
    assert workers() == []


def measure(
    *names: str, more: tuple[Transport, ...] = (), rounds: int = 1, **options: Any
) -> list[dict[str, Any]]:
    file = RowFile(None, "peers", runner.KEY)
    nowhere = Path("/nonexistent")
    return list(runner.run(names, (1,), rounds, nowhere, file, more=more, **options))


def workers() -> list[int]:
    """Pids of this process's workers, and of processes that they made."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if f"HEADRACE_PARENT_PID={os.getpid()}".encode() in environment and command:
                found.append(int(entry.name))
    return found


def test_rows_of_headrace_and_of_what_needs_no_environment() -> None:
    rows = measure(*HEADRACE, *PLAIN)
    assert [row["transport"] for row in rows] == [*HEADRACE, *PLAIN]
    for row in rows:
        if "skipped" in row:
            assert row["transport"] == "process_vm_readv"
            assert "process_vm_readv: Operation not permitted" in row["skipped"]
            continue
        assert row["nbytes"] == NBYTES
        assert row["wrong_nbytes"] == 0
        assert row["wall_ratio"] == row["memcpy_wall_ns"] / row["wall_ns"]
        assert row["cpu_ratio"] == row["memcpy_cpu_ns"] / row["cpu_ns"]
        assert (row["size_mib"], row["round"]) == (1, 0)
        assert 0 <= row["busy_before"] <= 1
    assert workers() == []


def test_the_order_turns_from_round_to_round() -> None:
    rows = measure("memcpy", "unix-stream", rounds=2)
    assert [(row["round"], row["order"], row["transport"]) for row in rows] == [
        (0, 0, "memcpy"),
        (0, 1, "unix-stream"),
        (1, 0, "unix-stream"),
        (1, 1, "memcpy"),
    ]


def test_a_target_that_is_done_too_early_is_caught(faulty: Any) -> None:
    (row,) = measure(more=(faulty("early"),))
    assert row["wrong_nbytes"] >= 4096
    assert lines([row])[0].num_wrong == 1
    assert list(figures([row]))[-1].met is False


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("hang", "no answer in time from the source and target"),
        ("die", "the source ended with status 3: no more memory"),
        ("raise", "source: OSError: no route"),
    ],
)
def test_a_peer_that_fails_is_ended_and_told_once(faulty: Any, fault: str, reason: str) -> None:
    rows = measure(more=(faulty(fault),), rounds=2, deadline_s=0.3)
    assert rows[0]["failed"] == reason
    assert rows[1]["skipped"] == f"failed before at this size: {reason}"


def test_a_pair_that_hangs_leaves_no_process(faulty: Any) -> None:
    pair = Pair(faulty("hang"), HERE, deadline_s=0.1)
    pair.start()
    pair.open(NBYTES)
    with pytest.raises(TransferFailed):
        pair.transfer(NBYTES, 1)
    pair.end()
    pair.end()
    assert len(pair.processes) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pair.processes)
    with pytest.raises(TransferFailed, match="was ended"):
        pair.memcpy(NBYTES)


def test_a_source_that_the_target_made_is_ended_too(tmp_path: Path) -> None:
    path = tmp_path / "family.py"
    path.write_text(FAMILY)
    pair = Pair(Transport("family", str(path), 2, "", one_family=True), HERE)
    try:
        pair.start()
        pair.open(NBYTES)
        assert pair.transfer(NBYTES, 1).wrong_nbytes == 0
        pair.close()
    finally:
        pair.end()
    assert len(pair.processes) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pair.processes)
    for pid in workers():  # what multiprocessing cleans up with goes when its pipe is closed
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            assert poll.poll(5000)
            os.close(pidfd)


def test_a_run_that_is_broken_off_leaves_no_process() -> None:
    file = RowFile(None, "peers", runner.KEY)
    running = runner.run(("memcpy", *HEADRACE), (1,), 2, Path("/nonexistent"), file)
    next(running)
    next(running)
    assert workers()
    running.close()
    assert workers() == []


def test_what_has_no_environment_is_skipped_with_the_reason(tmp_path: Path) -> None:
    def skipped(*names: str) -> list[str]:
        file = RowFile(None, "peers", runner.KEY)
        return [row["skipped"] for row in runner.run(names, (1,), 1, tmp_path, file)]

    foreign = [peer.name for peer in PEERS if peer.family]
    reasons = skipped(*foreign)
    assert len(reasons) == len(foreign)
    assert all("run: python benchmarks/peers/setup.py" in reason for reason in reasons)
    marker = tmp_path / "zmq" / "headrace-peer.json"
    marker.parent.mkdir()
    marker.write_text("{}")
    assert "was not finished" in skipped("pyzmq")[0]
    marker.write_text("?")
    assert "is no marker" in skipped("pyzmq")[0]
    marker.write_text(json.dumps({"complete": True, "env": {}}))
    assert "interpreter" in skipped("pyzmq")[0]


def test_a_run_goes_on_where_it_was_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "peers.jsonl"
    arguments = ["bench", "peers", "--sizes-mib", "1", "--rounds", "2", "--out", str(path)]
    chosen = ["--transports", "memcpy", "--transports", "pyzmq", "--environments", str(tmp_path)]
    assert run_command([*arguments, *chosen]) == 0
    whole = read_rows(path)
    assert len(whole) == 4
    text = path.read_text().splitlines()
    path.write_text("\n".join(text[:-1]) + "\n")
    assert run_command([*arguments, *chosen, "--resume"]) == 0
    again = read_rows(path)
    measured = [row for row in whole[:3] if "skipped" not in row]
    assert again[: len(measured)] == measured
    assert len(again) == 4
    assert len({(row["transport"], row["round"]) for row in again}) == 4


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--rounds", "0"], "--rounds is 0"),
        (["--sizes-mib", "0"], "--sizes-mib is 0"),
        (["--transports", "pigeon"], "no transport is called 'pigeon'"),
        (["--empty-transports"], "--transports is empty"),
        (["--deadline-s", "0"], "--deadline-s is 0"),
        (["--resume"], "--resume goes on with the rows of --out"),
        (["--sizes-mib", "1000000"], "bytes available"),
    ],
)
def test_a_mistake_is_told(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["bench", "peers", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_a_pattern_tells_stale_misplaced_and_missing_bytes() -> None:
    nbytes = 3 * BLOCK_NBYTES + 5000
    region, pattern = Region(nbytes), Pattern(1)
    pattern.write(region.address, 0, nbytes)
    assert pattern.wrong_nbytes(region.address, 0, nbytes) == 0
    assert Pattern(2).wrong_nbytes(region.address, 0, nbytes) == nbytes
    region.view[nbytes - 1] ^= 1
    assert pattern.wrong_nbytes(region.address, 0, nbytes) == 5000 - 4096
    pattern.write(region.address, BLOCK_NBYTES, BLOCK_NBYTES)
    assert pattern.wrong_nbytes(region.address, 0, BLOCK_NBYTES) == BLOCK_NBYTES
    ctypes.memset(region.address, 0, nbytes)
    pattern.write(region.address + 100, 100, nbytes - 100)
    assert pattern.wrong_nbytes(region.address, 0, nbytes) == 4096


def row_of(transport: str, number: int, ratio: float, busy: float = 0.0) -> dict[str, Any]:
    return {
        "transport": transport,
        "size_mib": 128,
        "round": number,
        "copies": 1,
        "wall_ratio": ratio,
        "cpu_ratio": ratio,
        "wall_ns": 1_000_000,
        "wrong_nbytes": 0,
        "busy_before": busy,
    }


ROWS = [
    *(row_of("headrace-1-copy", n, ratio, busy) for n, ratio, busy in [(0, 0.9, 0), (1, 0.5, 1)]),
    *(row_of("headrace-2-copy", n, ratio) for n, ratio in [(0, 0.7), (1, 0.3)]),
    *(row_of("memcpy", n, 1.0) for n in (0, 1)),
    *(row_of("unix-stream", n, ratio) for n, ratio in [(0, 0.4), (1, 0.6)]),
    *(row_of("nixl", n, 0.2) for n in (0, 1)),
    {"transport": "gloo", "size_mib": 128, "round": 0, "copies": 2, "skipped": "no environment"},
]


def test_each_form_is_compared_with_the_best_peer() -> None:
    one, two = comparisons(ROWS)
    assert (one.best_peer, two.best_peer) == ("unix-stream", "unix-stream")
    assert (one.ahead, two.ahead) == (None, False)
    assert "gloo" in one.missing
    assert not {"nixl", "memcpy", *HEADRACE} & set(one.missing)
    assert (one.num_ahead, one.num_rounds, two.num_ahead) == (1, 2, 1)
    found = {figure.name: figure.met for figure in figures(ROWS)}
    assert found == {
        "128 MiB, headrace-1-copy, x of memcpy, idle rounds": True,
        "128 MiB, headrace-1-copy, against unix-stream": None,  # not every peer was there
        "128 MiB, headrace-2-copy, against unix-stream": False,
        "transfers with wrong bytes": True,
    }
    busy = [{**row, "busy_before": 1.0} for row in ROWS if "wall_ratio" in row]
    assert next(figures(busy)).result == "no round began on an idle machine"


def test_a_goal_is_met_only_where_every_peer_was_measured() -> None:
    peers = [peer.name for peer in PEERS if peer.name != "memcpy"]
    rows = [row_of("headrace-1-copy", 0, 0.9), *(row_of(name, 0, 0.4) for name in peers)]

    def against(found: list[dict[str, Any]]) -> Figure:
        return next(figure for figure in figures(found) if "against" in figure.name)

    assert against(rows).met is True
    gone = [*rows[:-1], {**rows[-1], "skipped": "no environment"}]
    del gone[-1]["wall_ratio"]
    assert against(gone).met is None
    assert against(gone).result.endswith(f"not measured: {peers[-1]}")


def test_lines_are_in_the_order_of_the_names_and_tell_what_is_missing() -> None:
    found = lines(ROWS)
    names = [line.transport for line in found]
    assert names == sorted(names, key=NAMES.index)
    gloo = next(line for line in found if line.transport == "gloo")
    assert (gloo.wall, gloo.note) == (None, "no environment")


def test_the_picture_has_a_panel_for_each_size() -> None:
    pytest.importorskip("matplotlib")
    from headrace.bench.plots.peers import figure

    other = [{**row, "size_mib": 16} for row in ROWS]
    panels = figure(ROWS + other).axes
    assert [panel.get_title() for panel in panels] == ["16 MiB", "128 MiB"]
    labels = [label.get_text() for label in panels[0].get_yticklabels()]
    assert labels == ["headrace-1-copy", "headrace-2-copy", "memcpy", "unix-stream", "nixl", "gloo"]


@pytest.fixture(scope="module")
def setup_script() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "peers" / "setup.py"
    spec = importlib.util.spec_from_file_location("peers_setup", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_setup_refuses_what_it_did_not_make(setup_script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "zmq").mkdir()
    kept = tmp_path / "zmq" / "kept"
    kept.write_text("mine")
    with pytest.raises(setup_script.SetupRefused, match="was not made by this script"):
        setup_script.make(tmp_path / "zmq", "zmq")
    assert kept.read_text() == "mine"


def test_the_setup_pins_everything_and_knows_every_family(setup_script: ModuleType) -> None:
    assert {peer.family for peer in PEERS if peer.family} == set(setup_script.FAMILIES)
    for family in setup_script.FAMILIES:
        pins = (setup_script.REQUIREMENTS / f"{family}.txt").read_text().splitlines()
        packages = [line for line in pins if not line.startswith("#")]
        assert packages
        assert all("==" in line for line in packages)
    assert setup_script.MARKER == "headrace-peer.json"


def test_the_setup_takes_no_cuda_build(
    setup_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def report(command: list[str], **_: Any) -> str:
        assert "--dry-run" in command
        needs = ["filelock", "nvidia-cudnn-cu13==9; platform_system == 'Linux'"]
        return json.dumps({"install": [{"metadata": {"requires_dist": needs}}]})

    monkeypatch.setattr(setup_script, "run", report)
    torch, zmq = (setup_script.REQUIREMENTS / f"{name}.txt" for name in ("torch", "zmq"))
    with pytest.raises(setup_script.SetupRefused, match="the CUDA build of torch"):
        setup_script.refuse_cuda(tmp_path, torch)
    setup_script.refuse_cuda(tmp_path, zmq)
