"""Where and when the figures of a recording were taken."""

from __future__ import annotations

import os
import platform

from headrace.telemetry.recording import Stamp
from headrace.version import VERSION


def stamp() -> Stamp:
    """Where and when figures were taken."""
    return {
        "headrace": VERSION,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "load_1min": os.getloadavg()[0],
        "clock": "host CLOCK_MONOTONIC",
    }
