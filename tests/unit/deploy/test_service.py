"""The systemd unit: what it starts, how it stops it, and that systemd reads it."""

from __future__ import annotations

import inspect
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli import MISTAKE
from headrace.cli.serve import ServeOptions
from headrace.server.config import HttpConfig
from headrace.server.config_file import read_config
from headrace.server.decoders import CLOSE_GRACE_S, CLOSE_WITHIN_S
from headrace.server.spans import SpanListener

DEPLOY = Path(__file__).parents[3] / "deploy"
UNIT = DEPLOY / "headrace.service"
END_S = 20.0  # after `drain_timeout_s`, as docs/operate.md promises


def settings() -> dict[str, str]:
    lines = [line for line in UNIT.read_text().splitlines() if "=" in line and line[0] != "#"]
    found = [line.partition("=") for line in lines]
    assert len({name for name, _, _ in found}) == len(found)
    return {name: value for name, _, value in found}


def test_it_starts_the_server_by_flags_that_there_are() -> None:
    words = shlex.split(settings()["ExecStart"])
    assert words[1] == "serve"
    flags = {word.removeprefix("--").replace("-", "_") for word in words if word[:2] == "--"}
    assert flags <= set(ServeOptions.__dataclass_fields__)
    assert settings()["Type"] == "exec"  # the server sends systemd no notice


def test_it_waits_longer_than_a_drain_takes() -> None:
    """Of the default and of the example that it is installed with."""
    longest = max(
        HttpConfig().drain_timeout_s, read_config(DEPLOY / "headrace.toml").http.drain_timeout_s
    )
    assert float(settings()["TimeoutStopSec"]) > longest + END_S
    assert settings()["KillMode"] == "mixed"  # owners and sources are the server's to end
    assert settings()["KillSignal"] == "SIGTERM"


def test_the_end_has_a_bound() -> None:
    """From the end of a drain: the owners side by side, then connections, then spans."""
    wire = pytest.importorskip("headrace.server.wire")
    spans_s = inspect.signature(SpanListener.close).parameters["timeout_s"].default
    assert CLOSE_GRACE_S < CLOSE_WITHIN_S
    assert CLOSE_WITHIN_S + wire.LAST_WORDS_S + wire.LAST_READ_S + spans_s < END_S


def test_what_a_restart_does_not_mend_is_not_restarted() -> None:
    assert settings()["Restart"] == "on-failure"
    assert settings()["RestartPreventExitStatus"] == str(MISTAKE)
    assert settings()["OOMPolicy"] == "continue"


def test_hardening_leaves_what_headrace_needs() -> None:
    given = settings()
    assert given["DynamicUser"] == "yes"
    assert given["CapabilityBoundingSet"] == ""
    assert "MemoryDenyWriteExecute" not in given
    assert "ProcSubset" not in given
    assert set(given["RestrictAddressFamilies"].split()) == {"AF_UNIX", "AF_INET", "AF_INET6"}
    cache = f"/var/cache/{given['CacheDirectory']}"
    assert given["Environment"].split() == [
        f"HEADRACE_CACHE={cache}",
        f"HF_HOME={cache}/huggingface",
    ]


def test_every_control_socket_of_the_example_is_in_its_directory() -> None:
    directory = Path("/run") / settings()["RuntimeDirectory"]
    for decoder in read_config(DEPLOY / "headrace.toml").decoders:
        assert decoder.control is not None
        assert Path(decoder.control).parent == directory


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze here")
def test_systemd_reads_it(tmp_path: Path) -> None:
    """With this Python for the program, which is not installed here."""
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/headrace/bin/headrace", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert (done.returncode, said) == (0, [])


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze here")
def test_its_filter_lets_the_calls_through_that_headrace_makes() -> None:
    done = subprocess.run(
        ["systemd-analyze", "syscall-filter"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    sets: dict[str, list[str]] = {}
    members: list[str] = []
    for line in done.stdout.splitlines():
        if line.startswith("@"):  # a set; its members are indented
            members = sets.setdefault(line.strip(), [])
        elif line.strip() and not line.strip().startswith("#"):
            members.append(line.strip())
    allowed: set[str] = set()
    waiting = [settings()["SystemCallFilter"]]
    while waiting:
        for each in sets.get(waiting.pop(), []):
            if each.startswith("@"):
                waiting.append(each)
            allowed.add(each)
    needed = {"memfd_create", "pidfd_open", "pidfd_send_signal", "fallocate", "prctl", "socketpair"}
    assert needed <= allowed
