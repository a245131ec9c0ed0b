"""Preflight of no vendor in particular: what its child may do, and what is then known."""

from __future__ import annotations

import os
import select
import shlex
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import process
from headrace.engine import preflight
from headrace.engine.preflight import Told
from headrace.errors import BackendUnavailable
from headrace.version import VERSION
from tests.unit.engine.odd_preflight import MODULE, ODD, ODD_PREFLIGHT, SETUP, Asked


def unavailable(
    code: str = Asked().code, *, interpreter: str = sys.executable, timeout_s: float = 60.0
) -> BackendUnavailable:
    with pytest.raises(BackendUnavailable) as caught:
        ODD_PREFLIGHT.check(interpreter, Asked(code), timeout_s)
    assert caught.value.vendor == "odd"
    assert caught.value.detail
    assert caught.value.hint
    return caught.value


def script(path: Path, does: str) -> str:
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_all_is_well() -> None:
    told = ODD_PREFLIGHT.check(sys.executable, Asked(), 60.0)
    assert [(each.probe, each.state, each.detail) for each in told] == [
        ("headrace", "ok", VERSION),
        (ODD, "ok", "all is well"),
        ("last", "ok", "reached"),
    ]


@pytest.mark.parametrize(
    ("code", "stage", "probe", "detail", "hint"),
    [
        (
            "raise OSError('undefined symbol: x\\nmore')",
            *("driver_missing", ODD, "OSError: undefined symbol: x", "Load it"),
        ),
        (
            "from headrace.errors import BackendUnavailable\n"
            "raise BackendUnavailable('odd', 'no_device', 'count()', 'it is 0', 'Buy one')",
            *("no_device", "count()", "it is 0", "Buy one"),
        ),
        (
            "from headrace.errors import Refused\nraise Refused('x is 3; choose 4')",
            *("driver_missing", ODD, "x is 3; choose 4", "Load it"),
        ),
    ],
)
def test_a_probe_that_fails_is_a_typed_error(
    code: str, stage: str, probe: str, detail: str, hint: str
) -> None:
    exc = unavailable(code)
    assert (exc.stage, exc.probe, exc.detail, exc.hint) == (stage, probe, detail, hint)


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        ("import os; os._exit(3)", "the process ended with exit status 3"),
        ("import os; os._exit(0)", "the process ended with exit status 0"),
        (
            "import os; print('fatal: no luck', flush=True); os.abort()",
            "the process was ended by SIGABRT",
        ),
        (
            "import os, sys; sys.stderr.write('fatal: no luck\\n'); os.abort()",
            "the process was ended by SIGABRT, after: fatal: no luck",
        ),
        (
            "class Panic(BaseException): pass\nraise Panic('gone')",
            "the process ended with exit status 1, after: Panic: gone",
        ),
    ],
)
def test_what_the_child_died_at_is_known(code: str, detail: str) -> None:
    exc = unavailable(code)
    assert (exc.stage, exc.probe, exc.detail) == ("driver_missing", ODD, detail)
    command = exc.hint.split("`")[1]
    done = subprocess.run(shlex.split(command), capture_output=True, text=True)
    assert ODD in done.stdout.splitlines()  # the command of the hint shows the same
    assert "last" not in done.stdout


def test_a_child_that_dies_when_all_is_told_has_not_gone_well() -> None:
    """Whoever opens the same libraries may die like that too."""
    exc = unavailable("import atexit, os; atexit.register(os.abort); found = 'all is well'")
    assert (exc.stage, exc.probe) == ("no_device", "last")
    assert exc.detail == "the process was ended by SIGABRT"


def test_an_interpreter_that_is_none(tmp_path: Path) -> None:
    exc = unavailable(interpreter=str(tmp_path / "python"))
    assert (exc.stage, exc.hint) == ("sdk_missing", SETUP)
    assert exc.detail == "it cannot be run: No such file or directory"


def test_an_environment_without_headrace(tmp_path: Path) -> None:
    bare = script(tmp_path / "python", f'exec {sys.executable} -I -S "$@"')
    exc = unavailable(interpreter=bare)
    assert (exc.stage, exc.hint) == ("sdk_missing", "Install headrace there")
    assert exc.detail.startswith("the process ended with exit status 1, after:")


def test_a_program_that_says_nothing_is_no_environment(tmp_path: Path) -> None:
    """Whatever its exit status."""
    exc = unavailable(interpreter=script(tmp_path / "true", "exit 0"))
    assert (exc.stage, exc.detail) == ("sdk_missing", "the process ended with exit status 0")


def test_a_library_that_hangs_is_ended_and_named() -> None:
    """What it started in the background holds nobody up either."""
    exc = unavailable(
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(30)'])\n"
        "time.sleep(60)\n",
        timeout_s=2.0,
    )
    assert (exc.stage, exc.probe) == ("driver_missing", ODD)
    assert exc.detail == "it hung, and was ended after 2 s"


CHECK = f"""
import contextlib, sys
from headrace.errors import BackendUnavailable
from {MODULE} import ODD_PREFLIGHT, Asked
with contextlib.suppress(BackendUnavailable):
    ODD_PREFLIGHT.check(sys.executable, Asked(sys.argv[1]), float(sys.argv[2]))
"""


def died(pidfd: int) -> bool:
    """Whether a process ends before anybody would wait no longer."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    try:
        return bool(poll.poll(20_000))
    finally:
        os.close(pidfd)


@pytest.mark.parametrize(
    ("ends", "timeout_s"), [("time.sleep(100)", 2), ("raise OSError('x')", 60)]
)
def test_what_a_library_started_ends_with_the_child(
    tmp_path: Path, ends: str, timeout_s: int
) -> None:
    """Whether the child is ended or ends by itself."""
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    code = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen(['sh', '-c', 'echo $$ > {begun}; exec sleep 100'])\n{ends}\n"
    )
    with subprocess.Popen([sys.executable, "-c", CHECK, code, str(timeout_s)]) as starter:
        pidfd = os.pidfd_open(int(begun.read_text()))
        starter.wait()
        assert died(pidfd)


def test_the_child_does_not_outlive_its_starter(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    code = f"import os, time\nopen({str(begun)!r}, 'w').write(str(os.getpid()))\ntime.sleep(100)\n"
    with subprocess.Popen([sys.executable, "-c", CHECK, code, "60"]) as starter:
        pidfd = os.pidfd_open(int(begun.read_text()))
        starter.kill()
        assert died(pidfd)


def test_a_child_whose_starter_is_gone_already_ends() -> None:
    with subprocess.Popen(["true"]) as gone:
        pass
    done = subprocess.run(
        [sys.executable, "-m", MODULE],
        env={**os.environ, preflight.PARENT_PID_VARIABLE: str(gone.pid)},
        capture_output=True,
    )
    assert (done.returncode, done.stdout) == (preflight.ORPHAN_STATUS, b"")
    assert preflight.PARENT_PID_VARIABLE == process.PARENT_PID_VARIABLE
    assert preflight.ORPHAN_STATUS == process.ORPHAN_STATUS


def test_a_child_ends_by_itself_if_nobody_ends_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", MODULE, "--code=import time; time.sleep(60)", "--deadline=1"],
        capture_output=True,
    )
    assert done.returncode == -signal.SIGALRM
    assert done.stdout.decode().splitlines()[-1] == ODD


def test_no_backend_of_torch_loads_itself_in_a_child() -> None:
    code = "import os; found = os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD']"
    assert ODD_PREFLIGHT.check(sys.executable, Asked(code), 60.0)[1].detail == "0"
    command = [sys.executable, "-m", MODULE, f"--code={code}"]
    env = {name: text for name, text in os.environ.items() if "AUTOLOAD" not in name}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[3]) == (0, "  ok: 0")  # by hand too


def test_what_a_library_prints_is_no_report() -> None:
    code = "print('odd', end=''); print('{}'); print('[1]', end='', flush=True); found = 'well'"
    assert len(ODD_PREFLIGHT.check(sys.executable, Asked(code), 60.0)) == 3


def test_by_hand_it_prints_text() -> None:
    command = [sys.executable, "-m", MODULE, "--code=raise OSError('x')"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"headrace\n  ok: {VERSION}\n" in done.stdout
    assert done.stdout.endswith(f"{ODD}\n  driver_missing: OSError: x. Load it\n")


def test_a_headrace_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is told before what the vendor's packages did in it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, types\nother = types.ModuleType('headrace.version')\n"
        "other.VERSION = '0.0.9'\nsys.modules['headrace.version'] = other\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    exc = unavailable("import os; os.abort()")
    assert (exc.stage, exc.probe, exc.hint) == ("api_missing", "headrace", SETUP)
    assert exc.detail == f"the decoder's headrace is 0.0.9, and this one is {VERSION}"


def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    assert preflight._how(-60, 1.0) == "the process was ended by signal 60"


def test_a_probe_that_fails_is_the_last_in_process_too() -> None:
    assert list(ODD_PREFLIGHT.tell(Asked("raise KeyError('x')")))[2:] == [
        Told(ODD, "driver_missing", "begins"),
        Told(ODD, "driver_missing", "failed", "KeyError: 'x'", "Load it"),
    ]
