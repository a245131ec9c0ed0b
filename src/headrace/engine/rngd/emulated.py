"""The vendor's kernels on the host's CPU: the same engine code, no card.

`TclModule` on CPU tensors runs a kernel by the vendor's own executor and changes its caches in
place. What this shows is the kernels' arithmetic and the engine's order of work. It shows nothing
of a card's speed, copies or streams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headrace.engine.rngd import layout
from headrace.engine.rngd.executor import Finished, Program, Ticket
from headrace.engine.rngd.sdk import Sdk
from headrace.engine.rngd.signature import Tensor, read_signature


class EmulatedExecutor:
    """Implements `Executor`; each call returns when its work is done."""

    emulated = True

    def __init__(self, sdk: Sdk) -> None:
        self._sdk = sdk
        self._num_loaded = 0

    def load(self, kernel: Any) -> Program:
        self._num_loaded += 1
        return _CpuProgram(self._sdk.torch.TclModule(kernel), kernel.dsl)

    def place(self, tensor: Tensor, host: torch.Tensor) -> torch.Tensor:
        return layout.stored(tensor, host)

    def zeros(self, tensor: Tensor) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, tensor.dtype)
        return torch.zeros(tensor.stored, dtype=dtype)

    def read(
        self, tensor: Tensor, placed: Any, first: int, stop: int, target: torch.Tensor
    ) -> Ticket:
        target.copy_(layout.rows(tensor, placed, first, stop))
        return Finished()

    def wait(self) -> None:
        pass

    def statistics(self) -> Mapping[str, int]:
        return {"kernels_loaded": self._num_loaded}

    def close(self) -> None:
        pass


class _CpuProgram:
    def __init__(self, module: Any, dsl: str) -> None:
        self.signature = read_signature(dsl)
        self._module = module

    def __call__(self, arguments: Sequence[Any]) -> Sequence[Any]:
        results: Sequence[Any] = self._module(*arguments)
        return results
