"""A call made in another environment, by a child that ends with this process.

`call` starts `INTERPRETER -m headrace.runtime.elsewhere`, which imports `module:function` and calls
it as `function(asked, told)`. What is asked, told meanwhile and returned is JSON, and crosses on
descriptors of its own: whatever the function or a vendor's library prints goes to standard error.

A terminal sends its interrupt to both processes. The child is started with it held back and then
ignores it, and the caller asks it once to end, by SIGTERM, which the function meets as a
KeyboardInterrupt: so it can still return what it has. What it tells after that raises it again,
since Python drops one that meets it in a finalizer. A second interrupt ends the child by force.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from typing import Any, Final, NamedTuple

from headrace.engine.capacity import MORE_MEMORY
from headrace.errors import BackendUnavailable, Closed, HeadraceError, PeerDied, Refused
from headrace.process import ChildProcess, die_with_parent
from headrace.runtime.interpreters import check_interpreter

MODULE: Final = "headrace.runtime.elsewhere"
END_WITHIN_S: Final = 30.0
"""How long a child may take to exit that has answered."""

_READ_NBYTES: Final = 1 << 16

Told = Callable[[Any], None]


class _Call(NamedTuple):
    """One that runs. reader: what the child says; interrupted: filled by the first interrupt."""

    child: ChildProcess
    reader: int
    interrupted: list[int]


def call(
    interpreter: str,
    target: str,
    asked: Mapping[str, Any],
    *,
    told: Told = lambda value: None,
    flag: str = "--decoder-python",
) -> Any:
    """Call `target`, a `module:function`, as `function(asked, told)` in another environment.

    told: is called here with what the function gives its own. flag: names another interpreter.
    Call it from the main thread, which interrupts reach.

    Raises:
        Refused: the interpreter cannot run headrace; or what the function refused or found missing.
        HeadraceError: what else of headrace's it raised, or met of the system's, by its text.
        PeerDied: it died, of an error that it said on standard error or without a word.
        KeyboardInterrupt: it was interrupted and returned nothing.
    """
    check_interpreter(interpreter, flag)
    with _started(interpreter, target, asked) as (child, reader, interrupted):
        for what, value in _said(child, reader):
            if what == "told":
                told(value)
            else:
                child.close(END_WITHIN_S)
                return _ended(what, value)
        if interrupted:
            raise KeyboardInterrupt
        raise PeerDied(_death(child, interpreter))


@contextmanager
def _started(interpreter: str, target: str, asked: Mapping[str, Any]) -> Iterator[_Call]:
    """The child, which is gone when the block is left; interrupts are taken from its start on."""
    with ExitStack() as stack:
        with _held_back(), _written(asked) as question:
            reader, writer = os.pipe()
            stack.callback(os.close, reader)
            with open(writer, "wb"):  # the child's end is the only one then
                child = ChildProcess.spawn(
                    MODULE,
                    [f"--tell={writer}", f"--call={target}", f"--asked={question}"],
                    interpreter=interpreter,
                    inherit=[writer, question],
                )
            stack.enter_context(child)
            interrupted = stack.enter_context(_interrupts(child))
        yield _Call(child, reader, interrupted)


@contextmanager
def _held_back() -> Iterator[None]:
    """Hold signals back, in this thread and in what it starts: none ends a child that does not
    heed them yet, and none comes between a child and its being known here.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _written(asked: Mapping[str, Any]) -> Iterator[int]:
    """A descriptor to read what is asked from: an argument may have no more than 128 KiB."""
    with open(os.memfd_create("headrace-asked"), "wb") as file:
        file.write(json.dumps(asked).encode())
        file.flush()
        yield file.fileno()


@contextmanager
def _interrupts(child: ChildProcess) -> Iterator[list[int]]:
    """Has the first interrupt ask the child to end; yields what is filled by then."""
    interrupted: list[int] = []

    def on_interrupt(number: int, frame: object) -> None:
        if interrupted:
            raise KeyboardInterrupt
        interrupted.append(number)
        with suppress(Closed):  # it has answered
            child.terminate()

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or another's
        yield interrupted
        return
    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _said(child: ChildProcess, reader: int) -> Iterator[tuple[str, Any]]:
    """What the child says, until it is gone; one that it left behind may hold the pipe open."""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    poll.register(child.fileno(), select.POLLIN)
    pending = b""
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if reader not in ready:
            return
        chunk = os.read(reader, _READ_NBYTES)
        if not chunk:
            return
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            what, value = json.loads(line)
            yield what, value


def _ended(what: str, value: Any) -> Any:
    """What the function returned, or raise what it raised."""
    if what == "returned":
        return value
    if what == "interrupted":
        raise KeyboardInterrupt
    text, field = value
    if what == "refused":
        raise Refused(text, field=field)
    raise HeadraceError(text)


def _death(child: ChildProcess, interpreter: str) -> str:
    child.wait(END_WITHIN_S)
    status = child.exit_status()
    how = f"exit status {status}" if status is None or status >= 0 else f"signal {-status}"
    return f"the process that {interpreter} ran died ({how}); what it said is above"


def main(arguments: Sequence[str] | None = None) -> int:
    """The child's side; exit status 0: what came of it was told."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    interrupted: list[int] = []

    def on_end(number: int, frame: object) -> None:
        interrupted.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, on_end)
    parser = argparse.ArgumentParser(prog=MODULE)
    parser.add_argument("--tell", type=int, required=True)
    parser.add_argument("--call", required=True)
    parser.add_argument("--asked", type=int, required=True)
    parsed = parser.parse_args(arguments)
    os.set_inheritable(parsed.tell, False)  # what is started here must not hold it open
    with open(parsed.tell, "wb") as file:

        def tell(what: str, value: Any) -> None:
            file.write(json.dumps([what, value], default=str).encode() + b"\n")
            file.flush()

        def told(value: Any) -> None:
            if interrupted:
                raise KeyboardInterrupt
            tell("told", value)

        tell(*_outcome(parsed.call, _read(parsed.asked), told))
    return 0


def _read(descriptor: int) -> dict[str, Any]:
    """What is asked, from its beginning: its offset is shared with whoever wrote it."""
    with open(descriptor, "rb") as file:
        file.seek(0)
        asked: dict[str, Any] = json.load(file)
    return asked


def _outcome(target: str, asked: dict[str, Any], told: Told) -> tuple[str, Any]:
    """What came of the call, as `_ended` takes it; failures in the words of the command line."""
    module, _, name = target.partition(":")
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # one held back is met here
        return "returned", getattr(import_module(module), name)(asked, told)
    except KeyboardInterrupt:
        return "interrupted", None
    except (Refused, BackendUnavailable) as exc:
        return "refused", [str(exc), exc.field if isinstance(exc, Refused) else ""]
    except MemoryError:
        return "failed", [f"too little memory. {MORE_MEMORY}", ""]
    except (HeadraceError, OSError, UnicodeError) as exc:
        return "failed", [str(exc), ""]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
