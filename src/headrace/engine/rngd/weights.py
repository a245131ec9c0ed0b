"""Reading a checkpoint's tensors without the model's own library.

Bytes are mapped, not read: a tensor takes memory when it is converted or placed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import torch

from headrace.engine.checkpoint import TensorEntry, tensor_entries
from headrace.errors import Refused

DTYPES: Final[dict[str, torch.dtype]] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}


class Weights:
    """The tensors of a directory of safetensors files, by name."""

    def __init__(self, directory: Path, stand_ins: Mapping[str, str]) -> None:
        """stand_ins: by the name of a tensor that may be missing, the one that is used for it.

        Raises:
            Refused: there are no such files, or one is malformed.
        """
        self._directory = directory
        self._entries = {entry.name: entry for entry in tensor_entries(directory)}
        self._stand_ins = stand_ins
        self._files: dict[Path, np.memmap] = {}

    def tensor(self, name: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """A tensor as a kernel takes it; 32 and 16 bit floats are converted to each other.

        Raises:
            Refused: the checkpoint has none of this name, of another shape, or of a kind that a
                kernel for `dtype` cannot take.
        """
        entry = self._entries.get(name) or self._entries.get(self._stand_ins.get(name, ""))
        if entry is None:
            raise Refused(f"{self._directory} has no tensor {name!r}", field="model")
        wanted: torch.dtype = getattr(torch, dtype)
        have = DTYPES.get(entry.dtype)
        quantised = torch.float8_e4m3fn
        if have is None or (have == quantised) != (wanted == quantised):
            raise Refused(
                f"{self._directory}: tensor {name!r} is {entry.dtype}, and the kernels for this "
                f"model take {dtype}",
                field="model",
            )
        if _squeezed(entry.shape) != _squeezed(shape):
            raise Refused(
                f"{self._directory}: tensor {name!r} is {entry.shape}, its config says {shape}",
                field="model",
            )
        return self._mapped(entry, have).reshape(shape).to(wanted)

    def _mapped(self, entry: TensorEntry, dtype: torch.dtype) -> torch.Tensor:
        if entry.file not in self._files:
            # Copy on write: torch takes only arrays that could be written.
            self._files[entry.file] = np.memmap(entry.file, dtype=np.uint8, mode="c")
        flat = self._files[entry.file][entry.start : entry.end]
        if entry.start % 2 or entry.start % torch.empty(0, dtype=dtype).element_size():
            flat = flat.copy()
        return torch.from_numpy(flat).view(dtype)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
