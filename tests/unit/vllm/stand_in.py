"""Modules named as vLLM's that stand in for it, made from the record of one version's signatures.

What a stand-in's classes know is what was recorded: which members there are, what must be
implemented, and what each is called with. The few members that do something here do what the
connector and the engine's stand-in need of them.
"""

from __future__ import annotations

import json
import sys
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from importlib import import_module
from inspect import Parameter, Signature
from pathlib import Path
from types import ModuleType
from typing import Any

SIGNATURES: dict[str, Any] = json.loads(Path(__file__).with_name("signatures.json").read_text())
VERSIONS = tuple(SIGNATURES)
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
UTILS = "vllm.v1.metrics.utils"
OURS = ("connector", "stats")  # the modules that import vLLM's


@dataclass(frozen=True)
class Member:
    """What was recorded of one: `abstract`, its kind, and the parameters that it is called with."""

    kind: str
    abstract: bool
    signature: Signature


def members(version: str, name: str) -> dict[str, Member]:
    """The members of one recorded class."""
    recorded = SIGNATURES[version][name]["members"]
    return {each: member_of(text) for each, text in recorded.items()}


@cache
def member_of(text: str) -> Member:
    how, _, names = text.partition(": ")
    *marks, kind = how.split()
    parameters: list[Parameter] = []
    keyword_only = False
    for name in names.split(", "):
        if name.startswith("**"):
            parameters.append(Parameter(name[2:], Parameter.VAR_KEYWORD))
        elif name.startswith("*"):
            keyword_only = True
            if name != "*":
                parameters.append(Parameter(name[1:], Parameter.VAR_POSITIONAL))
        else:
            default = None if name.endswith("=") else Parameter.empty
            how_given = Parameter.KEYWORD_ONLY if keyword_only else Parameter.POSITIONAL_OR_KEYWORD
            parameters.append(Parameter(name.rstrip("="), how_given, default=default))
    return Member(kind, "abstract" in marks, Signature(parameters))


class _Base:
    """What of the connector's base class is used; everything else comes from the record."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._vllm_config, self._role = vllm_config, role
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self._connector_metadata: Any = None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def _get_connector_metadata(self) -> Any:
        if self._connector_metadata is None:
            raise AssertionError("no metadata is bound")
        return self._connector_metadata

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    def get_kv_connector_kv_cache_events(self) -> None:
        return None

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        return None


class _PromMetrics:
    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self._gauge_cls, self._counter_cls = metric_types[Gauge], metric_types[Counter]
        self._histogram_cls = metric_types[Histogram]
        self._labelnames = labelnames
        self.per_engine_labelvalues = per_engine_labelvalues


@dataclass
class _TransferResults:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


@dataclass
class _Stats:
    data: dict[str, Any] = field(default_factory=dict)


def create_metric_per_engine(
    metric: Any, per_engine_labelvalues: dict[int, list[object]]
) -> dict[int, Any]:
    return {at: metric.labels(*values) for at, values in per_engine_labelvalues.items()}


def _unused(name: str, signature: Signature) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        signature.bind(*args, **kwargs)
        raise NotImplementedError(f"{name} of vLLM's base class, which stands in here")

    call.__name__, call.__signature__ = name, signature  # type: ignore[attr-defined]
    return call


def _made(version: str, name: str, base: type) -> type:
    """`base` with the rest of its recorded members, which nobody should get to call."""
    body: dict[str, Any] = {}
    for each, member in members(version, name).items():
        if each in vars(base):
            continue
        call: Any = _unused(each, member.signature)
        if member.abstract:
            call = abstractmethod(call)
        kinds: dict[str, Any] = {"property": property, "classmethod": classmethod}
        body[each] = kinds.get(member.kind, lambda made: made)(call)
    return ABCMeta(name, (base,), body)


@cache
def modules(version: str) -> dict[str, ModuleType]:
    """The modules of one version, by name; their parents are packages with nothing else in them."""
    roles: list[str] = SIGNATURES[version]["KVConnectorRole"]["fields"]
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": version},
        BASE: {
            "KVConnectorBase_V1": _made(version, "KVConnectorBase_V1", _Base),
            "SupportsHMA": _made(version, "SupportsHMA", object),
            "KVConnectorMetadata": _made(version, "KVConnectorMetadata", object),
            "KVConnectorWorkerMetadata": _made(version, "KVConnectorWorkerMetadata", object),
            "KVConnectorRole": Enum("KVConnectorRole", roles),
            "KVConnectorTransferResults": _TransferResults,
        },
        METRICS: {
            "KVConnectorPromMetrics": _made(version, "KVConnectorPromMetrics", _PromMetrics),
            "KVConnectorStats": _made(version, "KVConnectorStats", _Stats),
        },
        UTILS: {"create_metric_per_engine": create_metric_per_engine},
    }
    made: dict[str, ModuleType] = {}
    for name, content in contents.items():
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            path = ".".join(parts[:count])
            if path not in made:
                made[path] = ModuleType(path)
                made[path].__path__ = []
        vars(made[name]).update(content)
    return made


@contextmanager
def connector_of(version: str) -> Iterator[Any]:
    """headrace's connector module, imported on top of the stand-in of a vLLM of this version."""
    package = import_module("headrace.vllm")
    ours = [f"headrace.vllm.{name}" for name in OURS]
    before = {
        name: module
        for name, module in sys.modules.items()
        if name in ours or name.partition(".")[0] == "vllm"
    }
    attributes = {name: vars(package).pop(name) for name in OURS if name in vars(package)}
    for name in before:
        del sys.modules[name]
    sys.modules.update(modules(version))
    try:
        yield import_module("headrace.vllm.connector")
    finally:
        for name in (*modules(version), *ours):
            sys.modules.pop(name, None)
        for name in OURS:
            vars(package).pop(name, None)
        vars(package).update(attributes)
        sys.modules.update(before)
