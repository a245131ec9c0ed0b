"""The probes of preflight, each of one thing that an RNGD source needs; they run in its child.

What is cheap and what cannot break anything comes first: a card's absence is found before the
vendor's torch is loaded, and the toolchain's before anything is compiled, since the vendor's
compiler remembers a failure. The vendor's own `is_available()` is not asked: it is True without any
card.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from headrace.engine.faults import line_of
from headrace.engine.probing import (
    Probe,
    Stage,
    headrace_probe,
    is_there,
    missing_in,
    version_of,
)
from headrace.engine.rngd import furiosa
from headrace.engine.rngd.sdk import SDK_VERSION, TORCH_VERSION, VENDOR
from headrace.errors import BackendUnavailable

FAMILIES: Final = ("llama", "qwen3", "exaone4", "gemma4")
"""Modules of the vendor's kernels, each named as the model_type that it is for."""

PES_PER_CARD: Final = 8
COMPILER: Final = "aarch64-linux-gnu-gcc"
SETUP: Final = (
    "Run: headrace rngd setup, and leave out --source-python, --python and HEADRACE_RNGD_PYTHON"
)
_DRIVER = (
    "Install the vendor's driver and firmware as its page on prerequisites says, or ask for "
    "emulation"
)
_PACKAGES: Final[Mapping[str, str | None]] = {
    "furiosa-torch": "furiosa.torch",
    "furiosa-kernels": "furiosa.kernels",
    "furiosa-smi": "furiosa_smi",
    "furiosa-tcc": None,
}
"""By package, a module of it; the compiler has none."""

_CALLS: Final[Mapping[str, tuple[str, ...]]] = {
    "emulate": ("TclModule",),
    "card": (
        *("CompileModule.from_module", "CompileModule.build_tp_module", "Runnable", "TpModule"),
        *("Stream", "Event.record", "Event.query", "Event.synchronize", "set_stream"),
        *("current_stream", "set_fusion", "empty_sharded", "config.cache_context"),
    ),
}
_FACTORIES: Final[Mapping[str, tuple[str, ...]]] = {
    "llama": (
        *("llama3_1_8b_w16a16_first_tokenwise", "llama3_1_8b_w16a16_full_attention"),
        *("llama3_1_8b_w16a16_mid_tokenwise", "llama3_1_8b_w16a16_last_tokenwise_with_lm_head"),
    ),
    "qwen3": (
        *("qwen3_8b_w8fa8fdkv16_first_tokenwise", "qwen3_8b_w8fa8fdkv16_full_attention"),
        *("qwen3_8b_w8fa8fdkv16_mid_tokenwise", "qwen3_8b_w8fa8fdkv16_last_tokenwise_with_lm_head"),
    ),
    "exaone4": (
        *("exaone4_32b_w8fa8fdkv16_first_tokenwise", "exaone4_32b_w8fa8fdkv16_full_attention"),
        "exaone4_32b_w8fa8fdkv16_sliding_window_attention",
        "exaone4_32b_w8fa8fdkv16_mid_tokenwise_rope",
        "exaone4_32b_w8fa8fdkv16_mid_tokenwise_nope",
        "exaone4_32b_w8fa8fdkv16_last_tokenwise_with_lm_head",
    ),
    "gemma4": (
        *("gemma4_31b_w8fa8fdkv16_txt_text_pre", "gemma4_31b_w8fa8fdkv16_txt_full_attention"),
        "gemma4_31b_w8fa8fdkv16_txt_sliding_window_attention",
        "gemma4_31b_w8fa8fdkv16_txt_mid_tokenwise_sliding_to_sliding",
        "gemma4_31b_w8fa8fdkv16_txt_mid_tokenwise_sliding_to_full",
        "gemma4_31b_w8fa8fdkv16_txt_mid_tokenwise_full_to_sliding",
        "gemma4_31b_w8fa8fdkv16_txt_last_tokenwise_with_lm_head",
    ),
}


@dataclass(frozen=True)
class Asked:
    """What is to be run: `device` counts devices of `fusion` PEs, as the vendor's runtime does."""

    emulate: bool = False
    device: int = 0
    compiles: bool = True
    share: bool = False
    fusion: int = PES_PER_CARD
    families: tuple[str, ...] = FAMILIES

    def cards(self) -> list[str]:
        """The cards that the device lies on, or spans."""
        first = self.device * self.fusion // PES_PER_CARD
        return [f"npu{first + i}" for i in range(max(1, self.fusion // PES_PER_CARD))]


def probes(asked: Asked) -> list[Probe[Asked]]:
    """What is looked at, in this order."""
    sdk = [
        Probe("numpy", "sdk_missing", SETUP, _numpy),
        Probe("torch", "sdk_missing", SETUP, _torch),
        Probe("import furiosa.torch", "sdk_missing", SETUP, _torch_furiosa),
        Probe("calls of furiosa.torch", "api_missing", SETUP, _calls),
        *(
            Probe(f"furiosa.kernels.{family}", "api_missing", SETUP, _factories(family))
            for family in asked.families
        ),
    ]
    packages = [
        headrace_probe(SETUP),
        Probe("packages", "sdk_missing", SETUP, _packages),
        Probe("import furiosa_smi", "sdk_missing", SETUP, _smi),
    ]
    if asked.emulate:
        return [*packages, *sdk]
    card = [
        Probe("furiosa_smi.list_devices()", "no_device", _DRIVER, _devices),
        Probe("furiosa_smi.driver_info()", "driver_missing", _DRIVER, _driver),
        Probe("core_status()", "device_busy", _DRIVER, _cores),
    ]
    toolchain = [Probe(COMPILER, "toolchain_missing", "", _toolchain)] if asked.compiles else []
    stream = Probe(f'Stream("furiosa:{asked.device}")', "no_device", _DRIVER, _stream)
    return [*packages, *card, *toolchain, *sdk, stream]


def _failed(stage: Stage, probe: str, detail: str, hint: str) -> BackendUnavailable:
    return BackendUnavailable(VENDOR, stage, probe, detail, hint)


def _packages(asked: Asked) -> str:
    """Look for the packages without importing any."""
    found = {package: version_of(package) for package in _PACKAGES}
    missing = [
        package
        for package, module in _PACKAGES.items()
        if (found[package] is None if module is None else not is_there(module))
    ]
    if missing:
        text = f"{' and '.join(missing)} not installed in {sys.prefix}"
        raise _failed("sdk_missing", "packages", text, SETUP)
    for package, told in found.items():
        if told != SDK_VERSION:
            told = told or "of no known version"
            text = f"{package} is {told}, and headrace was written for {SDK_VERSION}"
            raise _failed("api_missing", "packages", text, SETUP)
    return f"{', '.join(found)} {SDK_VERSION}"


def _numpy(asked: Asked) -> str:
    """The vendor's torch can be loaded without it, and then fails in the middle of its work."""
    return str(import_module("numpy").__version__)


def _torch(asked: Asked) -> str:
    torch = import_module("torch")
    found = str(torch.__version__)
    if found.partition("+")[0] != TORCH_VERSION:
        text = f"torch is {found}, and furiosa-torch {SDK_VERSION} needs {TORCH_VERSION}"
        raise _failed("torch_mismatch", "torch", text, SETUP)
    return found


def _torch_furiosa(asked: Asked) -> str:
    furiosa.import_torch_furiosa()
    torch = import_module("torch")
    if not hasattr(torch, "furiosa"):
        text = "it was imported, and torch has no device furiosa"
        raise _failed("api_missing", "import furiosa.torch", text, SETUP)
    return "the device furiosa is registered in torch"


def _calls(asked: Asked) -> str:
    calls = _CALLS["emulate"] + (() if asked.emulate else _CALLS["card"])
    return _having(furiosa.import_torch_furiosa(), "calls of furiosa.torch", calls)


def _factories(family: str) -> Callable[[Asked], str]:
    def look(asked: Asked) -> str:
        module = furiosa.import_kernels(family)
        return _having(module, f"furiosa.kernels.{family}", _FACTORIES.get(family, ()))

    return look


def _having(module: Any, probe: str, names: Sequence[str]) -> str:
    if missing := missing_in(module, names):
        raise _failed("api_missing", probe, f"it has no {', '.join(missing)}", SETUP)
    return f"all {len(names)} that are used"


def _smi(asked: Asked) -> str:
    calls = ("list_devices", "list_pci_devices", "driver_info", "CoreStatus.Occupied")
    return _having(furiosa.import_smi(), "import furiosa_smi", calls)


def _devices(asked: Asked) -> str:
    """Look for the asked cards; a card on the PCI bus that is not listed has no driver."""
    smi, probe = furiosa.import_smi(), "furiosa_smi.list_devices()"
    try:
        found, why = [str(device.device_name()) for device in smi.list_devices()], "it is empty"
    except Exception as exc:  # what it raises without a driver is known to nobody without a card
        found, why = [], line_of(exc)
    on_bus = len(smi.list_pci_devices()) if not found else 0
    if on_bus:
        text = f"{why}, and there are {on_bus} cards on the PCI bus"
        raise _failed("driver_missing", probe, text, _DRIVER)
    if not found:
        text = f"{why}, and there is no card on the PCI bus"
        raise _failed("no_device", probe, text, "Emulation needs no card: --emulate")
    missing = [card for card in asked.cards() if card not in found]
    if missing:
        text = (
            f"furiosa:{asked.device} of {asked.fusion} PEs is on {', '.join(asked.cards())}, and "
            f"there are {', '.join(found)}"
        )
        raise _failed("no_device", probe, text, "Choose another device")
    return ", ".join(found)


def _driver(asked: Asked) -> str:
    return f"version {furiosa.import_smi().driver_info()}"


def _cores(asked: Asked) -> str:
    smi = furiosa.import_smi()
    busy = [
        f"{device.device_name()} core {core}"
        for device in smi.list_devices()
        if device.device_name() in asked.cards()
        for core, status in device.core_status().items()
        if status == smi.CoreStatus.Occupied
    ]
    if busy and not asked.share:
        hint = "End what runs there, choose another device, or share it knowingly"
        raise _failed("device_busy", "core_status()", f"occupied: {', '.join(busy)}", hint)
    return f"occupied, and shared: {', '.join(busy)}" if busy else "no core is occupied"


def _toolchain(asked: Asked) -> str:
    return find_toolchain()


def find_toolchain() -> str:
    """The compiler that kernels for a card are compiled with.

    Raises:
        BackendUnavailable: toolchain_missing: it is not on PATH.
    """
    found = shutil.which(COMPILER)
    if found is None:
        hint = "Install it (Debian and Ubuntu: apt install gcc-aarch64-linux-gnu)"
        text = "not on PATH, and kernels are to be compiled for the card"
        raise _failed("toolchain_missing", COMPILER, text, hint)
    return found


def _stream(asked: Asked) -> str:
    """Open the device: the first call that fails plainly where a card cannot be used."""
    torch_furiosa, name = furiosa.import_torch_furiosa(), f"furiosa:{asked.device}"
    furiosa.set_fusion_once(torch_furiosa, asked.fusion)
    try:
        torch_furiosa.Stream(name)
    except RuntimeError as exc:
        stage: Stage = "driver_missing" if "cannot open shared object" in str(exc) else "no_device"
        raise _failed(stage, f'Stream("{name}")', line_of(exc), _DRIVER) from exc
    return "opened"
