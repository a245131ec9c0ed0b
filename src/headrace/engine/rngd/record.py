"""What a probe of one card found, kept as JSON, and what of it the engine relies on.

Much about a card is stated nowhere: whether views of its tensors can be copied, whether a cache
that one program changed is seen changed by the next, whether its numbers are the emulation's. The
engine refuses a card until a record for this card, these packages and this many chips says that
what it needs holds. A record of a fake says so, and is good for a fake only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec

from headrace.engine import records
from headrace.engine.models import cache_root
from headrace.engine.rngd.sdk import VENDOR, Sdk
from headrace.errors import BackendUnavailable, Refused

Reads: TypeAlias = Literal["narrow", "whole"]
"""How rows of a card's tensor come to the host: through a view of them, or with all others."""

RECORD_VERSION: Final = 1
HINT: Final = (
    "Run `headrace rngd probe`, or give --source-options '{\"unverified\": true}' to go on without"
)


class Record(records.Record, frozen=True, kw_only=True):
    """One probe of one card.

    sdk: "furiosa" or "fake furiosa". card: what the management library says of it (see `cards`).
    chips: how many the kernels spanned.
    """

    version: int = RECORD_VERSION
    chips: int


def path_of(sdk: Sdk, card: Mapping[str, Any], chips: int) -> Path:
    """Where the record of a card lies: one for each card, set of packages and number of chips."""
    known = [sdk.name, sorted(sdk.versions.items()), *_which(card), chips]
    digest = hashlib.sha256(msgspec.json.encode(known)).hexdigest()[:16]
    return cache_root() / "rngd" / "records" / f"{digest}.json"


def verified_reads(sdk: Sdk, card: Mapping[str, Any], chips: int) -> Reads:
    """How rows can be read from this card, as its record says.

    Raises:
        BackendUnavailable: layout_unverified: there is no record, or what the engine relies on was
            not found to hold.
    """
    path = path_of(sdk, card, chips)
    if not card.get("serial") and not card.get("bdf"):
        raise _unverified(path, "the card tells neither a serial nor its address on the PCI bus")
    if not path.is_file():
        raise _unverified(path, "there is no record for this card and these packages")
    try:
        record = records.read(path, Record)
    except Refused as exc:
        raise _unverified(path, str(exc)) from exc
    wanted = RECORD_VERSION, sdk.name, dict(sdk.versions)
    if (record.version, record.sdk, record.packages) != wanted:
        raise _unverified(path, "the record was made by other packages")
    if (_which(record.card), record.chips) != (_which(card), chips):
        raise _unverified(path, "the record is of another card, or of other chips")
    return reads_of(record, path)


def reads_of(record: Record, path: Path) -> Reads:
    """How rows can be read, as a record says; raises as `verified_reads`."""
    for way in ("narrow", "whole"):
        if record.fact("reads", way) is True and record.fact(f"prefill by {way}", "agrees") is True:
            return "narrow" if way == "narrow" else "whole"
    if record.unfinished:
        raise _unverified(path, f"the probe died in its step {record.unfinished!r}")
    detail = "no way of reading a cache gave the cells that the emulation gives"
    raise _unverified(path, detail)


def _which(card: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells one card from another, or the same one with other software, and an emulation from
    both.
    """
    told = ("serial", "bdf", "driver", "firmware", "emulated")
    return tuple(card.get(name) for name in told)


def _unverified(path: Path, detail: str) -> BackendUnavailable:
    return BackendUnavailable(VENDOR, "layout_unverified", str(path), detail, HINT)
