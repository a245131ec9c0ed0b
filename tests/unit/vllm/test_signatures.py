"""The connector against the recorded members of vLLM's base class, in each version."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from tests.unit.vllm import record_signatures
from tests.unit.vllm.stand_in import BASE, METRICS, SIGNATURES, VERSIONS, connector_of, members

BASES = ("KVConnectorBase_V1", "SupportsHMA")
OURS = {
    "Word": ("KVConnectorWorkerMetadata",),
    "LoadStats": ("KVConnectorStats",),
    "LoadMetrics": ("KVConnectorPromMetrics",),
    "HeadraceConnector": BASES,
}


def kind_of(member: Any) -> str:
    kinds = {classmethod: "classmethod", staticmethod: "staticmethod", property: "property"}
    return kinds.get(type(member), "method")


def parameters_of(member: Any) -> list[tuple[str, Any, bool]]:
    function: Any = member.fget if isinstance(member, property) else member
    function = getattr(function, "__func__", function)
    parameters = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default is not each.empty) for each in parameters]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", OURS)
def test_overrides_are_called_as_the_base_is(version: str, name: str) -> None:
    known = {each: found for base in OURS[name] for each, found in members(version, base).items()}
    later = {
        each: found
        for other in VERSIONS
        for base in OURS[name]
        for each, found in members(other, base).items()
    }
    with connector_of(version) as module:
        ours = vars(getattr(module, name))
        overridden = [each for each in ours if each in later and each != "__init__"]
        assert overridden
        for each in overridden:
            member = known.get(each) or later[each]
            assert kind_of(ours[each]) == member.kind, each
            names = member.signature.parameters.values()
            recorded = [(one.name, one.kind, one.default is not one.empty) for one in names]
            assert parameters_of(ours[each]) == recorded, each


@pytest.mark.parametrize("version", VERSIONS)
def test_every_abstract_member_is_implemented(version: str) -> None:
    with connector_of(version) as module:
        for name, bases in OURS.items():
            made = getattr(module, name)
            assert not made.__abstractmethods__, name
            abstract = [
                each for base in bases for each, found in members(version, base).items()
                if found.abstract
            ]  # fmt: skip
            assert set(abstract) <= set(vars(made))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_stand_in_would_miss_an_abstract_member(version: str) -> None:
    with connector_of(version) as module:
        half: Any = type("Half", (module.KVConnectorBase_V1, module.SupportsHMA), {})
        wanted = {
            each for base in BASES for each, found in members(version, base).items()
            if found.abstract
        }  # fmt: skip
        assert len(wanted) == 8
        assert half.__abstractmethods__ == wanted


def test_no_member_of_ours_is_unknown_to_all_versions() -> None:
    known = {each for version in VERSIONS for base in BASES for each in members(version, base)}
    for version in VERSIONS:
        with connector_of(version) as module:
            ours = vars(module.HeadraceConnector)
            public = {name for name in ours if not name.startswith("_")}
            assert public <= known
            own = {name for name in ours if name.startswith("_") and not name.startswith("__")}
            assert not own & known


@pytest.mark.parametrize("version", VERSIONS)
def test_the_fields_that_are_given_and_taken(version: str) -> None:
    recorded = SIGNATURES[version]
    results = recorded["KVConnectorTransferResults"]["fields"]
    assert {"finished_recving", "failed_recving"} <= set(results)
    assert recorded["KVConnectorStats"]["fields"] == ["data"]
    assert recorded["KVConnectorRole"]["fields"] == ["SCHEDULER", "WORKER"]
    with connector_of(version) as module:
        stand_in = module.KVConnectorTransferResults()
        assert list(vars(stand_in)) == results


def test_the_stand_in_leaves_no_trace() -> None:
    import sys

    before = set(sys.modules)
    with connector_of(VERSIONS[0]):
        assert {BASE, METRICS} <= set(sys.modules)
    after = set(sys.modules) - before
    assert not {name for name in after if name.startswith(("vllm", "headrace.vllm.connector"))}
    assert not {name for name in after if name.startswith("headrace.vllm.stats")}


SOURCE = """
class KVConnectorBase_V1:
    mark = 1
    def plain(self, a, b=2, *, c, d=3, **rest): ...
    async_ = other = None
    @property
    def shown(self): ...
    @classmethod
    def made(cls, *many): ...
    @abstractmethod
    def wanted(self): ...
class Others:
    left: int
    right: set = field()
"""


def test_the_recorder_reads_kinds_parameters_and_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "base.py").write_text(SOURCE)
    asked = {"KVConnectorBase_V1": "base.py", "Others": "base.py"}
    monkeypatch.setattr(record_signatures, "CLASSES", asked)
    record = record_signatures.record(tmp_path)
    assert record["Others"] == {"fields": ["left", "right"], "members": {}}
    assert record["KVConnectorBase_V1"] == {
        "fields": ["mark", "async_", "other"],
        "members": {
            "plain": "method: self, a, b=, *, c, d=, **rest",
            "shown": "property: self",
            "made": "classmethod: cls, *many",
            "wanted": "abstract method: self",
        },
    }
    record_signatures.main(["9.9", str(tmp_path)])
    assert '"9.9"' in capsys.readouterr().out
