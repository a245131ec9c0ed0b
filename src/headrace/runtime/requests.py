"""What a caller asks of an owner, and what it is told while and after its request runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, get_args

from headrace.backends.base import Entry
from headrace.errors import Refused
from headrace.geometry import MAX_POSITIONS, Emission, Manifest
from headrace.ids import RequestId, Span
from headrace.messages import (
    MAX_ATTEMPTS,
    MAX_CUTS,
    MAX_LOGPROBS,
    AskedRoute,
    Interval,
    Measured,
    OnFailure,
    PrefixAsked,
    Reuse,
    Route,
    RouteChoice,
    Sampling,
)
from headrace.protocol.admission import FailurePolicy
from headrace.runtime.lanes import Lanes

if TYPE_CHECKING:
    from headrace.engine.sampling import Logprobs

ROUTES: tuple[Route, ...] = ("whole", "chunked", "streamed")
ASKED_ROUTES: tuple[AskedRoute, ...] = (*ROUTES, "auto")
DIGEST = "crc32"  # the one algorithm that runs; another is agreed on only when it is built
EMISSIONS = ("layers", "cache_groups")
PREFIXES: tuple[PrefixAsked, ...] = get_args(PrefixAsked)
ON_FAILURE: tuple[OnFailure, ...] = get_args(OnFailure)
MAX_ATTEMPTS_BY_DEFAULT = 3
MAX_DEADLINE_S = 1e9  # 30 years; beyond it, ns no longer fit the clock's arithmetic


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """How one request is prefilled, moved and decoded.

    route: `auto` takes the one that is predicted to be fastest and sets group_layers and chunk by
    itself. group_layers: layers of one layer group (streamed). chunk: positions of one transfer
    chunk, 0 = all. prefill_chunk: positions computed at once, 0 = all; it changes the numbers a
    little, so it is part of the pairing. max_tokens: tokens to decode, 0 = publish only. digest:
    verify every span as landed. audit: keep digests of all logits rows and published cells. trace:
    keep the intervals. deadline_s: the hand-off must be published within it, with all its attempts.
    hold: stop at the published entry and keep it until `DecoderOwner.release`, for a caller that
    decodes by itself.

    on_failure: what follows when a source fails: `fail`, `retry` (up to `max_attempts` attempts in
    all, on another source where there is one), or `local` (the owner prefills by itself where it
    can). poison: fill the reserved cells with a pattern before the first import, and publish only
    if none of it is left.

    prefix: whether it may go on from prompts that the decoder kept, and is kept itself: `identical`
    takes the same prompt only, with the bits of a prefill; `shared` also what begins alike, with
    the bits of a prefill that is cut where the shared part ends. prefill_cuts: ascending positions
    at which its own prefill is cut; they change the numbers a little, as prefill_chunk does.

    logprobs: keep with each token its logprob and those of so many of the likeliest, at most
    MAX_LOGPROBS; None for none. They change no token.
    """

    route: AskedRoute = "whole"
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
    on_failure: OnFailure = "fail"
    max_attempts: int = MAX_ATTEMPTS_BY_DEFAULT
    poison: bool = False
    prefix: PrefixAsked = "off"
    prefill_cuts: tuple[int, ...] = ()
    logprobs: int | None = None

    @property
    def policy(self) -> FailurePolicy:
        """What the owner's machine is told of `on_failure`."""
        if self.on_failure == "retry":
            return FailurePolicy(num_attempts=self.max_attempts)
        return FailurePolicy(local=self.on_failure == "local")

    def check_values(self) -> None:
        """Refuse what makes no sense, whoever serves it, by the option's name."""
        if self.route not in ASKED_ROUTES:
            raise Refused(
                f"route {self.route!r} is not one of {', '.join(ASKED_ROUTES)}", field="route"
            )
        for name, least, most in (
            ("group_layers", 1, MAX_POSITIONS - 1),
            ("chunk", 0, MAX_POSITIONS - 1),
            ("prefill_chunk", 0, MAX_POSITIONS - 1),
            ("max_tokens", 0, MAX_POSITIONS - 1),
            ("max_attempts", 1, MAX_ATTEMPTS),
        ):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise Refused(
                    f"{name} is {value!r}; it is a count from {least} to {most}", field=name
                )
        self._check_prefix()
        if self.logprobs is not None and (
            type(self.logprobs) is not int or not 0 <= self.logprobs <= MAX_LOGPROBS
        ):
            raise Refused(
                f"logprobs is {self.logprobs!r}; it is a count from 0 to {MAX_LOGPROBS}, or None",
                field="logprobs",
            )
        if self.route == "auto" and (self.chunk or self.group_layers != 1):
            field = "chunk" if self.chunk else "group_layers"
            raise Refused(f"route auto sets {field} by itself; leave it out", field=field)
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
        if self.on_failure not in ON_FAILURE:
            raise Refused(
                f"on_failure {self.on_failure!r} is not one of {', '.join(ON_FAILURE)}",
                field="on_failure",
            )

    def _check_prefix(self) -> None:
        if self.prefix not in PREFIXES:
            raise Refused(
                f"prefix {self.prefix!r} is not one of {', '.join(PREFIXES)}", field="prefix"
            )
        cuts = self.prefill_cuts
        whole = all(type(cut) is int for cut in cuts)
        if not whole or len(cuts) > MAX_CUTS or any(b <= a for a, b in pairwise((0, *cuts))):
            raise Refused(
                f"prefill_cuts are {cuts!r}; they are at most {MAX_CUTS} positions above 0, "
                "ascending",
                field="prefill_cuts",
            )

    def check(self, source: Manifest, decoder: Manifest) -> None:
        """Refuse what makes no sense, or what this pair cannot do, by the option's name."""
        self.check_values()
        if self.route not in ("whole", "auto") and not source.emits:
            raise Refused(
                f"this source gives whole results only and cannot serve route {self.route!r}",
                field="route",
            )
        if self.prefill_cuts and source.prefix == "none":
            raise Refused(
                "this source does not cut its prefill where it is asked to; leave prefill_cuts out",
                field="prefill_cuts",
            )
        for side, manifest in (("source", source), ("decoder", decoder)):
            if self.route == "streamed" and self.emission not in manifest.emits:
                raise Refused(f"this {side} does not take {self.emission}", field="emission")
            if self.digest and DIGEST not in manifest.digests:
                raise Refused(f"this {side} has no {DIGEST} digests", field="digest")
        needs_logits = {
            "temperature": self.sampling.temperature > 0,
            "audit": self.audit,
            "logprobs": self.logprobs is not None,
        }
        asked = next((name for name, needs in needs_logits.items() if needs), None)
        if source.first == "token" and asked is not None:
            raise Refused(
                f"this source gives a first token and no logits, which {asked} needs", field=asked
            )


@dataclass(slots=True)
class Request:
    """One request as its caller sees it; filled in by the owner's turns.

    entry, logits: of a request that asked to `hold`: what was published, and the source's final row
    of logits (empty if it gave a token id, which is then the only one of `tokens`). cause: why it
    did not finish, as one of `Cause`'s words; empty while it runs and when it finished. attempts:
    the reasons of attempts that failed and that another followed. The intervals, the choice of
    route `auto` and what is measured are those of the last attempt, but for the time of submission.
    reuse: what it got of kept prompts, if it asked. local: whether the owner itself computes, or
    computed, the attempt. drained: what it held is free again, or set
    apart. label: its caller's own number for it, if that gave one. logprobs: of each of `tokens`,
    if it asked for them.
    """

    request: RequestId
    num_tokens: int
    options: RequestOptions
    on_token: Callable[[int], None] | None = None
    on_progress: Callable[[Span, int, int], None] | None = None
    label: int | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    outcome: str = ""
    reason: str = ""
    cause: str = ""
    attempts: list[str] = field(default_factory=list)
    measured: Measured | None = None
    choice: RouteChoice | None = None
    reuse: Reuse | None = None
    local: bool = False
    drained: bool = False
    logits_digest: str = ""
    kv_digests: tuple[str, ...] = ()
    entry: Entry | None = None
    logits: bytes = b""
    trace: Lanes = field(default_factory=Lanes)

    @property
    def source_intervals(self) -> list[Interval]:
        """What the source did, if the request asked for a trace."""
        return list(self.trace.source_intervals())

    @property
    def owner_intervals(self) -> list[Interval]:
        """What the owner did, if the request asked for a trace."""
        return list(self.trace.owner_intervals())

    @property
    def imports(self) -> list[Interval]:
        """The imports among the owner's intervals, as they were fenced."""
        return [each for each in self.owner_intervals if each.kind == "import"]

    @property
    def done(self) -> bool:
        """Whether the request has had its one terminal: finished, failed or cancelled."""
        return bool(self.outcome)
