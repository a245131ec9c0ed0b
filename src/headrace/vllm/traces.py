"""A load's timeline, in a file that `headrace trace` reads and Perfetto opens."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from headrace.errors import HeadraceError
from headrace.runtime.requests import Request
from headrace.telemetry.chrome import encode
from headrace.telemetry.recording import Recording, Run, prompt_digest
from headrace.telemetry.stamp import stamp
from headrace.vllm.scheduling import Load

_log = logging.getLogger("headrace.vllm")


class Traces:
    """Writes one file for each load into `directory`, or none if that is None.

    A file is called as vLLM calls the request, so that a log line leads to it.
    """

    def __init__(self, directory: str | None) -> None:
        self._directory = None if directory is None else Path(directory)

    def write(self, load: Load, request: Request) -> None:
        """Keep the timeline of a load that ended; what hinders that is told to the log."""
        if self._directory is None:
            return
        choice = request.choice
        run = Run(
            name=load.request_id,
            route=load.route if choice is None else choice.route,
            choice="" if choice is None else choice.reason,
            num_tokens=request.num_tokens,
            prompt=prompt_digest(load.tokens),
            outcome=request.outcome,
            reason=request.reason,
            source=tuple(request.source_intervals),
            owner=tuple(request.owner_intervals),
            measured=request.measured,
        )
        name = re.sub(r"[^\w.-]", "_", load.request_id)[:200]
        about = stamp() | {"pair": "vllm connector"}
        try:
            encoded = encode(Recording(runs=(run,), stamp=about))
            (self._directory / f"{name}.json").write_bytes(encoded)
        except (OSError, HeadraceError) as exc:
            _log.warning("the timeline of %s is not kept: %s", load.request_id, exc)
