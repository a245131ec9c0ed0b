"""What the vendor's management library says of a card. It needs no torch and claims no device.

Its methods were read from the installed library; none was ever called on a card.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from headrace.engine.faults import raised_as
from headrace.engine.rngd.sdk import VENDOR
from headrace.errors import BackendUnavailable, HeadraceError

_LISTED: Final = "furiosa_smi.list_devices()"
_PLAIN: Final = (
    "device_name",
    "product_name",
    "serial",
    "uuid",
    "arch",
    "numa_node",
    "core_num",
    "liveness",
)


def card_of(smi: Any, index: int) -> Any:
    """The library's object for card `index`, which it calls npu<index>; it need not list all.

    Raises:
        BackendUnavailable: no_device: it is not listed. driver_missing: the library cannot say.
    """
    wanted = f"npu{index}"
    with raised_as(partial(_silent, _LISTED)):
        found = {str(card.device_name()): card for card in smi.list_devices()}
    if wanted not in found:
        raise BackendUnavailable(
            VENDOR,
            "no_device",
            _LISTED,
            f"it lists {', '.join(found) or 'none'}, and {wanted} was asked for",
            "Choose a device that is there",
        )
    return found[wanted]


def describe(smi: Any, index: int) -> dict[str, Any]:
    """Bare values about card `index`; what the library cannot say is left out.

    Keys are those of the library, and `driver`, `firmware`, `memory_total_nbytes`, `pcie_gen`,
    `pcie_width`, `pcie_speed`, `pcie_max_width`, `pcie_max_speed`. `bdf` is the PCI address.

    Raises:
        BackendUnavailable: as `card_of`.
    """
    card = card_of(smi, index)
    told: dict[str, Callable[[], Any]] = {name: getattr(card, name, _nothing) for name in _PLAIN}
    told["bdf"] = lambda: _address(card.bdf())
    told["firmware"] = lambda: _version(card.firmware_version())
    told["driver"] = lambda: _version(smi.driver_info())
    told["memory_total_nbytes"] = lambda: card.memory_usage().total_bytes()
    link: Callable[[], Any] = lambda: card.pcie_info().link_info()  # noqa: E731
    told["pcie_gen"] = lambda: link().pcie_gen_status()
    told["pcie_width"] = lambda: link().link_width_status()
    told["pcie_speed"] = lambda: link().link_speed_status()
    told["pcie_max_width"] = lambda: link().max_link_width_capability()
    told["pcie_max_speed"] = lambda: link().max_link_speed_capability()
    facts: dict[str, Any] = {"index": index}
    for name, ask in told.items():
        try:
            with raised_as(HeadraceError):
                value = ask()
        except HeadraceError:  # a card that does not say is no failure of the one who asks
            continue
        if value is not None:
            facts[name] = value if isinstance(value, int | float | str | bool) else str(value)
    return facts


def busy_cores(smi: Any, index: int) -> list[str]:
    """The cores of card `index` that a process holds, as the library calls them.

    Raises:
        BackendUnavailable: as `card_of`.
    """
    card = card_of(smi, index)
    with raised_as(partial(_silent, "core_status()")):
        status: Mapping[Any, Any] = card.core_status()
    return [str(core) for core, held in status.items() if str(held).endswith("Occupied")]


def _address(bdf: Any) -> str:
    place = f"{bdf.domain():04x}:{bdf.bus():02x}:{bdf.device():02x}"
    return f"{place}.{bdf.function():x}"


def _version(told: Any) -> str:
    return f"{told.major()}.{told.minor()}.{told.patch()}"


def _silent(probe: str, told: str) -> BackendUnavailable:
    hint = "See that the vendor's driver runs"
    return BackendUnavailable(VENDOR, "driver_missing", probe, told, hint)


def _nothing() -> None:
    return None
