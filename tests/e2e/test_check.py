"""`headrace check` as a device's owner meets it: verdicts, reports, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import run_command
from headrace.testing.pair.leftovers import leftovers
from headrace.testing.pair.runner import case_names
from tests.conformance.broken_engines import GEOMETRY
from tests.e2e.families import directory_of
from tests.e2e.real_models import directory_of as pulled

NULL = ["check", "--source", "replay", "--decoder", "null"]
ENGINES = "tests.conformance.broken_engines"
FEW = ("exactness", "malformed-progress", "cancel-while-streaming", "source-death", "parked-import")


def only(*names: str) -> list[str]:
    return [word for name in names for word in ("--only", name)]


def check(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "COLUMNS": "200", **env},
    )


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The one sentence of a mistake."""
    assert (done.returncode, done.stdout) == (2, ""), done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("headrace: ")
    return line


def is_attached(pid: str) -> bool:
    """Whether a child is a source that has mapped its slab."""
    try:
        return "memfd:" in Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def report_of(directory: Path) -> Any:
    return json.loads((directory / "report.json").read_text())


@pytest.mark.usefixtures("nothing_left")
def test_replay_to_null_holds_and_is_reported(tmp_path: Path) -> None:
    shm = leftovers()["shm"]
    done = check(*NULL, "--quick", "--report", str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "replay -> null: all 2" in done.stdout
    report = report_of(tmp_path / "out")
    assert report["passed"]
    assert [case["case"] for case in report["cases"]] == case_names()
    for case in report["cases"]:
        assert case["result"] in ("ok", "skipped"), case
        assert case["proves"]
        assert case["steps"]
    assert report["asked"]["seed"] == 0
    assert report["decoder"]["caps"]["max_lanes"] == 3
    assert report["stamp"]["python"]
    (exact,) = (case for case in report["cases"] if case["case"] == "exactness")
    hand_offs = exact["steps"][0]["measured"]["hand_offs"]
    assert {row["difference"] for row in hand_offs} == {""}
    assert all(row["prefill_ns"] > 0 for row in hand_offs)
    text = (tmp_path / "out" / "report.md").read_text()
    assert "# headrace check: replay -> null" in text
    assert "headrace check --source replay --decoder null --quick" in text
    assert "| cancel-while-streaming | slot |" in text
    assert "## What failed" not in text
    assert leftovers()["shm"] == shm


@pytest.mark.full_matrix
def test_a_tiny_model_from_torch_to_cpu_holds() -> None:
    model = str(directory_of("gemma3"))
    pair = ["--source", "torch", "--decoder", "cpu", "--model", model, "--quick"]
    done = check("check", *pair, *only(*FEW))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"torch -> cpu: all {len(FEW)} cases hold" in done.stdout


def test_replay_takes_the_geometry_of_a_model() -> None:
    model = str(directory_of("gemma4"))
    done = check("check", "--source", "replay", "--decoder", "cpu", "--model", model, *only(*FEW))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.real_model
@pytest.mark.full_matrix
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_a_real_model_from_torch_to_cpu_holds(name: str) -> None:
    pulled(name)
    cases = only("exactness", "slot-reuse")
    done = check(
        "check", "--source", "torch", "--decoder", "cpu", "--model", name, "--quick", *cases
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_pair_that_fails_exits_1_and_says_where(tmp_path: Path) -> None:
    engine = f"{ENGINES}:open_other_bytes_when_streamed"
    directory = tmp_path / "out"
    done = check(
        *["check", "--source", engine, "--decoder", "null", "--report", str(directory)],
        *only("facts", "exactness"),
    )
    assert done.returncode == 1
    assert "2 of 2 cases failed: facts, exactness" in done.stdout  # the next request as well
    text = (directory / "report.md").read_text()
    assert "## What failed\n\n### facts" in text
    assert "\n### exactness\n" in text
    assert "other KV bytes in layers [2]" in text
    assert not report_of(directory)["passed"]


def test_repeated_with_another_seed_each_time(tmp_path: Path) -> None:
    done = check(*NULL, "--quick", "--repeat", "2", "--report", str(tmp_path), *only("exactness"))
    assert done.returncode == 0, done.stderr
    first, second = report_of(tmp_path)["cases"]
    assert (first["round"], second["round"]) == (0, 1)
    digests = [case["steps"][0]["measured"]["kv_digests"] for case in (first, second)]
    assert digests[0] != digests[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--source", "nowhere", "--decoder", "null"], "unknown source 'nowhere'"),
        (["--source", "replay", "--decoder", "nowhere"], "unknown decoder 'nowhere'"),
        (["--source", "torch", "--decoder", "null"], "torch needs --model"),
        (["--source", "replay", "--decoder", "cpu"], "cpu needs --model"),
        ([*NULL[1:], "--model", "smollm2-135m"], "take no model"),
        ([*NULL[1:], "--only", "luck"], "there is no case 'luck'"),
        ([*NULL[1:], "--repeat", "0"], "--repeat is 0"),
        ([*NULL[1:], "--source-options", "[]"], "--source-options is not a JSON object"),
        ([*NULL[1:], "--source-options", '{"speed": 1}'], "unknown field `speed`"),
        ([*NULL[1:], "--decoder-options", '{"speed": 1}'], "unknown field `speed`"),
        ([*NULL[1:], "--decoder-options", '{"decode_batch": 4}'], "decode_batch is 4"),
        ([*NULL[1:], "--report", "/proc/nothing"], "--report: /proc/nothing cannot be written"),
        (["--source", "no.such:open", "--decoder", "null"], "cannot import it"),
        ([*NULL[1:], "--source-python", "/no/python"], "is missing or not executable"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], words: str) -> None:
    assert words in refused(check("check", *arguments))


def test_an_unavailable_backend_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch on this machine')\n")
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    model = str(directory_of("llama"))
    for pair in (("torch", "null"), ("replay", "cpu")):
        source, decoder = pair
        done = check(
            *["check", "--source", source, "--decoder", decoder, "--model", model],
            PYTHONPATH=path,
        )
        assert "no torch on this machine" in refused(done)


def test_an_occupied_device_is_refused_unless_it_is_shared(tmp_path: Path) -> None:
    pair = ["check", "--source", f"{ENGINES}:open_occupied", "--decoder", "null", *only("facts")]
    occupied = ["--source-options", json.dumps({"occupants": [17]})]
    line = refused(check(*pair, *occupied))
    assert "in use: process 17 computes on it" in line
    assert "--share-device" in line
    assert check(*pair, *occupied, "--share-device").returncode == 0
    assert check(*pair).returncode == 0


def test_an_interrupt_ends_clean() -> None:
    """Once it is at work; nothing of it is left."""
    command = [sys.executable, "-u", "-m", "headrace", *NULL, "--repeat", "1000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (sources := [pid for pid in children.read_text().split() if is_attached(pid)]):
            assert process.poll() is None
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "interrupted" in out + err
    for source in sources:
        assert not Path(f"/proc/{source}").exists()


def test_the_command_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["check", "--help"]) == 0
    shown = capsys.readouterr().out
    for name in ("--share-device", "--source-python", "--report", "--only"):
        assert name in shown


def test_options_of_the_geometry(tmp_path: Path) -> None:
    """Given as the user gives them, and told in the report."""
    options = json.dumps({**GEOMETRY, "window": 0})
    done = check(
        *[*NULL, "--quick", "--source-options", options, "--report", str(tmp_path)],
        *only("facts"),
    )
    assert done.returncode == 0
    assert list(report_of(tmp_path)["source"]["layers"].values()) == [6]
