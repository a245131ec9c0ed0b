"""A source whose cells are finite values, so that a decoder can go on from them."""

from __future__ import annotations

import random
import zlib
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from headrace.backends.base import Cells
from headrace.backends.options import read_options
from headrace.backends.replay import ReplayEngine, ReplayOptions
from headrace.engine.checkpoint import fingerprint
from headrace.testing.elements import random_elements
from headrace.testing.sinks import GatedEngine

ENGINE: Final = f"{__name__}:open_gated"
FORGETFUL: Final = f"{__name__}:open_forgetful"
_NOISE_NBYTES: Final = 1 << 16


def open_gated(options: Mapping[str, Any]) -> GatedEngine:
    """Behind the FIFO at the path `gate`; the other options are those of replay."""
    rest = {name: value for name, value in options.items() if name != "gate"}
    return GatedEngine(DecodableEngine(rest), options["gate"])


def open_forgetful(options: Mapping[str, Any]) -> GatedEngine:
    """The same, which tells of cells of one part that it never wrote."""
    rest = {name: value for name, value in options.items() if name != "gate"}
    return GatedEngine(ForgetfulEngine(rest), options["gate"])


def options_for(model: Path, **geometry: Any) -> dict[str, Any]:
    """The options of a source for a checkpoint of this geometry."""
    return {"dtype": "float32", "model": fingerprint(model), **geometry}


class DecodableEngine(ReplayEngine):
    """Rows are stretches of noise, which begin where only this row and this prompt do."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(read_options(options, ReplayOptions, "replay"))
        noise = random_elements(self._options.dtype, _NOISE_NBYTES, random.Random(1))
        self._noise = memoryview(noise + noise)

    def _fill(self, cells: Cells, seed: int) -> None:
        nbytes_per_position = cells.region.row_nbytes // (cells.stop - cells.start)
        for number, row in enumerate(cells.rows()):
            key = zlib.crc32(array("Q", [seed, cells.layer, cells.part, number]).tobytes())
            at = (4 * key + cells.start * nbytes_per_position) % _NOISE_NBYTES
            row[:] = self._noise[at : at + len(row)]


class ForgetfulEngine(DecodableEngine):
    """Leaves out the values of layer 2."""

    def _fill(self, cells: Cells, seed: int) -> None:
        if (cells.layer, cells.part) != (2, 1):
            super()._fill(cells, seed)


def prompt_of(seed: int, num_tokens: int) -> Sequence[int]:
    """A prompt that differs with `seed`."""
    return [(seed * 7 + at * 3) % 31 + 1 for at in range(num_tokens)]
