"""What torch does to device memory, call by call: at once on the compute stream, or queued.

The compute stream does not lag: a call is carried out when it is made, after what its stream waits
for. That is the earliest that a device could, so a copy that should come first is shown missing. On
other streams calls are queued as copies are. Views are made at once: they touch nothing.

Where bytes go between the device and the host, the host waits, and that is counted: a value that is
read (`.item()`), a copy between device memory and an ordinary tensor, and a tensor that is brought
to the host by name (`.cpu()`, `.to("cpu")`), which is an ordinary one then. A tensor of the model
says that it is on the CPU, so `.to(other.device)` is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from headrace.errors import LocalProtocolError
from headrace.testing.fake.memory import at

Kernel = Callable[[], object]
Tensors = Sequence[torch.Tensor]

_READS_VALUES: Final = frozenset(
    f"aten::{name}"
    for name in ("item", "is_nonzero", "_local_scalar_dense", "equal", "nonzero", "masked_select")
)
"""Calls that give the host a value of the device, or need one for the shape of what they make."""


class Calls(Protocol):
    """What a device makes of calls."""

    def before(self, what: str, reads: Tensors, writes: Tensors) -> None:
        """The stream carries this out now."""

    def queue(self, what: str, run: Kernel, reads: Tensors, writes: Tensors) -> None:
        """The stream carries this out in its turn."""

    def made(self, tensor: torch.Tensor) -> None:
        """A call made this tensor on the stream."""

    def host_waits(self) -> None:
        """The host waits for all that the stream has, and goes on."""

    def is_device(self, tensor: torch.Tensor) -> bool:
        """Whether its storage is device memory."""


class ToHost(TorchFunctionMode):
    """Brings tensors of the device to the host where they are asked for by name."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_to_host(func, args, kwargs) or not self._calls.is_device(args[0]):
            return func(*args, **kwargs)
        with _disable_current_modes():  # what is carried out now is not queued once more
            self._calls.host_waits()
            self._calls.before(str(func), args[:1], ())
            return func(args[0].clone(), *args[1:], **kwargs)


class AtOnce(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Carries calls out as they are made."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        reads, writes = _touched(func, args, kwargs)
        if func.is_view:
            made = func(*args, **kwargs)
            if _is_view_of(made, reads + writes):
                return made
        if _host_waits(func, reads, writes, self._calls):
            self._calls.host_waits()
        self._calls.before(str(func), reads, writes)
        made = func(*args, **kwargs)
        held = {each.untyped_storage().data_ptr() for each in reads + writes}
        for each in _tensors((made,)):
            if each.untyped_storage().data_ptr() not in held:
                self._calls.made(each)
        return made


class Queued(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Queues calls: what they make has its shape at once, and its values when they ran."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls
        self._made: dict[int, torch.Tensor] = {}  # the allocator keeps these for their stream

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        reads, writes = _touched(func, args, kwargs)
        if func.is_view:
            made = func(*args, **kwargs)
            if _is_view_of(made, reads + writes):
                return made
        if _host_waits(func, reads, writes, self._calls):
            self._calls.host_waits()
        late_args = tuple(self._late(each) for each in args)
        late_kwargs = {name: self._late(each) for name, each in kwargs.items()}
        if writes:
            self._calls.queue(str(func), lambda: func(*late_args, **late_kwargs), reads, writes)
            return writes[0]
        made = func(*args, **kwargs)
        if not isinstance(made, torch.Tensor):
            raise LocalProtocolError(f"{func} cannot be queued by the fake device")
        self._calls.made(made)
        self._made[made.untyped_storage().data_ptr()] = made
        late_made = self._late(made)
        self._calls.queue(
            str(func), lambda: late_made.copy_(func(*late_args, **late_kwargs)), reads, [made]
        )
        return made

    def _late(self, argument: Any) -> Any:
        """The argument as it is when the call runs: device memory is not kept alive for that."""
        if isinstance(argument, list | tuple):
            return type(argument)(self._late(each) for each in argument)
        if not isinstance(argument, torch.Tensor) or not self._calls.is_device(argument):
            return argument
        storage = argument.untyped_storage()
        if storage.data_ptr() in self._made:
            return argument
        nbytes = storage.nbytes() - storage.nbytes() % argument.element_size()
        flat = torch.from_numpy(at(storage.data_ptr(), nbytes)).view(argument.dtype)
        return flat.as_strided(argument.shape, argument.stride(), argument.storage_offset())


class OnNoStream(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells of calls that touch device memory on no stream of ours: torch would take its own."""

    def __init__(self, tell: Callable[[str], None], calls: Calls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell = tell
        self._calls = calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        reads, writes = _touched(func, args, kwargs)
        if not func.is_view and any(self._calls.is_device(each) for each in reads + writes):
            self._tell(f"{func} touches device memory on no stream of this device")
        return func(*args, **kwargs)


def _is_to_host(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if func in (torch.Tensor.cpu, torch.Tensor.tolist):
        return True
    named = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, str)]
    return func is torch.Tensor.to and "cpu" in named


def _host_waits(func: Any, reads: Tensors, writes: Tensors, calls: Calls) -> bool:
    """Whether the host waits for a call."""
    name = func._schema.name
    if name in _READS_VALUES:
        return any(calls.is_device(each) for each in reads)
    if name != "aten::copy_":
        return False
    return len({calls.is_device(each) for each in (*reads, *writes) if each.numel()}) == 2


def _touched(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that a call reads, and those that it writes."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    schema = func._schema.arguments
    for at_, value in [*enumerate(args), *kwargs.items()]:
        argument = schema[at_] if isinstance(at_, int) else next(a for a in schema if a.name == at_)
        written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if written else reads).extend(_tensors((value,)))
    return reads, writes


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _is_view_of(made: Any, tensors: Sequence[torch.Tensor]) -> bool:
    held = {each.untyped_storage().data_ptr() for each in tensors}
    return all(each.untyped_storage().data_ptr() in held for each in _tensors((made,)))
