"""A trace file is read back whole, and any other file gets one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from headrace.errors import Refused
from headrace.messages import Interval, IntervalKind
from headrace.telemetry.chrome import encode
from headrace.telemetry.recording import (
    OWNER_KINDS,
    SOURCE_KINDS,
    VERSION,
    Recording,
    prompt_digest,
    read,
)
from tests.unit.telemetry.scenes import at, cancelled, on_devices, streamed, whole

RECORDING = Recording(runs=(streamed(), whole(), cancelled()), stamp={"cpus": 2, "load": 0.5})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    path.write_bytes(encode(RECORDING))
    return path


def test_what_was_recorded_is_read_back(file: Path) -> None:
    assert read(file) == RECORDING


def test_other_keys_of_the_file_are_not_its_business(file: Path) -> None:
    content = json.loads(file.read_bytes())
    file.write_text(json.dumps(content | {"traceEvents": "edited", "more": [1]}))
    assert read(file) == RECORDING


def test_a_kind_belongs_to_one_lane() -> None:
    assert sorted((*SOURCE_KINDS, *OWNER_KINDS)) == sorted(get_args(IntervalKind))


def test_the_columns_are_told(file: Path) -> None:
    record = json.loads(file.read_bytes())["headrace"]
    names = record["columns"]["interval"]
    row = dict(zip(names, record["runs"][0]["source"][1], strict=True))
    assert (row["kind"], row["nbytes"], row["clock"]) == ("write", 1_000, "host")
    assert names[1:] == list(Interval.__struct_fields__)


def test_any_reading_survives(tmp_path: Path) -> None:
    wild = at("write", 1e11, 5, name="\u0000 é \N{SNOWMAN}", nbytes=(1 << 64) - 1)
    path = tmp_path / "trace.json"
    recording = Recording(runs=(streamed(source=(wild,)),))
    path.write_bytes(encode(recording))
    assert read(path) == recording


def test_prompts_are_told_apart() -> None:
    assert prompt_digest([1, 2]) == prompt_digest([1, 2])
    assert prompt_digest([1, 2]) != prompt_digest([2, 1])
    assert prompt_digest([]) != prompt_digest([0])


def as_version_2(content: bytes) -> dict[str, Any]:
    """The same trace as it was written before: nobody is told to have been parked."""
    file: dict[str, Any] = json.loads(content)
    record = file["headrace"]
    record["version"] = 2
    for column in ("parked_ns", "storage_ns"):
        assert record["columns"]["measured"].pop() == column
        for run in record["runs"]:
            assert run["measured"] is None or run["measured"].pop() == 0
    return file


def as_version_1(content: bytes) -> dict[str, Any]:
    """And before that: no interval has an error."""
    file = as_version_2(content)
    record = file["headrace"]
    record["version"] = 1
    assert record["columns"]["interval"].pop() == "error_ns"
    for run in record["runs"]:
        for row in (*run["source"], *run["owner"]):
            assert len(row) == len(record["columns"]["interval"]) + 1
            assert row.pop() == 0
    return file


@pytest.mark.parametrize(("version", "as_written"), [(1, as_version_1), (2, as_version_2)])
def test_a_trace_of_an_old_version_is_read_as_it_was(
    file: Path, version: int, as_written: Callable[[bytes], dict[str, Any]]
) -> None:
    file.write_text(json.dumps(as_written(file.read_bytes())))
    old = read(file)
    assert old.version == version
    assert (old.runs, old.stamp) == (RECORDING.runs, RECORDING.stamp)
    again = file.with_name("again.json")
    again.write_bytes(encode(Recording(runs=old.runs, stamp=old.stamp)))
    assert read(again) == RECORDING


@pytest.mark.parametrize("as_written", [as_version_1, as_version_2])
def test_columns_of_another_version_are_refused(
    file: Path, as_written: Callable[[bytes], dict[str, Any]]
) -> None:
    content = as_written(file.read_bytes())
    content["headrace"]["version"] = VERSION
    file.write_text(json.dumps(content))
    with pytest.raises(Refused, match="its columns are not"):
        read(file)


def test_what_devices_told_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    recording = Recording(runs=(on_devices(),))
    path.write_bytes(encode(recording))
    assert read(path) == recording
    assert {each.error_ns for each in read(path).runs[0].source if each.clock == "device"} == {5000}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is no trace"),
        (b"\xff\xfe", "is no trace"),
        (b"[]", "is no trace"),
        (b"{", "is no trace"),
        (b"[" * 100_000, "is no trace"),
        (b'{"traceEvents": []}', "is not a trace that headrace recorded"),
        (b'{"headrace": 1}', "is a broken trace"),
        (b'{"headrace": {"version": "1"}}', "is a broken trace"),
        (b'{"headrace": {"version": 1}}', "is a broken trace"),
        (b'{"headrace": {"version": 2}}', "is a broken trace"),
        (b'{"headrace": {"version": 3}}', "is a broken trace"),
        (b'{"headrace": {"version": 0}}', "of version 0, and this headrace reads 1, 2, 3;"),
        (b'{"headrace": {"version": 4}}', "of version 4, and this headrace reads 1, 2, 3;"),
        (b'{"headrace": {"version": 1, "runs": []}}', "it holds no request"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(Refused, match=sentence) as refused:
        read(path)
    text = str(refused.value)
    assert text.startswith(str(path))
    assert text.endswith("record one with: headrace run --trace FILE.json")
    assert "\n" not in text


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record["runs"][0].pop("outcome"),
        lambda record: record["runs"][0].update(more=1),
        lambda record: record.update(more=1),
        lambda record: record["runs"][0]["source"].append(["interval"]),
        lambda record: record["runs"][0]["source"][0].append(1),
        lambda record: record["runs"][0]["source"][0].__setitem__(1, "slept"),
        lambda record: record["runs"][0]["source"][0].__setitem__(1, "import"),
        lambda record: record["runs"][0]["owner"][0].__setitem__(1, "compute"),
        lambda record: record["runs"][0]["source"][0].__setitem__(3, -1),
        lambda record: record["runs"][0]["source"][0].__setitem__(3, 1.5),
        lambda record: record["runs"][0]["source"][0].__setitem__(6, "sundial"),
        lambda record: record["runs"][0]["measured"].__delitem__(slice(-3, None)),
        lambda record: record["runs"][0].update(measured=[]),
        lambda record: record["columns"].update(interval=["", "name", "kind"]),
        lambda record: record["stamp"].update(nested={}),
    ],
)
def test_a_broken_record_is_refused(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_bytes())
    change(content["headrace"])
    file.write_bytes(msgspec.json.encode(content))
    with pytest.raises(Refused, match="is a broken trace"):
        read(file)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="cannot be read: No such file or directory"):
        read(tmp_path / "none.json")
    with pytest.raises(Refused, match="cannot be read: Is a directory"):
        read(tmp_path)
