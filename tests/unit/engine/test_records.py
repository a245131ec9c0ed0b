"""The record of a probe: how it is kept, and what it says at every moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.engine.records import Facts, Finding, Record, read, take_all, write
from headrace.errors import DeviceError, Refused


def made(findings: dict[str, Finding] | None = None, **more: Any) -> Record:
    told: dict[str, Any] = {"packages": {"torch": "2"}, "card": {"index": 0}, **more}
    return Record(version=1, sdk="some", made="now", findings=findings or {}, **told)


def finding(**facts: Any) -> Finding:
    return Finding(facts)


def test_a_record_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "not" / "there" / "record.json"
    record = made(
        {"link": Finding({"GB/s": 1.5, "name": "x"}, "", 0.25), "reads": Finding(error="no")},
        unfinished="overlap",
    )
    write(record, path)
    assert read(path, Record) == record
    write(replace(record, unfinished=""), path)
    assert read(path, Record).unfinished == ""
    assert [each.name for each in path.parent.iterdir()] == ["record.json"]


def test_who_reads_meanwhile_finds_all_of_the_old_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place of a record is never written into: one that could not be ended changes nothing."""
    path = tmp_path / "record.json"
    write(made(), path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", _full)
        with pytest.raises(Refused, match=r"record\.json cannot be written: No space left"):
            write(made(unfinished="link"), path)
    assert read(path, Record) == made()


def _full(self: Path, target: Path) -> Path:
    raise OSError(28, "No space left on device")


def test_a_place_that_takes_no_record_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Refused, match="cannot be written"):
        write(made(), tmp_path / "file" / "record.json")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sdk": 1}', '{"sdk": "furiosa"', "\udcff"])
def test_what_is_no_record_is_told(tmp_path: Path, text: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(Refused, match=r"record\.json is no record of a probe"):
        read(path, Record)


def test_a_record_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="cannot be read: No such file"):
        read(tmp_path / "record.json", Record)
    with pytest.raises(Refused, match="cannot be read: Is a directory"):
        read(tmp_path, Record)


def test_a_fact_is_one_that_its_step_found() -> None:
    record = made({"link": finding(rate=3), "reads": Finding({"narrow": True}, "it broke")})
    assert record.fact("link", "rate") == 3
    assert record.fact("link", "latency") is None
    assert record.fact("reads", "narrow") is None
    assert record.fact("overlap", "share") is None


def test_the_record_names_the_step_that_goes_on(tmp_path: Path) -> None:
    path, seen, said = tmp_path / "record.json", list[tuple[str, list[str]]](), list[str]()

    def look() -> Facts:
        there = read(path, Record)
        seen.append((there.unfinished, list(there.findings)))
        return {"at": len(seen)}

    ended = take_all(made(), [(name, look) for name in "abc"], path, said.append)
    assert seen == [("a", []), ("b", ["a"]), ("c", ["a", "b"])]
    assert said == ["probe: a", "probe: b", "probe: c"]
    assert read(path, Record) == ended
    assert (ended.unfinished, ended.fact("c", "at")) == ("", 3)


def test_a_step_that_raises_is_an_error_of_its_own(tmp_path: Path) -> None:
    def broken() -> Facts:
        raise RuntimeError("no such thing\nat a place")

    def refused() -> Facts:
        raise DeviceError("it fell off the bus")

    steps = [("a", broken), ("b", refused), ("c", lambda: {"x": 1})]
    ended = take_all(made(), steps, tmp_path / "record.json", lambda text: None)
    assert {name: (each.facts, each.error) for name, each in ended.findings.items()} == {
        "a": ({}, "RuntimeError: no such thing"),
        "b": ({}, "it fell off the bus"),
        "c": ({"x": 1}, ""),
    }
    assert min(each.took_s for each in ended.findings.values()) >= 0
