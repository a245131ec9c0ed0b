"""Children: real ones, spawned, killed, stopped, orphaned; nothing is left of any of them."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, NoReturn

import pytest

import headrace.errors
from headrace import process
from headrace.errors import Closed, DeviceError, LocalProtocolError, Refused, WouldBlock
from headrace.process import PARENT_PID_VARIABLE, ChildProcess

# The child waits until its parent closes the pipe, so that each test decides when it ends.
CHILD = """
import os, signal, sys
from headrace.process import die_with_parent, leave_ending_to_parent

mode, ready, hold = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
die_with_parent()
if mode == "stubborn":
    leave_ending_to_parent()
os.write(ready, str(os.getpid()).encode())
os.close(ready)
os.read(hold, 1)
while mode == "stubborn":
    signal.pause()
sys.exit(3)
"""

# Spawns the child above, tells the test, and lives until it is killed.
PARENT = """
import signal, sys
from headrace.process import ChildProcess

ready, hold = int(sys.argv[1]), int(sys.argv[2])
child = ChildProcess.spawn("hr_child", ["plain", str(ready), str(hold)], inherit=[ready, hold])
signal.pause()
"""

ENVIRONMENT = """
import json, os, sys

fds = []
for fd in range(3, 64):
    try:
        os.fstat(fd)
        fds.append(fd)
    except OSError:
        pass
os.write(int(sys.argv[1]), json.dumps([dict(os.environ), fds, sys.argv[2:]]).encode())
print("on standard output")
print("on standard error", file=sys.stderr)
"""


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def wait_dead(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(10_000))


def fail_with(number: int) -> object:
    def fail(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return fail


class Nursery:
    """Writes the child modules, spawns them and knows when they are ready."""

    def __init__(self, root: Path) -> None:
        for name, text in (("child", CHILD), ("parent", PARENT), ("environment", ENVIRONMENT)):
            (root / f"hr_{name}.py").write_text(text)
        source = Path(headrace.errors.__file__).parents[1]
        self.env = {"PYTHONPATH": f"{root}{os.pathsep}{source}"}
        self.ready, self._ready_far = os.pipe()
        self._hold_far, self.hold = os.pipe()

    def spawn(self, mode: str = "plain") -> ChildProcess:
        far = [self._ready_far, self._hold_far]
        child = ChildProcess.spawn("hr_child", [mode, *map(str, far)], inherit=far, env=self.env)
        assert int(os.read(self.ready, 16)) == child.pid
        return child

    def spawn_parent(self) -> tuple[ChildProcess, int]:
        """A parent process and the pid of the child that it has spawned."""
        far = [self._ready_far, self._hold_far]
        parent = ChildProcess.spawn("hr_parent", list(map(str, far)), inherit=far, env=self.env)
        return parent, int(os.read(self.ready, 16))

    def let_go(self) -> None:
        os.write(self.hold, b".")

    def close(self) -> None:
        for fd in (self.ready, self._ready_far, self._hold_far, self.hold):
            os.close(fd)


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    before = open_fds()
    made = Nursery(tmp_path)
    yield made
    made.close()
    assert open_fds() == before


def no_zombie(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_a_child_ends_by_itself(nursery: Nursery) -> None:
    with nursery.spawn() as child:
        assert not child.died()
        assert not child.wait(-1.0)
        assert child.exit_status() is None
        with pytest.raises(WouldBlock, match=f"child {child.pid} is alive"):
            child.reap()
        nursery.let_go()
        assert child.wait(10.0)
        assert child.died()
        assert child.exit_status() == 3
        assert (child.reap(), child.reap()) == (3, 3)
        child.kill()  # reaped: nothing to do
        child.terminate()
    assert child.exit_status() == 3


def test_what_is_known_of_a_child(nursery: Nursery) -> None:
    child = nursery.spawn()
    assert child.statistics() == {"pid": child.pid, "alive": 1, "watched": 1}
    child.kill()
    assert child.wait(10.0)
    assert child.statistics() == {"pid": child.pid, "alive": 0, "watched": 1}
    child.close()
    assert child.statistics() == {"pid": child.pid, "alive": 0, "watched": 0}


def test_close_waits_for_an_orderly_exit(nursery: Nursery) -> None:
    child = nursery.spawn()
    nursery.let_go()
    child.close(10.0)
    assert child.exit_status() == 3
    assert no_zombie(child.pid)


def test_a_closed_child_is_gone_and_says_so(nursery: Nursery) -> None:
    before = open_fds()
    child = nursery.spawn()
    assert open_fds() == before + 1
    assert not os.get_inheritable(child.fileno())
    child.close()
    child.close()
    assert open_fds() == before
    assert no_zombie(child.pid)
    assert child.died()
    assert child.wait(0.0)
    assert child.exit_status() == -signal.SIGKILL
    for use in (child.fileno, child.kill, child.terminate):
        with pytest.raises(Closed):
            use()


def test_terminate(nursery: Nursery) -> None:
    with nursery.spawn() as child:
        child.terminate()
        assert child.wait(10.0)
        assert child.exit_status() == -signal.SIGTERM


def test_the_pidfd_wakes_a_selector_when_the_child_is_killed(nursery: Nursery) -> None:
    with nursery.spawn() as child:
        poll = select.poll()
        poll.register(child, select.POLLIN)
        assert poll.poll(0) == []
        os.kill(child.pid, signal.SIGKILL)
        assert poll.poll(10_000) == [(child.fileno(), select.POLLIN)]
        assert child.exit_status() == -signal.SIGKILL


def test_what_a_group_is_sent_is_left_to_the_parent(nursery: Nursery) -> None:
    """Nothing but its parent ends such a child, which `close` kills after the grace."""
    child = nursery.spawn("stubborn")
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(child.pid, number)
    child.terminate()
    nursery.let_go()
    child.close(0.01)
    assert child.exit_status() == -signal.SIGKILL
    assert no_zombie(child.pid)


def test_what_such_a_process_starts_ends_on_sigterm() -> None:
    """An engine's own child, which its vendor ends so."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(each) for each in numbers]
    try:
        process.leave_ending_to_parent()
        os.kill(os.getpid(), signal.SIGTERM)
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as own:
            own.terminate()
            assert own.wait(10.0) == -signal.SIGTERM
    finally:
        for each, was in zip(numbers, before, strict=True):
            signal.signal(each, was)


def test_close_kills_a_stopped_child(nursery: Nursery) -> None:
    child = nursery.spawn()
    os.kill(child.pid, signal.SIGSTOP)
    stopped = os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert stopped is not None
    assert not child.died()  # stopped is not dead
    child.close(0.01)
    assert child.exit_status() == -signal.SIGKILL
    assert no_zombie(child.pid)


def test_an_interrupt_during_the_grace_still_ends_the_child(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = ChildProcess.wait

    def interrupted(self: ChildProcess, timeout_s: float) -> bool:
        if timeout_s == 0.01:
            raise KeyboardInterrupt
        return wait(self, timeout_s)

    child = nursery.spawn()
    monkeypatch.setattr(ChildProcess, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        child.close(0.01)
    assert child.exit_status() == -signal.SIGKILL
    assert no_zombie(child.pid)


def test_a_child_that_sigkill_does_not_end_stays_watched(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = nursery.spawn()
    with monkeypatch.context() as driver:
        driver.setattr(process, "KILL_WAIT_S", 0.01)
        driver.setattr(signal, "pidfd_send_signal", lambda *_: None)
        with pytest.raises(DeviceError, match=f"child {child.pid} is alive"):
            child.close()
    assert child.fileno() >= 0
    assert not child.died()
    child.close()
    assert no_zombie(child.pid)


def test_a_killed_parent_takes_its_child_along(nursery: Nursery) -> None:
    parent, grandchild = nursery.spawn_parent()
    pidfd = os.pidfd_open(grandchild)
    with parent:
        parent.kill()
        assert parent.wait(10.0)
        assert wait_dead(pidfd)
    os.close(pidfd)


def test_a_stopped_grandchild_dies_with_its_parent(nursery: Nursery) -> None:
    parent, grandchild = nursery.spawn_parent()
    pidfd = os.pidfd_open(grandchild)
    os.kill(grandchild, signal.SIGSTOP)
    with parent:
        parent.kill()
        assert wait_dead(pidfd)
    os.close(pidfd)


def test_the_end_of_the_spawning_thread_counts_as_the_parents_death(nursery: Nursery) -> None:
    # Why `spawn` asks for a long-lived thread: the kernel means the thread, not the process.
    children: list[ChildProcess] = []
    thread = threading.Thread(target=lambda: children.append(nursery.spawn()))
    thread.start()
    thread.join()
    with children[0] as child:
        assert child.wait(10.0)
        assert child.exit_status() == -signal.SIGKILL


def test_spawn_from_busy_threads_with_a_held_lock(nursery: Nursery) -> None:
    stop = threading.Event()
    lock = threading.Lock()

    def spin() -> None:
        while not stop.is_set():
            sum(range(100))

    threads = [threading.Thread(target=spin) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        with lock, nursery.spawn() as child:
            assert not child.died()
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def seen_by_child(
    nursery: Nursery, stderr: IO[bytes] | int | None, env: Mapping[str, str]
) -> tuple[dict[str, str], list[int], list[str]]:
    import json

    reader, writer = os.pipe()
    with ChildProcess.spawn(
        "hr_environment",
        [str(writer), "--flag", "two words"],
        inherit=[writer],
        env={**nursery.env, **env},
        stderr=stderr,
    ) as child:
        os.close(writer)
        with open(reader, "rb") as report:
            environ, fds, arguments = json.loads(report.read())
        assert child.wait(10.0)
        assert child.exit_status() == 0
        assert [fd for fd in fds if fd != writer] == []
    return environ, fds, arguments


def test_what_a_child_gets(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_TEST_PASSED_ON", "yes")
    stray, far = os.pipe()
    os.set_inheritable(stray, True)
    with open(tmp_path / "stderr", "wb") as stderr:
        environ, fds, arguments = seen_by_child(nursery, stderr, {PARENT_PID_VARIABLE: "1"})
    assert stray not in fds
    assert arguments == ["--flag", "two words"]
    assert environ["HEADRACE_TEST_PASSED_ON"] == "yes"
    assert environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
    assert environ[PARENT_PID_VARIABLE] == str(os.getpid())
    assert environ["PYTHONPATH"] == nursery.env["PYTHONPATH"]
    output = (tmp_path / "stderr").read_text()
    assert "on standard output" in output
    assert "on standard error" in output
    os.close(stray)
    os.close(far)


def test_output_goes_to_standard_error_by_default(
    nursery: Nursery, capfd: pytest.CaptureFixture[str]
) -> None:
    environ, _, _ = seen_by_child(nursery, None, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"})
    assert environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "1"
    out, err = capfd.readouterr()
    assert out == ""
    assert "on standard output" in err
    assert "on standard error" in err


def test_the_environment_is_optional() -> None:
    with ChildProcess.spawn("this", [], stderr=subprocess.DEVNULL) as child:
        assert child.wait(10.0)
        assert child.exit_status() == 0


def test_a_pipe_nobody_reads_is_our_mistake() -> None:
    with pytest.raises(LocalProtocolError, match="not PIPE"):
        ChildProcess.spawn("this", [], stderr=subprocess.PIPE)


def test_a_missing_interpreter_is_refused_by_name(tmp_path: Path) -> None:
    plain = tmp_path / "python"
    plain.write_text("not executable")
    for interpreter in ("/nowhere/bin/python", str(plain), str(tmp_path), ""):
        with pytest.raises(Refused, match="missing or not executable") as refusal:
            ChildProcess.spawn("this", [], interpreter=interpreter)
        assert repr(interpreter) in str(refusal.value)
        assert refusal.value.field == "interpreter"


def test_an_interpreter_that_cannot_run_is_refused(tmp_path: Path) -> None:
    before = open_fds()
    garbage = tmp_path / "python"
    garbage.write_bytes(b"\x7fELF but not really")
    garbage.chmod(0o755)
    with pytest.raises(Refused, match=r"cannot run .*Exec format error"):
        ChildProcess.spawn("this", [], interpreter=str(garbage))
    assert open_fds() == before


def test_another_interpreter_runs(tmp_path: Path) -> None:
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    with ChildProcess.spawn("this", [], interpreter=str(link), stderr=subprocess.DEVNULL) as child:
        assert child.wait(10.0)
        assert child.exit_status() == 0


def test_a_child_that_cannot_be_watched_is_not_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = open_fds()
    started: list[int] = []

    def pidfd_open(pid: int) -> int:
        started.append(pid)
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    with pytest.raises(Refused, match="pidfd_open: Function not implemented"):
        ChildProcess.spawn("this", [], stderr=subprocess.DEVNULL)
    assert no_zombie(started[0])
    assert open_fds() == before


@pytest.mark.parametrize(
    ("of", "name", "number", "shortage"),
    [
        *((subprocess, "Popen", each, True) for each in sorted(process._REMEDIES)),
        (subprocess, "Popen", errno.ENOEXEC, False),
        (os, "pidfd_open", errno.EMFILE, True),
        (os, "pidfd_open", errno.ENOSYS, False),
    ],
)
def test_what_is_short_just_now_is_told_from_a_mistake(
    monkeypatch: pytest.MonkeyPatch, of: object, name: str, number: int, shortage: bool
) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(of, name, fail)
    with pytest.raises(Refused) as told:
        ChildProcess.spawn("this", [], stderr=subprocess.DEVNULL)
    assert told.value.shortage is shortage


def test_a_child_dropped_open_warns(nursery: Nursery) -> None:
    before = open_fds()
    child = nursery.spawn()
    child.kill()
    assert child.wait(10.0)
    child.reap()
    with pytest.warns(ResourceWarning, match=f"child {child.pid} dropped open"):
        del child
    assert open_fds() == before


@pytest.fixture
def prctl(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Calls of prctl, recorded instead of made: this process is not to die with its parent."""
    calls: list[int] = []

    class Recorder:
        def prctl(self, *arguments: int) -> int:
            calls.extend(arguments)
            return 0

    monkeypatch.setattr(process, "_libc", Recorder())
    return calls


def test_die_with_parent_asks_for_sigkill(
    prctl: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PARENT_PID_VARIABLE, str(os.getppid()))
    process.die_with_parent()
    assert prctl == [1, signal.SIGKILL, 0, 0, 0]


@pytest.mark.usefixtures("prctl")
def test_an_orphan_exits_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Exited(BaseException):
        pass

    def leave(status: int) -> NoReturn:
        raise Exited(status)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setenv(PARENT_PID_VARIABLE, str(os.getpid()))  # nobody is its own parent
    with pytest.raises(Exited, match=str(process.ORPHAN_STATUS)):
        process.die_with_parent()
    assert f"parent {os.getpid()} is gone" in capfd.readouterr().err


def test_an_orphan_really_exits(nursery: Nursery) -> None:
    environment = {**os.environ, **nursery.env, PARENT_PID_VARIABLE: "1"}
    done = subprocess.run(
        [sys.executable, "-m", "hr_child", "plain", "1", "0"], env=environment, capture_output=True
    )
    assert done.returncode == process.ORPHAN_STATUS
    assert b"parent 1 is gone" in done.stderr


@pytest.mark.parametrize("value", [None, "", "x", "-1"])
def test_die_with_parent_needs_a_spawner(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv(PARENT_PID_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(PARENT_PID_VARIABLE, value)
    with pytest.raises(LocalProtocolError, match=PARENT_PID_VARIABLE):
        process.die_with_parent()


def test_a_kernel_that_will_not_tie_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def prctl(self, *_: int) -> int:
            return -1

    monkeypatch.setattr(process, "_libc", Refusing())
    monkeypatch.setenv(PARENT_PID_VARIABLE, str(os.getppid()))
    with pytest.raises(Refused, match="PR_SET_PDEATHSIG"):
        process.die_with_parent()
