"""Slabs: what is shared, what is sealed, what outlives what, and each way to be refused."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import mmap
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import NoReturn

import pytest

from headrace import memory
from headrace.errors import Closed, Refused, RemoteProtocolError
from headrace.memory import SEALS, HugePages, Slab

MIB = 1 << 20
PAGE = mmap.PAGESIZE


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped(label: str) -> int:
    """How many mappings of the memfd `label` this process has."""
    return Path("/proc/self/maps").read_text().count(f"/memfd:{label} ")


def fail_with(number: int) -> object:
    def fail(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return fail


def sealed_memfd(nbytes: int, seals: int = SEALS) -> int:
    fd = os.memfd_create("headrace-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_both_sides_see_the_same_bytes() -> None:
    nbytes = 64 * MIB
    with Slab.create(nbytes) as owner, Slab.attach(os.dup(owner.fd), nbytes) as source:
        assert (owner.nbytes, source.nbytes) == (nbytes, nbytes)
        assert len(owner.view) == nbytes
        assert owner.view.format == "B"
        assert not owner.view.readonly
        assert bytes(owner.view[-4:]) == bytes(4)
        source.view[0:4] = b"head"
        owner.view[nbytes - 4 :] = b"race"
        assert bytes(owner.view[0:4]) + bytes(source.view[nbytes - 4 :]) == b"headrace"


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE + 1])
def test_a_size_need_not_be_whole_pages(nbytes: int) -> None:
    with Slab.create(nbytes) as owner, Slab.attach(os.dup(owner.fd), nbytes) as source:
        source.view[nbytes - 1] = 7
        assert owner.view[nbytes - 1] == 7


def test_offsets_above_two_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    # Sparse: what is tested is the arithmetic, not two GiB of memory.
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, _, nbytes: os.ftruncate(fd, nbytes))
    monkeypatch.setattr(memory, "_prefault", lambda *_: None)
    monkeypatch.setattr(memory, "require_memory", lambda *_: None)
    for nbytes in (2**31 + PAGE, 2**32 + PAGE):
        with Slab.create(nbytes) as owner, Slab.attach(os.dup(owner.fd), nbytes) as source:
            source.view[nbytes - 3 :] = b"end"
            assert bytes(owner.view[nbytes - 3 : nbytes]) == b"end"
            assert owner.view[nbytes - 3 - 2**31] == 0


def test_address_is_the_first_byte() -> None:
    with Slab.create(PAGE) as slab:
        slab.view[0:5] = b"first"
        assert ctypes.string_at(slab.address, 5) == b"first"


def test_memory_is_present_from_the_start_and_not_inherited_by_a_fork() -> None:
    nbytes = 4 * MIB
    with Slab.create(nbytes) as owner, Slab.attach(os.dup(owner.fd), nbytes) as source:
        for slab in (owner, source):
            smaps = Path("/proc/self/smaps").read_text().split(f"{slab.address:08x}-", 1)[1]
            resident = re.search(r"^Rss: +(\d+) kB", smaps, re.MULTILINE)
            flags = re.search(r"^VmFlags: (.*)$", smaps, re.MULTILINE)
            assert resident is not None
            assert flags is not None
            assert int(resident[1]) * 1024 == nbytes
            assert "dc" in flags[1].split()  # "do not copy" on fork


def test_neither_side_keeps_a_descriptor_it_does_not_need() -> None:
    before = open_fds()
    owner = Slab.create(PAGE)
    assert open_fds() == before + 1
    assert not os.get_inheritable(owner.fd)
    source = Slab.attach(os.dup(owner.fd), PAGE)
    assert open_fds() == before + 1
    with pytest.raises(Closed):
        _ = source.fd
    owner.close_fd()
    owner.close_fd()
    assert open_fds() == before
    with pytest.raises(Closed):
        _ = owner.fd
    source.view[0] = 9
    assert owner.view[0] == 9
    owner.close()
    source.close()


def test_seals_hold_in_another_process() -> None:
    script = (
        "import os, sys\n"
        "fd, nbytes = int(sys.argv[1]), int(sys.argv[2])\n"
        "for size in (0, nbytes - 1, nbytes + 1):\n"
        "    try: os.ftruncate(fd, size)\n"
        "    except PermissionError: print('refused')\n"
        "os.pwrite(fd, b'peer', 0)\n"
    )
    with Slab.create(8 * PAGE) as slab:
        done = subprocess.run(
            [sys.executable, "-c", script, str(slab.fd), str(slab.nbytes)],
            pass_fds=[slab.fd],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == ["refused"] * 3
        assert bytes(slab.view[0:4]) == b"peer"
        with pytest.raises(PermissionError):
            fcntl.fcntl(slab.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_close_twice_then_everything_says_closed() -> None:
    before = open_fds()
    slab = Slab.create(PAGE, "headrace-closed")
    assert mapped("headrace-closed") == 1
    slab.close()
    slab.close()
    assert open_fds() == before
    assert mapped("headrace-closed") == 0
    for read in (lambda: slab.view, lambda: slab.address, lambda: slab.fd):
        with pytest.raises(Closed):
            read()


def test_a_view_outlives_close() -> None:
    slab = Slab.create(PAGE, "headrace-outlived")
    slab.view[0:4] = b"kept"
    part = slab.view[0:4]
    slab.close()
    assert bytes(part) == b"kept"
    assert mapped("headrace-outlived") == 1
    del part
    assert mapped("headrace-outlived") == 0


def test_releasing_one_view_leaves_the_others() -> None:
    with Slab.create(PAGE) as slab:
        with slab.view as view:
            view[0] = 3
        assert slab.view[0] == 3


def test_a_tensor_outlives_close_and_holds_its_views() -> None:
    np = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")
    slab = Slab.create(4 * PAGE, "headrace-tensor")
    view = slab.view[PAGE : 2 * PAGE]
    tensor = torch.from_numpy(np.frombuffer(view, dtype=np.float32))
    tensor.fill_(1.5)
    view.release()
    slab.close()
    gc.collect()
    assert tensor.sum().item() == 1.5 * PAGE / 4
    del tensor
    gc.collect()
    assert mapped("headrace-tensor") == 0


def test_a_slab_dropped_open_warns_and_frees() -> None:
    before = open_fds()
    slab = Slab.create(PAGE)
    gone = weakref.ref(slab)
    with pytest.warns(ResourceWarning, match="dropped open"):
        del slab
    assert gone() is None
    assert open_fds() == before


@pytest.mark.parametrize("nbytes", [0, -1, True, 4096.0, "4096"])
def test_create_refuses_what_is_no_size(nbytes: int) -> None:
    with pytest.raises(Refused, match="positive number of bytes"):
        Slab.create(nbytes)


def test_create_refuses_more_than_there_is() -> None:
    with pytest.raises(Refused, match=r"needs 4611686018427387904 bytes .* bytes available"):
        Slab.create(2**62)


def test_create_says_when_python_has_no_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert not memory.memfd_supported()
    with pytest.raises(Refused, match=r"without os\.memfd_create"):
        Slab.create(PAGE)


def test_create_says_when_the_kernel_has_no_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.memfd_supported()
    monkeypatch.setattr(os, "memfd_create", fail_with(errno.ENOSYS))
    assert not memory.memfd_supported()
    with pytest.raises(Refused, match="memfd_create failed: Function not implemented"):
        Slab.create(PAGE)


def test_create_says_that_too_many_files_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", fail_with(errno.EMFILE))
    with pytest.raises(Refused, match="raise `ulimit -n`") as told:
        Slab.create(PAGE)
    assert "sandbox" not in str(told.value)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM])
def test_allocation_failure_names_both_numbers(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    before = open_fds()
    monkeypatch.setattr(os, "posix_fallocate", fail_with(number))
    with pytest.raises(Refused, match=rf"needs {PAGE} bytes .* \d+ bytes available"):
        Slab.create(PAGE)
    assert open_fds() == before


def test_sealing_failure_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_fds()
    monkeypatch.setattr(fcntl, "fcntl", fail_with(errno.EPERM))
    with pytest.raises(Refused, match="cannot seal"):
        Slab.create(PAGE)
    assert open_fds() == before


def test_mapping_failure_is_refused_and_closes_the_descriptor() -> None:
    fd = os.open("/dev/null", os.O_WRONLY)  # cannot be mapped
    with pytest.raises(Refused, match="cannot map a slab of 4096 bytes"):
        memory._map(fd, 4096)
    os.close(fd)


@pytest.mark.parametrize(
    ("advice", "number"),
    [
        (mmap.MADV_DONTFORK, errno.EINVAL),
        (memory.MADV_POPULATE_WRITE, errno.ENOMEM),
        (memory.MADV_POPULATE_WRITE, errno.EFAULT),
    ],
)
def test_advice_failure_is_refused(
    monkeypatch: pytest.MonkeyPatch, advice: int, number: int
) -> None:
    real = memory._madvise

    def madvise(address: int, nbytes: int, given: int) -> None:
        if given == advice:
            raise OSError(number, os.strerror(number))
        real(address, nbytes, given)

    with Slab.create(PAGE) as slab:
        before = open_fds()
        monkeypatch.setattr(memory, "_madvise", madvise)
        with pytest.raises(Refused, match=re.escape(os.strerror(number))):
            Slab.create(PAGE)
        with pytest.raises(Refused, match=re.escape(os.strerror(number))):
            Slab.attach(os.dup(slab.fd), PAGE)
        assert open_fds() == before


def test_an_old_kernel_touches_each_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MADV_POPULATE_WRITE", 0x7FFF)  # EINVAL from the kernel itself
    nbytes = 2 * MIB + 1
    with Slab.create(nbytes) as owner:
        owner.view[PAGE] = 5
        with Slab.attach(os.dup(owner.fd), nbytes) as source:
            assert source.view[PAGE] == 5
            smaps = Path("/proc/self/smaps").read_text().split(f"{source.address:08x}-", 1)[1]
            resident = re.search(r"^Rss: +(\d+) kB", smaps, re.MULTILINE)
            assert resident is not None
            assert int(resident[1]) * 1024 == nbytes - 1 + PAGE


@pytest.mark.parametrize("expected", [PAGE - 1, PAGE + 1, 0, -PAGE, 2**32 + PAGE, True])
def test_attach_refuses_another_size(expected: int) -> None:
    before = open_fds()
    with pytest.raises(RemoteProtocolError, match=f"has {PAGE} bytes, expected {expected}"):
        Slab.attach(sealed_memfd(PAGE), expected)
    assert open_fds() == before


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, SEALS & ~fcntl.F_SEAL_SEAL])
def test_attach_refuses_missing_seals(seals: int) -> None:
    before = open_fds()
    with pytest.raises(RemoteProtocolError, match=f"seals {seals:#x}, expected {SEALS:#x}"):
        Slab.attach(sealed_memfd(PAGE, seals), PAGE)
    assert open_fds() == before


def test_attach_refuses_what_is_no_memfd(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(bytes(PAGE))
    before = open_fds()
    with pytest.raises(RemoteProtocolError, match=r"cannot be sealed|seals 0x1, expected"):
        Slab.attach(os.open(plain, os.O_RDWR), PAGE)
    reader, writer = os.pipe()
    os.close(writer)
    with pytest.raises(RemoteProtocolError, match="has 0 bytes"):
        Slab.attach(reader, PAGE)
    assert open_fds() == before


def test_attach_refuses_a_file_without_seals_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = sealed_memfd(PAGE)
    monkeypatch.setattr(fcntl, "fcntl", fail_with(errno.EINVAL))
    with pytest.raises(RemoteProtocolError, match="cannot be sealed"):
        Slab.attach(fd, PAGE)


def test_hugepages_in_the_kernels_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_KERNEL_MM", tmp_path)
    monkeypatch.setattr(memory, "_NR_HUGEPAGES", tmp_path / "nr")
    assert memory.hugepages() == HugePages("absent", "absent", 0)
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    (tmp_path / "shmem_enabled").write_text("always within_size advise [never] deny force\n")
    (tmp_path / "nr").write_text("12\n")
    assert memory.hugepages() == HugePages("madvise", "never", 12)


def test_what_a_slab_holds() -> None:
    slab = Slab.create(8192)
    assert slab.statistics() == {"nbytes": 8192, "mapped": 1, "descriptors": 1}
    slab.close_fd()
    assert slab.statistics() == {"nbytes": 8192, "mapped": 1, "descriptors": 0}
    slab.close()
    assert slab.statistics() == {"nbytes": 8192, "mapped": 0, "descriptors": 0}


@pytest.mark.parametrize(
    ("of", "name", "number", "shortage"),
    [
        (os, "memfd_create", errno.EMFILE, True),
        (os, "memfd_create", errno.ENOSYS, False),
        (os, "posix_fallocate", errno.ENOSPC, True),
        (os, "posix_fallocate", errno.ENOMEM, True),
        (os, "posix_fallocate", errno.EFBIG, False),
        (memory, "_madvise", errno.ENOMEM, True),
        (memory, "_madvise", errno.EINVAL, False),
    ],
)
def test_what_is_short_just_now_is_told_from_a_mistake(
    monkeypatch: pytest.MonkeyPatch, of: object, name: str, number: int, shortage: bool
) -> None:
    monkeypatch.setattr(of, name, fail_with(number))
    with pytest.raises(Refused) as told:
        Slab.create(PAGE)
    assert told.value.shortage is shortage


def test_a_payload_that_cannot_be_written_is_a_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_fds()
    monkeypatch.setattr(os, "write", fail_with(errno.ENOSPC))
    with pytest.raises(Refused, match="cannot be written") as told:
        memory.memfd_with(b"payload")
    assert told.value.shortage
    assert open_fds() == before
