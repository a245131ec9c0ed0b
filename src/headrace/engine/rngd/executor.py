"""Where kernels run and tensors lie: on the vendor's executor on the CPU, or on a card.

The layer loop is written against `Executor` and is the same on both. One thread uses an executor.
Work is carried out in the order in which it is asked for; a result may be passed on at once, and is
there for the host only when a `Ticket` says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from headrace.engine.rngd.signature import Signature, Tensor
from headrace.errors import BackendUnavailable


class Ticket(Protocol):
    """The proof that a read finished."""

    def done(self) -> bool:
        """Whether the bytes are there; raises DeviceError if they cannot come."""


class Finished:
    """The ticket of a read that was over when it was asked for."""

    def done(self) -> bool:
        return True


class Program(Protocol):
    """A kernel that is ready to run."""

    signature: Signature

    def __call__(self, arguments: Sequence[Any]) -> Sequence[Any]:
        """Run on placed tensors, in the signature's order; caches are changed in place."""


class Executor(Protocol):
    """Loads kernels, holds tensors for them and runs them; see the module's text.

    emulated: whether kernels run on the host's CPU.
    """

    emulated: bool

    def load(self, kernel: Any) -> Program:
        """Make a kernel ready, which on a card may mean to compile it for minutes.

        Raises:
            BackendUnavailable: it cannot be compiled here, or is not as the engine expects it.
        """

    def place(self, tensor: Tensor, host: torch.Tensor) -> Any:
        """A copy of `host` (of the tensor's `shape` and dtype) that programs can take."""

    def zeros(self, tensor: Tensor) -> Any:
        """As `place`, of zeros."""

    def read(
        self, tensor: Tensor, placed: Any, first: int, stop: int, target: torch.Tensor
    ) -> Ticket:
        """Begin to copy rows [first, stop) of the first axis of `shape` into host memory.

        target: of `shape` but for its first axis, contiguous; nobody may touch it until the ticket
        is done. What was asked for before is carried out before, what comes later may overtake.
        """

    def wait(self) -> None:
        """All that was asked for is carried out; raises DeviceError if it was not."""

    def statistics(self) -> Mapping[str, int]: ...

    def close(self) -> None: ...


def bind(signature: Signature, named: Mapping[str, Any]) -> list[Any]:
    """The arguments of a program in order, by name.

    Raises:
        BackendUnavailable: the kernel wants one that is not among `named`.
    """
    missing = [a.name for a in signature.arguments if a.name not in named]
    if missing:
        raise BackendUnavailable(
            "furiosa",
            "api_missing",
            f"kernel {signature.name}",
            f"it takes {', '.join(missing)}, which the engine does not know",
            "Use the version of furiosa-kernels that `headrace rngd setup` installs",
        )
    return [named[argument.name] for argument in signature.arguments]
