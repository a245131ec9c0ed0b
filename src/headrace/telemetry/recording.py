"""What a trace file keeps of each request: its raw intervals and what was measured.

The file is a Chrome trace, so that Perfetto opens it; this record rides along under a key that
Perfetto does not know, and is what `headrace trace` reads back.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeAlias

import msgspec
from msgspec import Struct, field

from headrace.errors import Refused
from headrace.messages import Interval, IntervalKind, Measured

VERSION: Final = 3
"""Version 2 does not tell when there was storage, and for how long a request was parked: both are
read as 0, and a tail counts the waiting for a lane. Version 1 has no errors of device clocks in its
intervals either: they are read as 0, by the host.
"""

SOURCE_KINDS: Final[tuple[IntervalKind, ...]] = ("compute", "write", "announced", "final")
OWNER_KINDS: Final[tuple[IntervalKind, ...]] = (
    "granted",
    "parked",
    "validated",
    "import",
    "neighbour",
    "published",
    "first_token",
    "decode",
    "cancel",
    "ended",
    "drain",
)

LOCAL_GRANT: Final = "prefill by the owner itself"
REMOTE_GRANT: Final = "prefill"
"""What a `granted` interval is called: by its name, a reader tells who computed the attempt."""

Stamp: TypeAlias = dict[str, str | int | float]

_HOW = "record one with: headrace run --trace FILE.json"
_COLUMNS = {
    "interval": ("", *Interval.__struct_fields__),
    "measured": ("", *Measured.__struct_fields__),
}
_INTERVAL_1: Final = ("", "kind", "name", "begun_ns", "ended_ns", "nbytes", "clock")
_MEASURED_1: Final = (
    "",
    "submitted_ns",
    "prefill_begun_ns",
    "source_final_ns",
    "last_group_ns",
    "published_ns",
    "first_token_ns",
    "ended_ns",
    "kv_nbytes",
    "nbytes_before_final",
    "last_group_nbytes",
    "spans",
    "groups",
    "imports",
    "import_ns",
    "decode_in_the_way_ns",
)
_COLUMNS_OF: Final = {
    1: {"interval": _INTERVAL_1, "measured": _MEASURED_1},
    2: {"interval": (*_INTERVAL_1, "error_ns"), "measured": _MEASURED_1},
    VERSION: _COLUMNS,
}


class Run(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One traced request.

    name: what it is shown as. route: that it took. choice: why, if the route was chosen for it.
    prompt: a digest, the same for the same tokens. source, owner: the intervals of its last
    attempt, as each side's clock read them. measured: None if nothing was published.
    """

    name: str
    route: str
    num_tokens: int
    outcome: str
    source: tuple[Interval, ...]
    owner: tuple[Interval, ...]
    measured: Measured | None
    choice: str = ""
    prompt: str = ""
    reason: str = ""


class Recording(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The requests of one trace file, and where and when they ran.

    columns: what the arrays of an interval and of what was measured hold, for other readers.
    """

    version: int = VERSION
    columns: dict[str, tuple[str, ...]] = field(default_factory=lambda: dict(_COLUMNS))
    stamp: Stamp = field(default_factory=dict)
    runs: tuple[Run, ...]


def prompt_digest(tokens: Sequence[int]) -> str:
    """The same hex text for the same tokens, from which they cannot be read."""
    return hashlib.blake2b(array("I", tokens).tobytes(), digest_size=16).hexdigest()


def read(path: Path) -> Recording:
    """The recording in a trace file.

    Raises:
        Refused: it cannot be read, or is no trace of headrace's; the text says what it is.
    """
    try:
        content = path.read_bytes()
    except OSError as exc:
        raise Refused(f"the trace {path} cannot be read: {exc.strerror}") from exc
    try:
        raw = msgspec.json.decode(content, type=_File).headrace
    except _UNREADABLE as exc:
        raise Refused(f"{path} is no trace ({exc}); {_HOW}") from exc
    if not bytes(raw):
        raise Refused(f"{path} is not a trace that headrace recorded; {_HOW}")
    try:
        version = msgspec.json.decode(raw, type=_Versioned).version
        if version not in _COLUMNS_OF:
            known = ", ".join(map(str, _COLUMNS_OF))
            raise Refused(
                f"{path} is a trace of version {version}, and this headrace reads {known}; {_HOW}"
            )
        recording = msgspec.json.decode(raw, type=Recording)
        _check(recording)
    except _UNREADABLE as exc:
        raise Refused(f"{path} is a broken trace ({exc}); {_HOW}") from exc
    return recording


_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class _File(Struct):
    headrace: msgspec.Raw = msgspec.Raw(b"")


class _Versioned(Struct):
    version: int


def _check(recording: Recording) -> None:
    """What types cannot say; raises msgspec.ValidationError as they do."""
    columns = _COLUMNS_OF[recording.version]
    if recording.columns not in (columns, _COLUMNS):  # the default, where a file tells none
        raise msgspec.ValidationError(f"its columns are not {columns}")
    if not recording.runs:
        raise msgspec.ValidationError("it holds no request")
    for run in recording.runs:
        for lane, intervals, kinds in (
            ("source", run.source, SOURCE_KINDS),
            ("owner", run.owner, OWNER_KINDS),
        ):
            for each in intervals:
                if each.kind not in kinds:
                    raise msgspec.ValidationError(f"an interval {each.kind!r} of the {lane}")
