"""What an owner process is started with."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from headrace.runtime.supervisor import RestartPolicy


class OwnerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """One decoder and its one source, as JSON on the owner's command line.

    context: positions of a lane and of a slot. source_python: the interpreter of another
    environment, or None for the owner's own, which is up to whoever starts the owner.
    prefetch_depth: requests that are prefilled while no lane is free, 0 for none. restart: how
    a source that dies is started again, or None for not at all. local: whether the owner may
    prefill by itself, for requests that ask for it. control: the path of a socket for operators, or
    None for none. tune_copies: whether a probe is run first and this process and its source are
    started so that copies bypass the cache, if that is faster.
    """

    decoder: str
    decoder_options: dict[str, Any]
    source: str
    source_options: dict[str, Any]
    context: int
    source_python: str | None = None
    num_slots: int = 2
    prefetch_depth: int = 1
    start_timeout_s: float = 600.0
    progress_timeout_s: float = 600.0
    drain_timeout_s: float = 120.0
    restart: RestartPolicy | None = None
    local: bool = False
    control: str | None = None
    tune_copies: bool = False
    log_level: str = "WARNING"
    log_json: bool = False
