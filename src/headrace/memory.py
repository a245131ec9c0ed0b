"""Slabs: sealed memfd mappings that an owner shares with one source, by descriptor, never by name.

Three facts shape this file. A memfd has no name, so nothing is left behind whoever is killed, and
it is not bounded by the size of /dev/shm. `posix_fallocate` turns "no memory" into an error at
start instead of a SIGBUS at the first touch, and the seals keep the other side from truncating the
file under a mapping. And a mapping must outlive every view of it: `mmap.close()` refuses only while
a *buffer* is exported, and some consumers (`torch.frombuffer`, `np.ndarray(buffer=...)`) keep a
reference but no buffer, so that closing pulls the memory from under them. Therefore nothing here
ever closes a mapping: `Slab.close` drops its reference, and the interpreter unmaps when the last
view is gone.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from headrace.engine.capacity import MORE_MEMORY, available_nbytes, require_memory
from headrace.errors import SHORTAGES, Closed, Refused, RemoteProtocolError

MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_KERNEL_MM = Path("/sys/kernel/mm/transparent_hugepage")
_NR_HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # x86 and Arm; the mmap module may not name them
_MAP_FAILED = ctypes.c_void_p(-1).value


class Slab:
    """One shared mapping of `nbytes` bytes: `create` it in the owner, `attach` it in the source.

    Build tensors over it as `torch.from_numpy(np.frombuffer(slab.view[a:b], dtype=...))`: that
    chain holds a buffer of its own, so that neither `close` nor the `release()` of a view takes its
    memory away. Never use `torch.frombuffer` or `np.ndarray(buffer=...)`: they hold the view object
    alone, whose `release()` may unmap what they read.
    """

    def __init__(self, mapping: mmap.mmap, nbytes: int, fd: int | None) -> None:
        self.nbytes = nbytes
        self._mapping: mmap.mmap | None = mapping
        self._address = _address_of(mapping)
        self._fd = fd

    @classmethod
    def create(cls, nbytes: int, label: str = "headrace-slab") -> Slab:
        """Make, allocate, seal, map and pre-fault a slab; the bytes are zero.

        `label` is what /proc/PID/maps shows and names nothing else. The descriptor is
        close-on-exec: it reaches a source only when it is passed on purpose.

        Raises: Refused when `nbytes` is no positive int, when memory is short, or when the kernel
        has no sealable memfd.
        """
        if not _is_size(nbytes):
            raise Refused(f"a slab needs a positive number of bytes as an int, got {nbytes!r}")
        require_memory(nbytes, label)
        fd = _memfd(label)
        try:
            _allocate(fd, nbytes, label)
            _seal(fd)
            return cls(_map(fd, nbytes), nbytes, fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> Slab:
        """Map and pre-fault the slab behind `fd`, which is closed here whatever happens.

        Raises: RemoteProtocolError when the file is not a sealed memfd of exactly `nbytes` bytes;
        Refused when it cannot be mapped here.
        """
        try:
            _check_sealed(fd, nbytes)
            return cls(_map(fd, nbytes), nbytes, None)
        finally:
            os.close(fd)

    @property
    def fd(self) -> int:
        """The owner's descriptor, to pass to one source. Raises: Closed once it is given up."""
        if self._fd is None:
            raise Closed("the slab's descriptor is closed on this side")
        return self._fd

    @property
    def view(self) -> memoryview:
        """A fresh writable view of all `nbytes` bytes (format B). Raises: Closed."""
        return memoryview(self._open_mapping())

    @property
    def address(self) -> int:
        """Address of the first byte here; good while the slab is open. Raises: Closed."""
        self._open_mapping()
        return self._address

    def statistics(self) -> dict[str, int]:
        """Its bytes, and whether mapping and descriptor are still held here (0 or 1)."""
        return {
            "nbytes": self.nbytes,
            "mapped": int(self._mapping is not None),
            "descriptors": int(self._fd is not None),
        }

    def close_fd(self) -> None:
        """Give up the descriptor and keep the mapping; once more is harmless."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)

    def close(self) -> None:
        """Drop this object's hold; the memory goes with its last view. Once more is harmless."""
        self._mapping = None
        self.close_fd()

    def close_aside(self) -> None:
        """As `close`, in a thread that does nothing else: unmapping holds its caller up.

        It takes some 0.4 s a GiB, in the kernel and without the interpreter's lock.
        """
        last = [self._mapping]
        self.close()
        threading.Thread(target=last.clear, name="headrace-unmap", daemon=True).start()

    def _open_mapping(self) -> mmap.mmap:
        if self._mapping is None:
            raise Closed(f"the slab of {self.nbytes} bytes is closed")
        return self._mapping

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._mapping is not None:
            self.close()
            text = f"slab of {self.nbytes} bytes dropped open"
            warnings.warn(text, ResourceWarning, stacklevel=2, source=self)


def _is_size(nbytes: object) -> bool:
    return isinstance(nbytes, int) and not isinstance(nbytes, bool) and nbytes > 0


def _memfd(label: str) -> int:
    advice = "Shared slabs need Linux 3.17 or newer and a sandbox that allows memfd_create"
    try:
        return os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except AttributeError as error:
        raise Refused(f"this Python was built without os.memfd_create. {advice}") from error
    except OSError as error:
        if error.errno == errno.EMFILE:
            advice = "This process has all the files open that it may; raise `ulimit -n`"
        raise Refused(
            f"memfd_create failed: {error.strerror}. {advice}", shortage=error.errno in SHORTAGES
        ) from error


def _allocate(fd: int, nbytes: int, label: str) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        remedy = "Raise `ulimit -f`" if error.errno == errno.EFBIG else MORE_MEMORY
        raise Refused(
            f"{label}: needs {nbytes} bytes of shared memory, {available_nbytes()} bytes available "
            f"({error.strerror}). {remedy}",
            shortage=error.errno in SHORTAGES,
        ) from error


def _seal(fd: int) -> None:
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError as error:
        raise Refused(
            f"cannot seal a slab: {error.strerror}. Allow fcntl(F_ADD_SEALS) in the sandbox"
        ) from error


def _check_sealed(fd: int, nbytes: int) -> None:
    size = os.fstat(fd).st_size
    if not _is_size(nbytes) or size != nbytes:
        raise RemoteProtocolError(f"slab descriptor has {size} bytes, expected {nbytes!r}")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise RemoteProtocolError(f"slab descriptor cannot be sealed: {error.strerror}") from error
    if seals & SEALS != SEALS:
        raise RemoteProtocolError(f"slab descriptor has seals {seals:#x}, expected {SEALS:#x}")


def _map(fd: int, nbytes: int) -> mmap.mmap:
    try:
        mapping = _map_without_descriptor(fd, nbytes)
        address = _address_of(mapping)
        # A vendor runtime that forks must not carry the slab into a process that nobody watches.
        _madvise(address, nbytes, mmap.MADV_DONTFORK)
        _prefault(mapping, address, nbytes)
    except OSError as error:
        raise Refused(
            f"cannot map a slab of {nbytes} bytes: {error.strerror}. "
            "Check `ulimit -v` and free memory",
            shortage=error.errno in SHORTAGES,
        ) from error
    return mapping


def _map_without_descriptor(fd: int, nbytes: int) -> mmap.mmap:
    """Map `fd` shared and writable, held by an mmap object that owns no descriptor.

    `mmap.mmap(fd, ...)` keeps a duplicate of `fd` for as long as it lives (`trackfd=False` is
    Python 3.13), and a process forked later would hold the slab's memory through it. So an
    anonymous mapping gives the object and the address, and the file takes its place; the object
    unmaps the range when it dies.
    """
    placeholder = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    mapping = mmap.mmap(-1, nbytes, flags=placeholder)
    address = _address_of(mapping)
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc.mmap(address, nbytes, access, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) == _MAP_FAILED:
        raise _os_error()
    return mapping


def _prefault(mapping: mmap.mmap, address: int, nbytes: int) -> None:
    try:
        _madvise(address, nbytes, MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _touch_pages(mapping)


def _touch_pages(mapping: mmap.mmap) -> None:
    # Reading maps them, since the file is allocated; writing could undo a write of the peer's.
    bytes(memoryview(mapping)[:: mmap.PAGESIZE])


def _madvise(address: int, nbytes: int, advice: int) -> None:
    # Not mapping.madvise(): it holds the interpreter lock for the seconds that a large slab takes.
    if _libc.madvise(address, nbytes, advice) != 0:
        raise _os_error()


def _os_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def _address_of(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def memfd_with(payload: bytes | memoryview, label: str = "headrace-payload") -> int:
    """A new memfd's descriptor that holds `payload`, to be passed and closed. Raises: Refused."""
    fd = _memfd(label)
    try:
        view = memoryview(payload).cast("B")
        while view:
            view = view[os.write(fd, view) :]
    except OSError as error:
        os.close(fd)
        raise Refused(
            f"{label}: cannot be written ({error.strerror}). {MORE_MEMORY}",
            shortage=error.errno in SHORTAGES,
        ) from error
    return fd


def memfd_supported() -> bool:
    """Whether this kernel and this Python give sealable memfds."""
    try:
        os.close(_memfd("headrace-probe"))
    except Refused:
        return False
    return True


@dataclass(frozen=True)
class HugePages:
    """The host's huge page settings as the kernel words them; "absent" where it has none."""

    anonymous: str
    shared: str
    num_reserved: int


def hugepages() -> HugePages:
    """Read the settings that decide how fast a slab is first touched; changes nothing."""
    reserved = _NR_HUGEPAGES.read_text() if _NR_HUGEPAGES.exists() else "0"
    anonymous, shared = _chosen(_KERNEL_MM / "enabled"), _chosen(_KERNEL_MM / "shmem_enabled")
    return HugePages(anonymous, shared, int(reserved))


def _chosen(setting: Path) -> str:
    """The bracketed word of a sysfs choice such as `always [madvise] never`."""
    text = setting.read_text() if setting.exists() else "[absent]"
    return text.partition("[")[2].partition("]")[0]
