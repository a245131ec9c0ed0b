"""What a probe found of a card with a compiled model on it, and what of that the decoder relies on.

Nothing is documented of how a card keeps a cache: in which numbers, in which order of rows, whether
parts of a block can be moved. The decoder refuses to import until a record for this card, these
packages, this driver and this compiled model says that what it needs holds. A record of a fake says
so, and is good for a fake only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.engine import records
from headrace.engine.atom import cards
from headrace.engine.atom.artifact import digest_of
from headrace.engine.atom.casts import NumberFormat
from headrace.engine.atom.compiled import CALLS
from headrace.engine.atom.sdk import VENDOR, Sdk
from headrace.engine.models import cache_root
from headrace.errors import BackendUnavailable, Refused

RECORD_VERSION: Final = 2
BY_POSITION: Final = "by_position"

_OTHERS: Final = (
    "The record has all that was found. Use the versions that docs/atom.md names, and probe again"
)


@dataclass(frozen=True)
class Verified:
    """What was found to hold of one card, compiled model and set of packages.

    number_format: what a mirror's elements must be. sub_blocks: whether the first rows of a block
    can be transferred alone. clears: whether a lane must be cleared before it is used again.
    warms_up: whether the card must have computed once before a cache can be written. checkpoint:
    fingerprint of the one whose keys, values and logits the card's were compared with.
    """

    number_format: NumberFormat
    sub_blocks: bool
    clears: bool
    warms_up: bool
    checkpoint: str = ""


class Record(records.Record, frozen=True, kw_only=True):
    """One probe of one card with one compiled model.

    sdk: "rebellions" or "fake rebellions". card: see `cards.describe`. driver: the kernel driver's
    version. compiled: the model's directory, digest, and caches by geometry. checkpoint: the
    fingerprint of that which the reference was computed with; empty without one.
    """

    version: int = RECORD_VERSION
    driver: str
    compiled: dict[str, Any]
    checkpoint: str = ""


def path_of(sdk: Sdk, card: Mapping[str, Any], digest: str) -> Path:
    """Where the record lies: one for each card, set of packages, driver and compiled model."""
    known = [sdk.name, sorted(sdk.versions.items()), sdk.driver, cards.which(card), digest]
    name = hashlib.sha256(msgspec.json.encode(known)).hexdigest()[:16]
    return cache_root() / "atom" / "records" / f"{name}.json"


def verified(sdk: Sdk, device: int, directory: Path) -> Verified:
    """What the record of this card and this compiled model says.

    Raises:
        BackendUnavailable: layout_unverified: there is no record, or what the decoder relies on was
            not found to hold. no_device: there is no such card.
        Refused: the directory holds no compiled model.
    """
    card = cards.describe(sdk, device)
    digest = digest_of(directory)
    path = path_of(sdk, card, digest)
    hint = how_to_make(directory, device)
    if not path.is_file():
        raise _unverified(
            path, "there is no record for this card, driver, compiled model and packages", hint
        )
    try:
        record = records.read(path, Record)
    except Refused as exc:
        raise _unverified(path, str(exc), hint) from exc
    wanted = RECORD_VERSION, sdk.name, dict(sdk.versions), sdk.driver
    if (record.version, record.sdk, record.packages, record.driver) != wanted:
        raise _unverified(path, "the record was made by other packages or another driver", hint)
    if cards.which(record.card) != cards.which(card) or record.compiled.get("digest") != digest:
        raise _unverified(path, "the record is of another card or another compiled model", hint)
    return usable(record, path, hint)


def usable(record: Record, path: Path, hint: str) -> Verified:
    """What can be relied on, as a record says; `hint`: what makes a new one.

    Raises:
        BackendUnavailable: layout_unverified: what the decoder needs was not found to hold.
    """
    failed = next(_failings(record, hint), None)
    if failed is not None and record.unfinished:
        raise _unverified(path, f"the probe died in its step {record.unfinished!r}", hint)
    if failed is not None:
        raise _unverified(path, *failed)
    return Verified(
        number_format=_format(record) or "declared",
        sub_blocks=record.fact("sub_blocks", "works") is True,
        clears=record.fact("reuse", "clears") is not False,
        warms_up=record.fact("warm_up", "needed") is True,
        checkpoint=record.checkpoint,
    )


def how_to_make(directory: Path, device: int) -> str:
    """The command that makes a record."""
    where = f" --device {device}" if device else ""
    return f"Run: headrace atom probe --model CHECKPOINT --compiled {directory}{where}"


def _failings(record: Record, hint: str) -> Iterator[tuple[str, str]]:
    """What is needed and was not found to hold, in the order of the steps, and what to do."""
    for step, why, remedy in (
        ("calls", _no_calls(record), _OTHERS),
        ("sizes", _no_sizes(record), _OTHERS),
        ("warm_up", _no_transfer(record), _OTHERS),
        ("number_format", _no_format(record), hint),
        ("round_trip", _no_round_trip(record), _OTHERS),
        ("decode_places", _no_places(record), _OTHERS),
        ("row_order", _no_order(record), _OTHERS),
        ("logits", _no_logits(record), hint),
        ("import_decodes", _no_decode(record), _OTHERS),
    ):
        if why:
            finding = record.findings.get(step)
            error = f": {finding.error}" if finding is not None and finding.error else ""
            yield f"step {step}: {why}{error}", remedy


def _format(record: Record) -> NumberFormat | None:
    """What a mirror's elements must be; None if it was not found.

    A card whose cache reads as it is declared, and that gives numbers back as its own 16-bit float
    has them, converts by itself.
    """
    match record.fact("number_format", "found"):
        case "declared":
            return "converted" if record.fact("round_trip", "converted") is True else "declared"
        case "custom_float16":
            return "custom_float16"
    return None


def _no_calls(record: Record) -> str:
    if (finding := record.findings.get("calls")) is None or finding.error:
        return "the compiled model was not opened"
    missing = [name for name in CALLS if record.fact("calls", name) is not True]
    return f"the runtime has no {' and no '.join(missing)}" if missing else ""


def _no_sizes(record: Record) -> str:
    if record.fact("sizes", "agrees") is not False:
        return ""
    first = record.fact("sizes", "first")
    return f"the runtime says that a cache has other bytes than its metadata: {first}"


def _no_transfer(record: Record) -> str:
    if record.fact("warm_up", "needed") in (True, False):
        return ""
    return "no block came back as it was sent, also after the card had computed"


def _no_format(record: Record) -> str:
    if _format(record) is not None:
        return ""
    return "it was not found in which numbers the card keeps a cache"


def _no_round_trip(record: Record) -> str:
    changed = record.fact("round_trip", "finite_changed")
    count = (
        changed.get(record.fact("number_format", "found")) if isinstance(changed, dict) else None
    )
    if count is None:
        return "it was not found whether values come back as they were sent"
    if count != 0 and _format(record) != "converted":
        return f"{count} finite values came back changed"
    if record.fact("round_trip", "others_kept") is not True:
        return "a transfer changed more than its block"
    return ""


def _no_order(record: Record) -> str:
    order = record.fact("row_order", "order")
    if order == BY_POSITION:
        return ""
    return f"the rows of a cache are not found in the order of positions, but {order or 'unknown'}"


def _no_places(record: Record) -> str:
    if record.fact("decode_places", "as_imported") is True:
        return ""
    elsewhere = record.fact("decode_places", "elsewhere") or "it was not found where it is"
    return f"a decode step leaves its position elsewhere than an import would: {elsewhere}"


def _no_logits(record: Record) -> str:
    match record.fact("logits", "near"):
        case True:
            return ""
        case False:
            return (
                "the card computes other logits than the checkpoint, so the model was compiled "
                "from another one"
            )
    return "it was not found whether the card computes the checkpoint's logits"


def _no_decode(record: Record) -> str:
    step = "import_decodes"
    if record.fact(step, "identical") is True and record.fact(step, "clearing_seen") is True:
        return ""
    if record.fact(step, "own_repeatable") is False:
        return "the card's own decode is not the same twice, so nothing can be shown to be exact"
    if record.fact(step, "clearing_seen") is False:
        return "a lane that was cleared decodes as if it was not"
    return "what was imported was not found to decode to the bits of the card's own prefill"


def _unverified(path: Path, detail: str, hint: str) -> BackendUnavailable:
    return BackendUnavailable(VENDOR, "layout_unverified", str(path), detail, hint)
