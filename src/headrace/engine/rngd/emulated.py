"""The vendor's kernels on the host's CPU: the same engine code, no card.

`TclModule` on CPU tensors runs a kernel by the vendor's own executor and changes its caches in
place. What this shows is the kernels' arithmetic and the engine's order of work. It shows nothing
of a card's speed, copies or streams.

That executor has two ways to take tensors that lie on several chips, and the signature tells which.
A kernel all of whose arguments say where they are placed takes and gives them as the model has
them, but leaves its caches as the chips store them. Any other takes and gives them as they are
stored. So a tensor here is held in either form, and made in the other when a kernel wants it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from headrace.engine.faults import raised_as
from headrace.engine.rngd import layout
from headrace.engine.rngd.executor import Finished, Program, Ticket
from headrace.engine.rngd.sdk import Sdk
from headrace.engine.rngd.signature import Tensor, read_signature
from headrace.errors import DeviceError, LocalProtocolError

CHANGED: Final = ("k_cache", "v_cache")
"""The arguments that kernels change in place."""


class EmulatedExecutor:
    """Implements `Executor`; each call returns when its work is done."""

    emulated = True

    def __init__(self, sdk: Sdk) -> None:
        self._sdk = sdk
        self._num_loaded = 0

    def load(self, kernel: Any) -> Program:
        self._num_loaded += 1
        return _CpuProgram(self._sdk.torch.TclModule(kernel), kernel.dsl)

    def place(self, tensor: Tensor, host: torch.Tensor) -> Held:
        layout.padded(tensor, host)  # refuses another shape or dtype
        return Held(tensor, whole=host.clone(memory_format=torch.contiguous_format))

    def zeros(self, tensor: Tensor) -> Held:
        dtype: torch.dtype = getattr(torch, tensor.dtype)
        return Held(tensor, stored=torch.zeros(tensor.stored, dtype=dtype))

    def read(
        self, tensor: Tensor, placed: Held, first: int, stop: int, target: torch.Tensor
    ) -> Ticket:
        target.copy_(placed.rows(first, stop))
        return Finished()

    def wait(self) -> None:
        pass

    def statistics(self) -> Mapping[str, int]:
        return {"kernels_loaded": self._num_loaded}

    def close(self) -> None:
        pass


class Held:
    """A tensor in one of its two forms, or in both: as the model has it, and as chips store it."""

    def __init__(
        self,
        tensor: Tensor,
        *,
        whole: torch.Tensor | None = None,
        stored: torch.Tensor | None = None,
    ) -> None:
        """One of the two is given."""
        self._tensor = tensor
        self._whole = whole
        self._stored = stored

    def whole(self) -> torch.Tensor:
        if self._whole is None and self._stored is not None:
            self._whole = layout.whole(self._tensor, self._stored)
        return self._given(self._whole)

    def stored(self) -> torch.Tensor:
        if self._stored is None and self._whole is not None:
            self._stored = layout.stored(self._tensor, self._whole)
        return self._given(self._stored)

    def rows(self, first: int, stop: int) -> torch.Tensor:
        """Rows of it as the model has it."""
        if self._whole is None and self._stored is not None:
            return layout.rows(self._tensor, self._stored, first, stop)
        return self.whole()[first:stop]

    def change(self, stored: torch.Tensor) -> None:
        """It has changed, and this is how chips store it now."""
        self._whole, self._stored = None, stored.reshape(self._tensor.stored)

    def _given(self, form: torch.Tensor | None) -> torch.Tensor:
        if form is None:
            raise LocalProtocolError(f"{self._tensor.name} is held in no form")
        return form


class _CpuProgram:
    def __init__(self, module: Any, dsl: str) -> None:
        self.signature = read_signature(dsl)
        self._module = module
        self._whole = all(argument.placed for argument in self.signature.arguments)

    def __call__(self, arguments: Sequence[Held]) -> Sequence[Held]:
        taken = self.signature.arguments
        given = [self._form(tensor, held) for tensor, held in zip(taken, arguments, strict=True)]
        with raised_as(self._failed):
            results: Sequence[torch.Tensor] = self._module(*given)
        for tensor, held, form in zip(taken, arguments, given, strict=True):
            if tensor.name in CHANGED:
                held.change(form)
        return [
            self._result(tensor, result)
            for tensor, result in zip(self.signature.results, results, strict=True)
        ]

    def _failed(self, told: str) -> DeviceError:
        return DeviceError(f"kernel {self.signature.name}: {told}")

    def _form(self, tensor: Tensor, held: Held) -> torch.Tensor:
        return held.whole() if self._whole else held.stored().reshape(tensor.squeezed)

    def _result(self, tensor: Tensor, result: torch.Tensor) -> Held:
        """What a result's memory holds: the shape that it comes with may claim the padded size."""
        shape = tensor.shape if self._whole else tensor.stored
        memory = torch.empty(0, dtype=result.dtype).set_(
            result.untyped_storage(), result.storage_offset(), (math.prod(shape),), (1,)
        )
        form = memory.reshape(shape)
        return Held(tensor, whole=form) if self._whole else Held(tensor, stored=form)
