"""What a router, or an operator, says to an owner, and what it hears at once.

What a request came to is told in `headrace.messages.reports`, what is held in
`headrace.messages.held`.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

from headrace.geometry import Emission, Manifest
from headrace.ids import AttemptId
from headrace.messages.base import (
    MAX_CUTS,
    MAX_LOGPROBS,
    MAX_STOP_TOKENS,
    AskedRoute,
    Count,
    OnFailure,
    PrefixAsked,
    Text,
    WireMessage,
)

NumLogprobs: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]


# Router to owner.


class Sampling(WireMessage, frozen=True, tag="sampling"):
    """How tokens are chosen: temperature 0 is greedy; top_k 0 and top_p 1 cut nothing."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: Count = 0
    seed: Count | None = None


class Submit(WireMessage, frozen=True, tag="submit"):
    """Start a request; its u32 prompt ids ride beside it as a memfd of 4 x num_tokens bytes.

    logprobs: with each token its logprob and those of so many of the likeliest, or None for none.
    """

    label: Count
    num_tokens: Count
    max_tokens: Count
    route: AskedRoute
    group_layers: Count
    chunk: Count
    prefill_chunk: Count
    emission: Emission
    digest: bool
    stop_tokens: Annotated[tuple[Count, ...], Meta(max_length=MAX_STOP_TOKENS)]
    sampling: Sampling
    audit: bool
    trace: bool
    deadline_ns: Count | None
    on_failure: OnFailure
    max_attempts: Count
    poison: bool
    prefix: PrefixAsked = "off"
    prefill_cuts: Annotated[tuple[Count, ...], Meta(max_length=MAX_CUTS)] = ()
    logprobs: NumLogprobs | None = None


class Withdraw(WireMessage, frozen=True, tag="withdraw"):
    """Cancel the request with this label, wherever it is."""

    label: Count


class Inspect(WireMessage, frozen=True, tag="inspect"):
    """Tell what is held; answered by `Inspected`."""


class Reinstate(WireMessage, frozen=True, tag="reinstate"):
    """An operator answers for it that the device is quiet; answered by `Reinstated`.

    because: how the operator knows, for the log.
    """

    attempt: AttemptId
    because: Text


# Owner to router.


class Up(WireMessage, frozen=True, tag="up"):
    """The owner and all its sources are ready; num_slots: of all sources."""

    decoder: Manifest
    lanes: Count
    num_slots: Count
    slot_nbytes: Count
    context: Count
    num_sources: Count


class Down(WireMessage, frozen=True, tag="down"):
    """The owner cannot start or go on; `mistake` tells what was refused from a failure.

    shortage: it was refused for what the host has too little of just now.
    """

    mistake: bool
    reason: Text
    shortage: bool = False


class Token(WireMessage, frozen=True, tag="token"):
    """One more token of a request, with its logprobs if it asked for them.

    logprob: the natural log of its share in the softmax of the row, before temperature, top_p and
    top_k. top: (token, logprob) of the likeliest, in order; of equal ones the lowest id first.
    """

    label: Count
    token: Count
    logprob: float | None = None
    top: Annotated[tuple[tuple[Count, float], ...], Meta(max_length=MAX_LOGPROBS)] = ()


class Reinstated(WireMessage, frozen=True, tag="reinstated"):
    """What was quarantined is in service again, or is not: then `error` says why."""

    attempt: AttemptId
    error: Text
