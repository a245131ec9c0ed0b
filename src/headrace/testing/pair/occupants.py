"""Who else uses the device of a backend, which only the backend can tell.

A backend that owns a device has a function beside its factory, `occupants(options)`, which returns
one sentence for each other user of the device that these options name. One without it has nothing
that could be occupied, such as the CPU, or cannot tell.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, cast

from headrace.backends.load import DECODERS, SOURCES, check_name
from headrace.errors import Refused
from headrace.testing.pair import imitation

NOTHING_TO_OCCUPY: Final = ("cpu", "null", "replay", imitation.FACTORY)

Role: TypeAlias = Literal["source", "decoder"]


def device_use(role: Role, name: str, options: Mapping[str, Any], *, share: bool) -> str:
    """How the device of a backend is used by others, in words for a report.

    Raises:
        Refused: it is in use and may not be shared; the text names each user, and how to go on.
    """
    if _has_no_device(name, options):
        return "no device that could be in use"
    told = occupants(role, name, options)
    if told is None:
        return "whether others use its device is not told by its backend"
    if told and not share:
        raise Refused(
            f"the device of {role} {name} is in use: {'; '.join(told)}. End that first, or give "
            "--share-device",
            field="share_device",
        )
    return f"its device is shared: {'; '.join(told)}" if told else "nobody else uses its device"


def occupants(role: Role, name: str, options: Mapping[str, Any]) -> Sequence[str] | None:
    """One sentence for each other user of a backend's device; None if the backend cannot tell."""
    check_name(role, name)
    known = SOURCES if role == "source" else DECODERS
    module_name = known.get(name, name).partition(":")[0]
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        return None  # opening it will say what is missing
    tell = getattr(module, "occupants", None)
    if tell is None:
        return None
    return cast(Callable[[Mapping[str, Any]], Sequence[str]], tell)(options)


def _has_no_device(name: str, options: Mapping[str, Any]) -> bool:
    on_cpu = name == "torch" and options.get("device", "cpu") == "cpu"
    return on_cpu or name in NOTHING_TO_OCCUPY
