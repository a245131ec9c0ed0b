"""What the page shows, as the JSON of `/status`: its keys are stable, others may be added.

Times are s, rates are per s, sizes are bytes and shares are of 1; null where there is no such
figure. Moments count from `now_ns`, which is the host's CLOCK_MONOTONIC.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

VERSION: Final = 1

CLOCK: Final = "host clock (CLOCK_MONOTONIC): nothing is claimed about kernels"


class Median(Struct, frozen=True, kw_only=True):
    """A figure over the last `samples` of the last `window_s` seconds."""

    p50_s: float | None
    p99_s: float | None
    samples: int
    window_s: float


class Rates(Struct, frozen=True, kw_only=True):
    """Throughput and latency as the server sees them.

    tokens_per_s, requests_per_s: over the last `window_s` whole seconds, of tokens of any request
    and of requests that had their terminal. history: tokens in each of the last seconds, the latest
    last. ttft: from a request's admission to its first token, queueing included. token: from one
    token of a choice to its next.
    """

    tokens_per_s: float
    requests_per_s: float
    window_s: float
    history: tuple[int, ...]
    ttft: Median
    token: Median


class QueueState(Struct, frozen=True, kw_only=True):
    """What waits for an owner: choices, and their bytes as `queue.max_bytes` bounds them."""

    waiting: int
    nbytes: int


class LaneState(Struct, frozen=True, kw_only=True):
    """A lane in use or out of service; request: ours, if it is known whose it is."""

    state: str
    attempt: str
    request: int | None
    reason: str
    for_s: float


class SlotState(Struct, frozen=True, kw_only=True):
    """One slot of a source; tokens: what is out, for_s: how long it drains or is out of service."""

    slot: int
    generation: int
    state: str
    holder: str
    request: int | None
    tokens: tuple[str, ...]
    for_s: float


class SourceState(Struct, frozen=True, kw_only=True):
    """One source and its slots; note: what is to be known of it, such as `emulated`."""

    source: int
    name: str
    note: str
    state: str
    reason: str
    pid: int
    restarts: int
    slots: tuple[SlotState, ...]


class ApartState(Struct, frozen=True, kw_only=True):
    """What an attempt left out of service."""

    attempt: str
    reason: str
    for_s: float


class DecoderState(Struct, frozen=True, kw_only=True):
    """A decoder, and what its owner said `looked_s` ago that it holds; null if it never did.

    truncated: it holds more than it could say.
    """

    name: str
    note: str
    state: str
    reason: str
    incarnation: int
    pid: int
    looked_s: float | None
    context: int
    lanes_free: int
    lanes: tuple[LaneState, ...]
    sources: tuple[SourceState, ...]
    quarantined: tuple[ApartState, ...]
    truncated: bool


class OpenChoice(Struct, frozen=True, kw_only=True):
    """A choice of an open request.

    phase: queued, waiting, parked, prefill, decoding, draining or ended. bytes_imported,
    bytes_total: as of the owner's last report. tail_s: once it is known, at its end.
    """

    choice: int
    decoder: str
    phase: str
    tokens: int
    bytes_imported: int
    bytes_total: int
    tail_s: float | None


class OpenRequest(Struct, frozen=True, kw_only=True):
    """A request without its terminal; label: its client's name for it."""

    request: int
    label: str
    endpoint: str
    model: str
    route: str
    prompt_tokens: int
    max_tokens: int
    stream: bool
    age_s: float
    ttft_s: float | None
    choices: tuple[OpenChoice, ...]


class EndedChoice(Struct, frozen=True, kw_only=True):
    """What a choice came to.

    route, why: that it took, and why if `auto` chose it. tail_s: the transfer tail. alone_s: T, the
    time of its imports. hidden_share: 1 - tail / T, null where T is below timer noise.
    bytes_before_prefill_end: imported by then, of kv_bytes. None of these four where nothing was
    moved: all of the prompt was kept, or the owner computed it itself (`local`).
    cached_tokens: positions of kept prompts. traced: whether its intervals are still kept.
    """

    choice: int
    decoder: str
    outcome: str
    reason: str
    cause: str
    route: str
    why: str
    tokens: int
    cached_tokens: int
    local: bool
    tail_s: float | None
    alone_s: float | None
    hidden_share: float | None
    bytes_before_prefill_end: int | None
    kv_bytes: int | None
    attempts: int
    traced: bool


class EndedRequest(Struct, frozen=True, kw_only=True):
    """A request that had its terminal; trace: whether `/trace/<request>` has something."""

    request: int
    label: str
    endpoint: str
    model: str
    prompt_tokens: int
    terminal: str
    status: int
    in_stream: bool
    reason: str
    ended_s: float
    took_s: float
    ttft_s: float | None
    tokens: int
    trace: bool
    choices: tuple[EndedChoice, ...]


class Bar(Struct, frozen=True, array_like=True):
    """Something drawn, from `begun_us` to `ended_us` after the drawing's origin.

    layers: what the layer group is, as text, or empty. count: intervals that it stands for, where
    there were too many to draw each.
    """

    kind: str
    begun_us: float
    ended_us: float
    layers: str
    count: int


class Mark(Struct, frozen=True, array_like=True):
    """An instant, `at_us` after the drawing's origin."""

    kind: str
    at_us: float


class Drawing(Struct, frozen=True, kw_only=True):
    """The swimlanes of one choice; bars and marks are arrays, in the order of their fields.

    Times count from the grant of the prefill, us. evidence: host, fake or device, which the bars
    were read from. clocks: one, shifted, contradictory or unchecked; if they contradict each other,
    the source's bars are left out. tail: [begun, ended).
    """

    request: int
    choice: int
    route: str
    begun_us: float
    ended_us: float
    evidence: str
    clocks: str
    source: tuple[Bar, ...]
    owner: tuple[Bar, ...]
    marks: tuple[Mark, ...]
    tail: tuple[float, float] | None


class Fault(Struct, frozen=True, kw_only=True):
    """Faults of a kind, by reason.

    kind: quarantined (out of service now), ended (requests that did not finish), rejected (before
    the queue), restarts (of sources and owners), retries (of attempts), dropped (messages).
    """

    kind: str
    reason: str
    count: int


class PageState(Struct, frozen=True, kw_only=True):
    """All of it. open and ended have the latest first; num_open counts also what is left out.

    recent: how many ended requests are kept.
    """

    version: int
    now_ns: int
    up_s: float
    clock: str
    rates: Rates
    queue: QueueState
    decoders: tuple[DecoderState, ...]
    num_open: int
    recent: int
    open: tuple[OpenRequest, ...]
    ended: tuple[EndedRequest, ...]
    drawings: tuple[Drawing, ...]
    faults: tuple[Fault, ...]
