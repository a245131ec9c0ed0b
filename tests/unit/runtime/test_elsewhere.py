"""A call in another environment: what comes back, and every way in which it ends."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

from headrace import cli
from headrace.engine.capacity import MORE_MEMORY
from headrace.errors import BackendUnavailable, DeviceError, PeerDied, Refused
from headrace.process import ChildProcess
from headrace.runtime import elsewhere
from headrace.runtime.elsewhere import call
from headrace.server.stopping import ToldToStop, stoppable

HERE = "tests.unit.runtime.test_elsewhere"
Told = Callable[[Any], None]

pytestmark = pytest.mark.usefixtures("nothing_left")


def add(asked: dict[str, Any], told: Told) -> dict[str, Any]:
    print("a vendor's banner", flush=True)
    for number in asked["numbers"]:
        told({"number": number})
    return {"sum": sum(asked["numbers"]), "pid": os.getpid(), "text": "x" * asked.get("size", 0)}


def refuse(asked: dict[str, Any], told: Told) -> NoReturn:
    raise Refused("no such case\nat all", field="only")


def repeat(asked: dict[str, Any], told: Told) -> dict[str, Any]:
    return asked


class Failure(NamedTuple):
    """What is raised, and what `headrace` says of it."""

    exc: Exception
    said: str


FAILURES = {
    "refused": Failure(Refused("no such case\nat all"), "no such case at all"),
    "missing": Failure(
        BackendUnavailable("vendor", "sdk_missing", "import vendor", "none", "Install it"),
        "vendor: sdk_missing: import vendor: none. Install it",
    ),
    "device": Failure(DeviceError("the device is gone"), "the device is gone"),
    "full disk": Failure(
        OSError(errno.ENOSPC, "No space left on device", "rows"),
        "[Errno 28] No space left on device: 'rows'",
    ),
    "no directory": Failure(
        FileNotFoundError(errno.ENOENT, "No such file or directory", "/proc/nope"),
        "[Errno 2] No such file or directory: '/proc/nope'",
    ),
    "spelling": Failure(
        UnicodeEncodeError("ascii", "\u00e9", 0, 1, "ordinal not in range(128)"),
        "'ascii' codec can't encode character '\\xe9' in position 0: ordinal not in range(128)",
    ),
    "memory": Failure(MemoryError(), f"too little memory. {MORE_MEMORY}"),
}


def fail_as(asked: dict[str, Any], told: Told) -> NoReturn:
    raise FAILURES[asked["failure"]].exc


def break_down(asked: dict[str, Any], told: Told) -> NoReturn:
    raise ZeroDivisionError("what nobody expected")


def kill_itself(asked: dict[str, Any], told: Told) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave_a_holder(asked: dict[str, Any], told: Told) -> None:
    """End while a process that was forked here holds all descriptors open."""
    holder = os.fork()
    if holder == 0:
        signal.pause()
    told(holder)
    os._exit(3)


def held_back(asked: dict[str, Any], told: Told) -> list[int]:
    return [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]


def wait(asked: dict[str, Any], told: Told) -> NoReturn:
    told(os.getpid())
    while True:
        signal.pause()


def wait_and_answer(asked: dict[str, Any], told: Told) -> str:
    try:
        wait(asked, told)
    except KeyboardInterrupt:
        return "what there is"


def wait_stubbornly(asked: dict[str, Any], told: Told) -> NoReturn:
    told("here")
    while True:
        with suppress(KeyboardInterrupt):
            signal.pause()


class Dropped:
    """Waits in its finalizer, where Python drops what is raised."""

    def __init__(self, told: Told) -> None:
        self.told = told

    def __del__(self) -> None:
        self.told("before")
        signal.pause()


def lose_an_interrupt(asked: dict[str, Any], told: Told) -> str:
    Dropped(told)
    try:
        told("after")
    except KeyboardInterrupt:
        return "what there is"
    return "it was lost"


def there(name: str, asked: dict[str, Any] | None = None, told: Told = lambda value: None) -> Any:
    return call(sys.executable, f"{HERE}:{name}", asked or {}, told=told)


def interrupt(value: Any) -> None:
    signal.raise_signal(signal.SIGINT)


def test_it_is_called_there_and_its_answer_comes_back(capfd: pytest.CaptureFixture[str]) -> None:
    told: list[Any] = []
    answer = there("add", {"numbers": [1, 2, 3], "size": 300_000}, told.append)
    assert (answer["sum"], len(answer["text"])) == (6, 300_000)
    assert answer["pid"] != os.getpid()
    assert told == [{"number": 1}, {"number": 2}, {"number": 3}]
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("", "a vendor's banner\n")


def test_a_refusal_comes_back_as_one() -> None:
    with pytest.raises(Refused, match="no such case") as caught:
        there("refuse")
    assert caught.value.field == "only"


@pytest.mark.parametrize("failure", FAILURES)
def test_an_error_there_reads_as_one_here(
    failure: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the exit status and in the one sentence that the command line has for it."""
    found = []
    for does in (fail_as, lambda asked, told: there("fail_as", asked)):
        monkeypatch.setattr(cli, "app", lambda *_, does=does, **__: does({"failure": failure}, id))
        found.append((cli.run_command([]), *capfd.readouterr()))
    assert found[0] == found[1]
    assert found[0][2] == f"headrace: {FAILURES[failure].said}\n"


def test_much_is_asked_in_any_script() -> None:
    """An argument could hold no more than 128 KiB, and a JSON escape takes six bytes a letter."""
    asked = {"prompt": "\u4e00\U0001f300\x00\n" * 100_000, "numbers": list(range(100_000))}
    assert there("repeat", asked) == asked


def test_what_is_no_json_is_not_asked() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        there("repeat", {"path": object()})


@pytest.mark.parametrize(
    ("name", "how", "said"),
    [
        ("break_down", "exit status 1", "ZeroDivisionError: what nobody expected"),
        ("nothing", "exit status 1", "has no attribute 'nothing'"),
        ("kill_itself", "signal 9", ""),
    ],
)
def test_a_death_is_told(name: str, how: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PeerDied, match=how) as caught:
        there(name)
    assert sys.executable in str(caught.value)
    assert said in capfd.readouterr().err


def test_a_death_is_told_although_another_holds_what_it_had_open() -> None:
    holders: list[int] = []
    try:
        with pytest.raises(PeerDied, match="exit status 3"):
            there("leave_a_holder", told=holders.append)
    finally:
        for pid in holders:
            os.kill(pid, signal.SIGKILL)


def test_an_interrupt_lets_it_answer() -> None:
    assert there("wait_and_answer", told=interrupt) == "what there is"


def test_an_interrupt_that_nobody_answers_is_one() -> None:
    with pytest.raises(KeyboardInterrupt):
        there("wait", told=interrupt)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_that_its_caller_raises_of_ends_it_at_once() -> None:
    """As a server is stopped that checks what it is started with."""
    pids: list[int] = []

    def stop(pid: int) -> None:
        pids.append(pid)
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(ToldToStop), stoppable():
        there("wait_stubbornly", told=stop)
    assert not Path(f"/proc/{pids[0]}").exists()


def test_a_second_interrupt_ends_it_by_force() -> None:
    def interrupt_twice(value: Any) -> None:
        interrupt(value)
        interrupt(value)

    with pytest.raises(KeyboardInterrupt):
        there("wait_stubbornly", told=interrupt_twice)


def test_an_interrupt_that_python_drops_is_met_all_the_same(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert there("lose_an_interrupt", told=interrupt) == "what there is"
    assert "ignored in" in capfd.readouterr().err  # as Python says of one that it dropped


def test_a_terminals_interrupt_is_the_callers_alone() -> None:
    """It reaches both processes, and the function must meet one only."""

    def interrupt_both(pid: int) -> None:
        os.kill(pid, signal.SIGINT)
        interrupt(pid)

    assert there("wait_and_answer", told=interrupt_both) == "what there is"


def test_an_interrupt_before_it_ignores_them_ends_it_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It reaches both, as a terminal's does, before the child has run a line of ours."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, signal, sys\nif {elsewhere.MODULE!r} in sys.orig_argv:\n"
        "    os.kill(os.getppid(), signal.SIGINT)\n    os.kill(os.getpid(), signal.SIGINT)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(KeyboardInterrupt):
        there("wait")
    assert capfd.readouterr() == ("", "")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_signal_that_was_held_back_stays_so() -> None:
    """By a caller of ours, that is; the child takes it all the same."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        assert not {signal.SIGINT.value, signal.SIGTERM.value} & set(there("held_back"))
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_an_interrupt_after_its_answer_leaves_that(monkeypatch: pytest.MonkeyPatch) -> None:
    close = ChildProcess.close

    def close_and_interrupt(child: ChildProcess, grace_s: float = 0.0) -> None:
        close(child, grace_s)
        if grace_s:
            interrupt(None)

    monkeypatch.setattr(ChildProcess, "close", close_and_interrupt)
    assert there("repeat", {"an": "answer"}) == {"an": "answer"}


def test_it_ends_with_its_caller() -> None:
    code = (
        "import sys; from headrace.runtime.elsewhere import call; "
        f"call(sys.executable, '{HERE}:wait', {{}}, told=lambda pid: print(pid, flush=True))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        pidfd = os.pidfd_open(int(caller.stdout.readline()))
        try:
            caller.kill()
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            assert poll.poll(30_000), "it outlived its caller"
        finally:
            os.close(pidfd)


def test_another_interpreter_is_looked_at_first() -> None:
    with pytest.raises(Refused, match=r"'/nowhere/python' is missing .* give --other-python"):
        call("/nowhere/python", f"{HERE}:add", {}, flag="--other-python")
