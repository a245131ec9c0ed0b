"""The probes of preflight, each of one thing that an ATOM decoder needs; they run in its child.

What is cheap and what cannot break anything comes first: what packages say of themselves, then what
`rbln-smi` says, and the vendor's modules last. The private calls of the runtime that the engine
rests on can be seen on a loaded model alone, so they are not looked for here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import requires
from typing import Any, Final

from headrace.engine.atom import rebellions, smi
from headrace.engine.atom.environment import PACKAGE, SETUP, VARIABLE
from headrace.engine.atom.rebellions import SDK_VERSION
from headrace.engine.atom.sdk import CARD_PREFIX, VENDOR
from headrace.engine.probing import (
    Probe,
    Stage,
    headrace_probe,
    is_there,
    missing_in,
    version_of,
)
from headrace.errors import BackendUnavailable

PACKAGES: Final[Mapping[str, str]] = {PACKAGE: "optimum.rbln", "rebel-compiler": "rebel"}
"""By package, a module of it."""

VERSIONS: Final = (
    f"Name a Python with optimum-rbln and rebel-compiler {SDK_VERSION}, and the torch that they "
    f"need, in {VARIABLE} or with --decoder-python"
)
_CHOOSE = "Choose another device, which is an ATOM card"
_REBEL = ("npu_is_available", "get_npu_name", "device_count", "kv_cache.aligned_tensor")
_OPTIMUM = ("RBLNAutoModelForCausalLM.from_pretrained",)


@dataclass(frozen=True)
class Asked:
    """What is to be run: `device` counts the cards that the vendor's runtime may use.

    share: go on although others use the card. card, sdk: whether to look at it, and at what a model
    is loaded and computed with.
    """

    device: int = 0
    share: bool = False
    card: bool = True
    sdk: bool = True


def probes(asked: Asked) -> list[Probe[Asked]]:
    """What is looked at, in this order."""
    first = [headrace_probe(SETUP), Probe("packages", "sdk_missing", SETUP, _packages)]
    device = asked.device
    said = [
        Probe(smi.PROBE, "driver_missing", smi.DRIVER, _driver),
        Probe(f"card of device {device}", "no_device", _CHOOSE, _card),
        Probe(f"contexts of device {device}", "device_busy", _CHOOSE, _contexts),
    ]
    torch = [
        Probe("numpy", "sdk_missing", SETUP, _numpy),
        Probe("torch", "sdk_missing", SETUP, _torch),
    ]
    rebel = [
        Probe("import rebel", "sdk_missing", SETUP, _rebel),
        Probe("calls of rebel", "api_missing", VERSIONS, _rebel_calls),
    ]
    opened = [
        Probe(f"rebel.npu_is_available({device})", "no_device", smi.DRIVER, _available),
        Probe(f"rebel.get_npu_name({device})", "no_device", _CHOOSE, _name),
    ]
    optimum = [
        Probe("import optimum.rbln", "sdk_missing", SETUP, _optimum),
        Probe("calls of optimum.rbln", "api_missing", VERSIONS, _optimum_calls),
    ]
    return [
        *first,
        *(said if asked.card else []),
        *(torch if asked.sdk else []),
        *rebel,
        *(opened if asked.card else []),
        *(optimum if asked.sdk else []),
    ]


def _failed(stage: Stage, probe: str, detail: str, hint: str) -> BackendUnavailable:
    return BackendUnavailable(VENDOR, stage, probe, detail, hint)


def _packages(asked: Asked) -> str:
    """Look for the packages without importing any."""
    missing = [package for package, module in PACKAGES.items() if not is_there(module)]
    if missing:
        text = f"{' and '.join(missing)} not installed in {sys.prefix}"
        raise _failed("sdk_missing", "packages", text, SETUP)
    found = {package: version_of(package) for package in PACKAGES}
    for package, told in found.items():
        if told is None or told.split(".")[:2] != SDK_VERSION.split("."):
            told = told or "of no known version"
            text = f"{package} is {told}, and headrace was written for {SDK_VERSION}"
            raise _failed("api_missing", "packages", text, VERSIONS)
    torch = version_of("torch")
    if torch is None:
        text = f"torch not installed in {sys.prefix}"
        raise _failed("sdk_missing", "packages", text, SETUP)
    _check_torch("packages", torch)
    return ", ".join(f"{package} {told}" for package, told in {**found, "torch": torch}.items())


def torch_needed() -> str:
    """The torch that the installed optimum-rbln requires.

    Raises:
        BackendUnavailable: api_missing: it does not say so as 0.12.0 does, with one `torch==`.
    """
    named = [line for line in requires(PACKAGE) or [] if re.match(r"torch(?![-\w.])", line)]
    exact = [re.fullmatch(r"torch\s*==\s*([^\s;,*]+)", line.strip()) for line in named]
    if len(exact) != 1 or exact[0] is None:
        text = f"{PACKAGE} requires {' and '.join(named) or 'no torch'}, and not one torch==VERSION"
        raise _failed("api_missing", "packages", text, VERSIONS)
    return exact[0][1]


def _check_torch(probe: str, found: str) -> None:
    """What follows a + is of the machine that it was built for."""
    needed = torch_needed()
    if found.partition("+")[0] != needed.partition("+")[0]:
        text = f"torch is {found}, and {PACKAGE} {version_of(PACKAGE)} needs {needed}"
        raise _failed("torch_mismatch", probe, text, VERSIONS)


def _driver(asked: Asked) -> str:
    said = smi.ask()
    if not said.devices:
        if known := ", ".join(smi.known_to_kernel()):
            text = f"it lists no card, and the kernel has {known}"
            raise _failed("driver_missing", smi.PROBE, text, smi.DRIVER)
        text = "it lists no card, and the kernel has none"
        raise _failed("no_device", smi.PROBE, text, smi.DRIVER)
    return f"{said.driver_line}, {len(said.devices)} cards"


def _card(asked: Asked) -> str:
    card = smi.ask().card(asked.device)
    _check_kind(f"card of device {asked.device}", card.name)
    return str(card)


def _check_kind(probe: str, name: str) -> None:
    if not name.startswith(CARD_PREFIX):
        text = (
            f"it is {name}, and headrace was written for {CARD_PREFIX}*: others keep the rows of a "
            "sliding window in another order"
        )
        raise _failed("no_device", probe, text, _CHOOSE)


def _contexts(asked: Asked) -> str:
    said = smi.ask()
    card = said.card(asked.device)
    users = ", ".join(map(str, said.users(card)))
    if not users:
        return "nobody uses it"
    also = [each.device for each in said.devices if each.npu == card.npu and each != card]
    among = f", or {' or '.join(also)}, which rbln-smi gives the same number" if also else ""
    if not asked.share:
        hint = "End what runs there, choose another device, or share it knowingly"
        text = f"{card.device}{among}: used by {users}"
        raise _failed("device_busy", f"contexts of device {asked.device}", text, hint)
    return f"shared with {users}"


def _numpy(asked: Asked) -> str:
    return str(import_module("numpy").__version__)


def _torch(asked: Asked) -> str:
    found = str(import_module("torch").__version__)
    _check_torch("torch", found)
    return found


def _rebel(asked: Asked) -> str:
    rebellions.import_rebel()
    return "imported"


def _rebel_calls(asked: Asked) -> str:
    rebellions.import_kv_cache()
    return _having(rebellions.import_rebel(), "calls of rebel", _REBEL)


def _available(asked: Asked) -> str:
    rebel = rebellions.import_rebel()
    if not rebel.npu_is_available(asked.device):
        text = f"it is false, and rebel.device_count() is {rebel.device_count()}"
        probe = f"rebel.npu_is_available({asked.device})"
        raise _failed("no_device", probe, text, smi.DRIVER)
    return "it is"


def _name(asked: Asked) -> str:
    probe = f"rebel.get_npu_name({asked.device})"
    name = rebellions.import_rebel().get_npu_name(asked.device)
    if name is None:
        raise _failed("no_device", probe, "it is None", _CHOOSE)
    _check_kind(probe, str(name))
    return str(name)


def _optimum(asked: Asked) -> str:
    rebellions.import_optimum()
    return "imported"


def _optimum_calls(asked: Asked) -> str:
    return _having(rebellions.import_optimum(), "calls of optimum.rbln", _OPTIMUM)


def _having(module: Any, probe: str, names: Sequence[str]) -> str:
    if missing := missing_in(module, names):
        raise _failed("api_missing", probe, f"it has no {', '.join(missing)}", VERSIONS)
    return f"all {len(names)} that are used"
