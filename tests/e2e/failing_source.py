"""Torch sources that fail or die in their prefill, as often as a file has bytes."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.backends import torch as torch_backend
from headrace.backends.base import PrefillSink
from headrace.backends.torch import TorchEngine

VARIABLE = "HEADRACE_TEST_FAILS"


class FailingEngine(TorchEngine):
    """Takes a byte off the file, and fails at the second layer."""

    def prefill_stream(self, tokens: Sequence[int], sink: PrefillSink, start: int = 0) -> None:
        left = Path(os.environ[VARIABLE])
        faults = left.read_text()
        left.write_text(faults[1:])
        if faults[:1] == "k":
            os.kill(os.getpid(), signal.SIGKILL)
        if faults[:1] == "r":
            raise RuntimeError("the card overheated")
        super().prefill_stream(tokens, sink, start)


def open(options: Mapping[str, Any]) -> FailingEngine:
    """The factory that `--source` names."""
    engine = torch_backend.open(options)
    assert engine._model is not None
    return FailingEngine(engine._model, engine.manifest().max_positions)
