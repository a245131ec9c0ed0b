"""A call in another environment: what comes back, and every way in which it ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import pytest

from headrace.errors import BackendUnavailable, DeviceError, HeadraceError, PeerDied, Refused
from headrace.runtime.elsewhere import call

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


def lack(asked: dict[str, Any], told: Told) -> NoReturn:
    raise BackendUnavailable("vendor", "sdk_missing", "import vendor", "none", "Install it")


def fail(asked: dict[str, Any], told: Told) -> NoReturn:
    raise DeviceError("the device is gone")


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
    with pytest.raises(Refused, match=r"vendor: sdk_missing: import vendor: none\. Install it"):
        there("lack")


def test_a_failure_comes_back_as_one() -> None:
    with pytest.raises(HeadraceError, match="the device is gone") as caught:
        there("fail")
    assert not isinstance(caught.value, Refused)


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
