"""What a decoder is served with: its owner's config, its restarts, and its time limits."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.runtime.config import OwnerConfig
from headrace.runtime.supervisor import RestartPolicy


@dataclass(frozen=True, slots=True)
class DecoderSettings:
    """What one decoder is served with.

    prefill_chunk: positions that a source computes at once, 0 = all; part of the pairing.
    look_every_s: how often its owner is asked what it holds. silence_s: how long it may leave that
    unanswered before it is taken for stuck and ended. start_s: how long it may take to be ready.
    pair: source and decoder, as figures of them are named.
    """

    name: str
    models: tuple[str, ...]
    owner: OwnerConfig
    interpreter: str | None = None
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    prefill_chunk: int = 0
    look_every_s: float = 1.0
    silence_s: float = 120.0
    start_s: float = 900.0
    pair: str = ""
