"""Where the device check runs: on a GPU, or on the model of one that tests have.

This is the only place that knows the names of the backends, and the only one that may name the
fake device, which nothing shipped for use imports.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from headrace.backends.base import CopyTuning, Decoder
from headrace.backends.load import open_decoder
from headrace.bench.device.plan import SIZES, Kind, Sizes
from headrace.bench.rows import RowFile
from headrace.bench.stand import Stand, pairing_facts
from headrace.engine.device import Device
from headrace.geometry import Manifest
from headrace.runtime.worker import SourceHandle

CLAIM: Final = "device"
KEY: Final = ("device", "measure")
MODELS: Final = "models"
FAKE_MODULE: Final = "headrace.testing.fake_device"
FAKE_COPIES: Final = CopyTuning(1 << 20, 1 << 20, 4 << 20, 1 << 20)
"""What the fake device is fed with; nothing was measured."""


@dataclass(frozen=True)
class Place:
    """kind: what the rows call the device. folder: where all of the check's files are."""

    kind: Kind
    folder: Path
    share_device: bool = False

    @property
    def sizes(self) -> Sizes:
        return SIZES[self.kind]

    @property
    def source(self) -> str:
        """The CUDA source, as `--source` takes it."""
        return "cuda" if self.kind == "real" else f"{FAKE_MODULE}:open_source"

    @property
    def decoder(self) -> str:
        """The CUDA decoder, as `--decoder` takes it."""
        return "cuda" if self.kind == "real" else f"{FAKE_MODULE}:open_decoder"

    def open_device(self) -> Device:
        """The device itself. Raises: BackendUnavailable."""
        if self.kind == "real":
            from headrace.engine.cuda import open_device

            return open_device()
        return cast(Device, importlib.import_module(FAKE_MODULE).FakeDevice())

    def open_memory(self, manifest: Manifest, context: int, *, pinned: bool) -> Decoder:
        """A decoder that is device memory only, with one lane. Raises: Refused."""
        from headrace.backends.copy_probe import probe
        from headrace.backends.cuda_memory import CudaMemory

        device = self.open_device()
        copies = probe(device, pin=pinned).tuning if self.kind == "real" else FAKE_COPIES
        return CudaMemory(manifest, device, context=context, copies=copies, pins=pinned)

    def rows(self, step: str) -> RowFile:
        """The file that a step's rows go to, each with what the device is."""
        return PlaceRows(self.kind, self.folder / f"{step}.jsonl", step)

    def model(self, name: str) -> Path:
        """The directory of a random model that the models step makes."""
        return self.folder / MODELS / name

    def stand(
        self,
        directory: Path,
        context: int,
        *,
        source: str | None = None,
        dtype: str | None = None,
    ) -> Stand:
        """A source, by default on the device, and the CUDA decoder with one lane, on one model.

        Raises:
            Refused: memory is short. BackendUnavailable: there is no GPU. PeerDied: no source.
        """
        model = {"model": str(directory), "dtype": dtype or self.sizes.dtype}
        threads = self.sizes.threads if source else 1
        with ExitStack() as undo:
            handle = SourceHandle(source or self.source, {**model, "threads": threads}, num_slots=1)
            undo.callback(handle.close)
            handle.start()
            decoder = open_decoder(self.decoder, {**model, "lanes": 1, "context": context})
            undo.callback(decoder.close)
            stand = Stand(handle, decoder, context=context, facts=pairing_facts(decoder))
            undo.pop_all()
            return stand


class PlaceRows(RowFile):
    """Rows that all tell what the device is."""

    def __init__(self, kind: Kind, path: Path, step: str, key: Sequence[str] = KEY) -> None:
        super().__init__(path, CLAIM, key, settings={"step": step, "device": kind})
        self._kind = kind

    def append(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return super().append({"device": self._kind, **row})
