"""process_vm_readv: the kernel copies from one process's memory into the other's, once.

It needs the right to ptrace the source, which the source grants to the target alone where the
kernel asks for a grant (Yama).
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from .base import Peer, SourceEnd, TargetEnd

_PR_SET_PTRACER = 0x59616D61
_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
_libc.process_vm_readv.restype = ctypes.c_ssize_t


class _Stretch(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_libc.process_vm_readv.argtypes = [
    ctypes.c_int,
    ctypes.POINTER(_Stretch),
    ctypes.c_ulong,
    ctypes.POINTER(_Stretch),
    ctypes.c_ulong,
    ctypes.c_ulong,
]


class Source(SourceEnd):
    """Says where its bytes lie, and when."""

    def __init__(self, nbytes: int, peer: Peer, options: dict[str, Any]) -> None:
        super().__init__(nbytes, peer, options)
        _libc.prctl(_PR_SET_PTRACER, peer.hear(), 0, 0, 0)  # fails without Yama, where no one asks
        peer.tell([os.getpid(), self.memory.address])

    def send(self, nbytes: int) -> None:
        self.peer.tell()


class Target(TargetEnd):
    """Reads them out of the source's memory."""

    def __init__(self, nbytes: int, peer: Peer, options: dict[str, Any]) -> None:
        super().__init__(nbytes, peer, options)
        peer.tell(os.getpid())
        self._pid, self._origin = peer.hear()
        self._read(1)  # so that a missing right is told at the start

    def receive(self, nbytes: int) -> None:
        self.peer.hear()
        self._read(nbytes)

    def _read(self, nbytes: int) -> None:
        at = 0
        while at < nbytes:
            ours = _Stretch(self.memory.address + at, nbytes - at)
            theirs = _Stretch(self._origin + at, nbytes - at)
            got = _libc.process_vm_readv(
                self._pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0
            )
            if got <= 0:
                number = ctypes.get_errno()
                raise OSError(number, f"process_vm_readv: {os.strerror(number)}")
            at += got
