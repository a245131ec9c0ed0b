"""Which transports are measured, how each is set, and in whose environment it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import Refused


@dataclass(frozen=True)
class Transport:
    """One row's transport.

    module: of `ends`, or a file's path. family: whose environment it needs, empty = none. package:
    the distribution that is measured. settings: in words, for the row. restless: it uses the CPU
    while it waits, so that it must not stay open beside others. one_family: the source must be a
    child of the target.
    """

    name: str
    module: str
    copies: int
    settings: str
    family: str = ""
    package: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    restless: bool = False
    one_family: bool = False


HEADRACE = ("headrace-1-copy", "headrace-2-copy")
REFERENCE = "memcpy"
"""The reference measured as if it were a transport: what the noise of the run is."""


def _nixl(name: str, operation: str, *, tuned: bool) -> Transport:
    waits = "no progress thread, who waits sleeps 50 us between polls"
    return Transport(
        name,
        "nixl_dram",
        1,
        f"UCX {operation}, {waits if tuned else 'defaults, who waits polls without sleeping'}",
        family="nixl",
        package="nixl-cu12",
        options={
            "operation": operation,
            "progress_thread": not tuned,
            "poll_us": 50 if tuned else 0,
        },
        restless=not tuned,
    )


def _mooncake(name: str, settings: str, env: Mapping[str, str]) -> Transport:
    package = "mooncake-transfer-engine-non-cuda"
    return Transport(name, "mooncake_tcp", 2, settings, "mooncake", package, env=env)


def _torch_queue(name: str, settings: str, *, in_shared_memory: bool) -> Transport:
    return Transport(
        name,
        "torch_queue",
        1 if in_shared_memory else 2,
        settings,
        family="torch",
        package="torch",
        options={"in_shared_memory": in_shared_memory},
        one_family=True,
    )


PEERS = (
    Transport(REFERENCE, "within", 1, "4 MiB pieces within the target's process"),
    Transport("process_vm_readv", "process_vm", 1, "one call, by the target"),
    Transport(
        "unix-stream",
        "unix_stream",
        2,
        "sendall and recv_into, a send buffer of 1 MiB",
        options={"buffer_nbytes": 1 << 20},
    ),
    Transport("fresh-memfd", "fresh_memfd", 2, "a new segment for each request"),
    _nixl("nixl", "READ", tuned=False),
    _nixl("nixl-write", "WRITE", tuned=False),
    _nixl("nixl-tuned", "READ", tuned=True),
    _nixl("nixl-tuned-write", "WRITE", tuned=True),
    _mooncake("mooncake", "TCP, transfer_sync_write, defaults", {}),
    _mooncake("mooncake-tuned", "the same, slices of 4 MiB", {"MC_TCP_SLICE_SIZE": "4194304"}),
    Transport("gloo", "gloo", 2, "torch.distributed send and recv", "torch", "torch"),
    _torch_queue("torch-queue", "put of a private tensor", in_shared_memory=False),
    _torch_queue("torch-queue-shared", "put of a shared tensor", in_shared_memory=True),
    Transport("pyzmq", "zmq_ipc", 2, "ipc PAIR, copy=False, 4 MiB messages", "zmq", "pyzmq"),
)
NAMES = (*HEADRACE, *(peer.name for peer in PEERS))


def peers_named(names: Sequence[str]) -> list[Transport]:
    """The peers among `names`, in their order there. Raises: Refused for a name of none."""
    known = {peer.name: peer for peer in PEERS}
    for name in names:
        if name not in NAMES:
            raise Refused(f"no transport is called {name!r}; there are {', '.join(NAMES)}")
    return [known[name] for name in names if name in known]
