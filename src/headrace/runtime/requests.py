"""What a caller asks of an owner, and what it is told while and after its request runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.backends.base import Entry
from headrace.errors import Refused
from headrace.geometry import MAX_POSITIONS, Emission, Manifest
from headrace.ids import RequestId, Span
from headrace.messages import Interval, Measured, Route, Sampling

ROUTES: tuple[Route, ...] = ("whole", "chunked", "streamed")
DIGEST = "crc32"  # the one algorithm that runs; another is agreed on only when it is built
EMISSIONS = ("layers", "cache_groups")
MAX_DEADLINE_S = 1e9  # 30 years; beyond it, ns no longer fit the clock's arithmetic


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """How one request is prefilled, moved and decoded.

    group_layers: layers of one layer group (streamed). chunk: positions of one transfer chunk, 0 =
    all. prefill_chunk: positions computed at once, 0 = all; it changes the numbers a little, so it
    is part of the pairing. max_tokens: tokens to decode, 0 = publish only. digest: verify every
    span as landed. audit: keep digests of all logits rows and published cells. trace: keep the
    intervals. deadline_s: the hand-off must be published within it. hold: stop at the published
    entry and keep it until `DecoderOwner.release`, for a caller that decodes by itself.
    """

    route: Route = "whole"
    group_layers: int = 1
    chunk: int = 0
    prefill_chunk: int = 0
    emission: Emission = "layers"
    max_tokens: int = 16
    stop_tokens: tuple[int, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    digest: bool = False
    audit: bool = False
    trace: bool = False
    deadline_s: float | None = None
    hold: bool = False

    def check(self, source: Manifest, decoder: Manifest) -> None:
        """Refuse what makes no sense, or what this pair cannot do, by the option's name."""
        if self.route not in ROUTES:
            raise Refused(f"route {self.route!r} is not one of {', '.join(ROUTES)}", field="route")
        for name in ("group_layers", "chunk", "prefill_chunk", "max_tokens"):
            value, least = getattr(self, name), 1 if name == "group_layers" else 0
            if type(value) is not int or not least <= value < MAX_POSITIONS:
                raise Refused(
                    f"{name} is {value!r}; it is a count from {least} to {MAX_POSITIONS - 1}",
                    field=name,
                )
        if self.emission not in EMISSIONS:
            raise Refused(
                f"emission {self.emission!r} is not one of {', '.join(EMISSIONS)}",
                field="emission",
            )
        if self.deadline_s is not None and not -MAX_DEADLINE_S <= self.deadline_s <= MAX_DEADLINE_S:
            raise Refused(
                f"deadline_s is {self.deadline_s}; it is at most {MAX_DEADLINE_S}",
                field="deadline_s",
            )
        if self.route != "whole" and not source.emits:
            raise Refused(
                f"this source gives whole results only and cannot serve route {self.route!r}",
                field="route",
            )
        for side, manifest in (("source", source), ("decoder", decoder)):
            if self.route == "streamed" and self.emission not in manifest.emits:
                raise Refused(f"this {side} does not take {self.emission}", field="emission")
            if self.digest and DIGEST not in manifest.digests:
                raise Refused(f"this {side} has no {DIGEST} digests", field="digest")
        if source.first == "token" and (self.sampling.temperature > 0 or self.audit):
            asked = "temperature" if self.sampling.temperature > 0 else "audit"
            raise Refused(
                f"this source gives a first token and no logits, which {asked} needs", field=asked
            )


@dataclass(slots=True)
class Request:
    """One request as its caller sees it; filled in by the owner's turns.

    entry, logits: of a request that asked to `hold`: what was published, and the source's final row
    of logits (empty if it gave a token id, which is then the only one of `tokens`).
    """

    request: RequestId
    num_tokens: int
    options: RequestOptions
    on_token: Callable[[int], None] | None = None
    on_progress: Callable[[Span, int, int], None] | None = None
    tokens: list[int] = field(default_factory=list)
    outcome: str = ""
    reason: str = ""
    measured: Measured | None = None
    logits_digest: str = ""
    kv_digests: tuple[str, ...] = ()
    entry: Entry | None = None
    logits: bytes = b""
    source_intervals: list[Interval] = field(default_factory=list)
    owner_intervals: list[Interval] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether the request has had its one terminal: finished, failed or cancelled."""
        return bool(self.outcome)
