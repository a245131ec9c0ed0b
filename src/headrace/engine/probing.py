"""What a preflight is made of: probes, each of one thing that a vendor's backend needs, and what
those of all vendors do alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, Final, Generic, Literal, TypeVar

from headrace.version import VERSION

HEADRACE: Final = "headrace"
"""The probe that tells of which version the headrace beside the vendor's packages is."""

Stage = Literal[
    "sdk_missing",
    "torch_mismatch",
    "driver_missing",
    "no_device",
    "device_busy",
    "toolchain_missing",
    "api_missing",
    "layout_unverified",
]

Asked = TypeVar("Asked")


@dataclass(frozen=True)
class Probe(Generic[Asked]):
    """How to look at one thing; `look` returns what was found, or raises.

    What it raises that is no typed error is of `stage`, and `hint` says what to do about it.
    """

    name: str
    stage: Stage
    hint: str
    look: Callable[[Asked], str]


def headrace_probe(hint: str) -> Probe[Any]:
    """The probe that comes first: its line alone says of which version the child's headrace is."""
    return Probe(HEADRACE, "sdk_missing", hint, lambda asked: VERSION)


def version_of(package: str) -> str | None:
    """The installed version of a package, without importing it; None if it has none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def is_there(module: str) -> bool:
    """Whether a module could be imported, without importing it."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is not
        return False


def missing_in(module: Any, names: Iterable[str]) -> list[str]:
    """Those of the dotted names that are not in a module."""
    return [name for name in names if not _has(module, name)]


def _has(module: Any, dotted: str) -> bool:
    found = module
    for name in dotted.split("."):
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True
