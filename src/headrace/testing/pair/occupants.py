"""Who else uses the device of a backend, which only the backend can tell.

A backend that owns a device has a function beside its factory, `occupants(options)`, which returns
one sentence for each other user of the device that these options name. One without it has nothing
that could be occupied, such as the CPU, or cannot tell.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

from headrace.backends.load import DECODERS, SOURCES, check_name
from headrace.errors import Refused

NOTHING_TO_OCCUPY = ("cpu", "null", "replay")


def refuse_occupied(
    role: Literal["source", "decoder"], name: str, options: Mapping[str, Any]
) -> None:
    """Refuse a device that is in use, by what its users are.

    Raises:
        Refused: with each of them, and how to go on all the same.
    """
    told = occupants(role, name, options)
    if told:
        raise Refused(
            f"the device of {role} {name} is in use: {'; '.join(told)}. End that first, or give "
            "--share-device",
            field="share_device",
        )


def occupants(
    role: Literal["source", "decoder"], name: str, options: Mapping[str, Any]
) -> Sequence[str] | None:
    """One sentence for each other user of a backend's device; None if the backend cannot tell."""
    check_name(role, name)
    if name in NOTHING_TO_OCCUPY or (name == "torch" and options.get("device", "cpu") == "cpu"):
        return ()
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
