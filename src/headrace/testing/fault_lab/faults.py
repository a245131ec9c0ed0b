"""Every kind of fault that a schedule can hold, by the thing that fails."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

Group: TypeAlias = Literal["transport", "process", "engine", "device"]

UP: Final = (
    "message-late",
    "message-forged",
    "message-repeated",
    "message-flood",
    "message-misplaced",
    "message-lost",
    "message-twice",
    "message-replayed",
    "message-overtaken",
    "message-cut-short",
    "message-garbled",
)
DOWN: Final = ("grant-late", "grant-lost", "cancel-twice", "grant-cut-short")
OF_THE_DEAD: Final = ("message-of-the-dead",)

PROCESS: Final = ("source-stopped", "source-killed")
NOT_COMING: Final = ("restart-given-up",)

ENGINE: Final = (
    "engine-slow",
    "engine-raises",
    "engine-commits-twice",
    "engine-writes-twice",
    "engine-misstamps",
    "engine-commits-outside",
    "engine-final-early",
    "engine-no-final",
    "engine-goes-on-after-final",
    "engine-cuts-too-fine",
    "engine-ignores-cancel",
    "engine-silent",
    "engine-hangs",
    "engine-never-returns",
)
LOCAL_ENGINE: Final = ENGINE[:-2]
"""One that runs in the owner's own turn would take the owner with it."""
EARLY: Final = ("engine-announces-early",)
BYTES: Final = (*EARLY, "engine-writes-late", "engine-writes-astray")
"""Faults of bytes in the source's own slab: only digests show them, and poison the first."""

IMPORT: Final = (
    "import-late",
    "import-fails-at-once",
    "import-fails-later",
    "import-never-ends",
    "import-leaves-out",
)
CHECK: Final = ("digest-check-fails", "digest-check-never-ends")
RESERVE: Final = ("reserve-refused", "reserve-fails")
PUBLISH: Final = ("publish-fails",)
FREE: Final = ("free-fails",)
DECODE: Final = ("decode-fails",)

GROUPS: Final[dict[Group, tuple[str, ...]]] = {
    "transport": UP + DOWN + OF_THE_DEAD,
    "process": PROCESS + NOT_COMING,
    "engine": ENGINE + BYTES,
    "device": IMPORT + CHECK + RESERVE + PUBLISH + FREE + DECODE,
}

_LANES: Final = (*FREE, *RESERVE)  # a lane that was promised to another is lost
WAYS: Final[dict[Group, tuple[tuple[str, ...], ...]]] = {
    **{group: tuple((kind,) for kind in kinds) for group, kinds in GROUPS.items()},
    "device": (*((kind,) for kind in GROUPS["device"]), *(_LANES,) * 3),
}
"""The faults that may be had alone."""
