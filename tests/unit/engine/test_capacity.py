"""What memory is said to be there, and what is refused for want of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.engine import capacity
from headrace.errors import Refused


class Host:
    """A made-up /proc and cgroup tree that the module reads instead of this machine's."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.meminfo = root / "meminfo"
        self.own = root / "cgroup"
        self.root = root / "fs"
        self.meminfo.write_text("MemTotal: 900 kB\nMemAvailable:   800 kB\nCached: 1 kB\n")
        monkeypatch.setattr(capacity, "_MEMINFO", self.meminfo)
        monkeypatch.setattr(capacity, "_OWN_CGROUP", self.own)
        monkeypatch.setattr(capacity, "_CGROUP_ROOT", self.root)

    def v2(self, path: str, limit: str, used: int, inactive: int = 0) -> None:
        level = self.root / path
        level.mkdir(parents=True, exist_ok=True)
        (level / "memory.max").write_text(f"{limit}\n")
        (level / "memory.current").write_text(f"{used}\n")
        (level / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")

    def v1(self, path: str, limit: int, used: int, inactive: int = 0) -> None:
        level = self.root / "memory" / path
        level.mkdir(parents=True, exist_ok=True)
        (level / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (level / "memory.usage_in_bytes").write_text(f"{used}\n")
        (level / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {inactive}\n")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def test_available_without_cgroups_is_mem_available(host: Host) -> None:
    assert capacity.available_nbytes() == 800 * 1024
    host.own.write_text("3:cpu,cpuacct:/box\n1:name=systemd:/\n")
    assert capacity.available_nbytes() == 800 * 1024


def test_available_is_the_tightest_level_of_v2(host: Host) -> None:
    host.own.write_text("0::/pod/box\n")
    host.v2("pod/box", "max", 5000)
    assert capacity.available_nbytes() == 800 * 1024
    host.v2("pod", "9000", 5000)
    assert capacity.available_nbytes() == 4000
    host.v2("pod", "9000", 5000, inactive=1500)
    assert capacity.available_nbytes() == 5500
    host.v2("pod/box", "6000", 7000)
    assert capacity.available_nbytes() == 0


def test_available_in_a_container_that_sees_a_host_path(host: Host) -> None:
    host.own.write_text("0::/../../host/only\n")
    host.v2(".", "7000", 1000)
    assert capacity.available_nbytes() == 6000


def test_available_is_the_tightest_level_of_v1(host: Host) -> None:
    host.own.write_text("4:memory:/box\n0::/\n")
    host.v1(".", 2**63 - 4096, 1)
    assert capacity.available_nbytes() == 800 * 1024
    host.v1("box", 9000, 5000, inactive=500)
    assert capacity.available_nbytes() == 4500


def test_available_refuses_to_guess(host: Host) -> None:
    host.meminfo.write_text("MemTotal: 900 kB\n")
    with pytest.raises(Refused, match="no MemAvailable"):
        capacity.available_nbytes()


def test_require_memory_keeps_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "available_nbytes", lambda: capacity.MEMORY_MARGIN_NBYTES + 100)
    capacity.require_memory(100, "pool")
    with pytest.raises(Refused, match=r"pool: needs 101 bytes and a margin of \d+, \d+ bytes"):
        capacity.require_memory(101, "pool")


def test_this_machine_has_memory() -> None:
    assert 0 < capacity.available_nbytes() < 2**50


def test_the_total_is_what_the_smallest_limit_leaves(host: Host) -> None:
    assert capacity.total_nbytes() == 900 * 1024
    host.own.write_text("0::/pod/box\n")
    host.v2("pod/box", "max", 5000)
    assert capacity.total_nbytes() == 900 * 1024
    host.v2("pod", "9000", 5000)
    assert capacity.total_nbytes() == 9000
    host.own.write_text("4:memory:/box\n")
    host.v1("box", 7000, 1)
    host.v1("", 1 << 63, 1)
    assert capacity.total_nbytes() == 7000
    host.meminfo.write_text("MemAvailable: 800 kB\n")
    with pytest.raises(Refused, match="has no MemTotal"):
        capacity.total_nbytes()


def test_what_the_host_has_and_not_now_is_a_shortage(host: Host) -> None:
    margin_kib = capacity.MEMORY_MARGIN_NBYTES // 1024
    host.meminfo.write_text(f"MemTotal: {margin_kib + 8} kB\nMemAvailable: {margin_kib + 2} kB\n")
    for kib, shortage in ((3, True), (8, True), (9, False)):
        with pytest.raises(Refused) as told:
            capacity.require_memory(kib * 1024, "pool")
        assert told.value.shortage is shortage
    host.own.write_text("0::/box\n")
    host.v2("box", str((margin_kib + 4) * 1024), 0)
    with pytest.raises(Refused) as told:  # it is larger than its container
        capacity.require_memory(5 * 1024, "pool")
    assert not told.value.shortage
