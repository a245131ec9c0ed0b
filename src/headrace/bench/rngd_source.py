"""The RNGD engine with its own account of each prompt, for `headrace bench rngd`.

It runs in the vendor's environment. What a stage took is the host's time in the calls of its
kernels: all of their work where they are emulated, and next to nothing of it on a card.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from headrace.backends import rngd
from headrace.backends.base import PrefillSink
from headrace.geometry import Manifest

STAGES: Final = ("first", "attention", "mid", "last")


def open(options: Mapping[str, Any]) -> StagedEngine:
    """The engine of all options but `stages`, which names the file that the account goes to."""
    rest = dict(options)
    path = Path(rest.pop("stages"))
    return StagedEngine(rngd.open(rest), path)


class StagedEngine:
    """Appends one line for each prompt that ended well: the ns of its stages."""

    def __init__(self, engine: rngd.RngdEngine, path: Path) -> None:
        self._engine, self._path = engine, path

    def manifest(self) -> Manifest:
        return self._engine.manifest()

    def prefill_stream(self, tokens: Sequence[int], sink: PrefillSink, start: int = 0) -> None:
        before = self._engine.statistics()
        self._engine.prefill_stream(tokens, sink, start)
        after = self._engine.statistics()
        took = {stage: after[f"{stage}_ns"] - before[f"{stage}_ns"] for stage in STAGES}
        with self._path.open("a") as file:
            file.write(json.dumps(took) + "\n")

    def close(self) -> None:
        self._engine.close()
