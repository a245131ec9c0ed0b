"""`headrace serve` as a child process: started from a config, watched from outside, ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final, Self

from headrace.errors import HeadraceError

START_WITHIN_S: Final = 600.0
END_WITHIN_S: Final = 90.0
_KEPT_LINES: Final = 200


class ServerFailed(HeadraceError):
    """The server did not start, come to rest or end as it should; the text tells what it said."""


class Served:
    """One server; leaving the block ends it with SIGTERM and checks that it exits with 0.

    url: where it listens. pid: of the server's own process.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-bench-")
        path = Path(self._folder.name, "headrace.toml")
        path.write_text(toml(config))
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._told = threading.Event()
        self.url = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headrace", "serve", "--config", str(path)],
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._told.wait(START_WITHIN_S) or not self.url:
            self.kill()
            raise ServerFailed(f"the server did not start: {self.said()}")

    def said(self) -> str:
        """The last of what it printed."""
        return " / ".join(list(self._lines)[-5:])

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """End it.

        Raises:
            ServerFailed: it exits with another status than 0, or not at all.
        """
        if self.alive:
            self._process.terminate()
        try:
            status = self._process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerFailed(f"the server did not end on SIGTERM: {self.said()}") from None
        self._drop()
        if status != 0:
            raise ServerFailed(f"the server exited with {status}: {self.said()}")

    def kill(self) -> None:
        """End it at once; its owners and sources die with it."""
        self._process.kill()
        self._process.wait()
        self._drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()

    def _read(self) -> None:
        for line in _stderr(self._process):
            self._lines.append(line.rstrip())
            if line.startswith("headrace: ready: "):
                self.url = line.split()[2].partition("/v1")[0]
                self._told.set()
        self._told.set()

    def _drop(self) -> None:
        self._reader.join()
        _stderr(self._process).close()
        self._folder.cleanup()


def memory_of(pid: int) -> dict[str, int]:
    """A process's resident bytes, those of them that are its own alone, and its descriptors."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return {
        "rss_nbytes": 1024 * int(fields["VmRSS"].split()[0]),
        "anon_nbytes": 1024 * int(fields["RssAnon"].split()[0]),
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
    }


def parent_of(pid: int) -> int:
    """The pid of a process's parent; 0 if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[1])


def toml(config: Mapping[str, Any]) -> str:
    """A config as TOML: tables of values, and lists of tables, which may nest."""
    return "\n".join(_tables(config, "")) + "\n"


def _tables(table: Mapping[str, Any], place: str) -> list[str]:
    lines, nested = [], []
    for key, value in table.items():
        inner = f"{place}.{key}" if place else key
        if isinstance(value, list) and value and isinstance(value[0], dict):
            for each in value:
                nested += [f"[[{inner}]]", *_tables(each, inner)]
        elif isinstance(value, Mapping) and not place:
            nested += [f"[{inner}]", *_tables(value, inner)]
        else:
            lines.append(f"{key} = {_value(value)}")
    return lines + nested


def _value(value: Any) -> str:
    """JSON's spelling is TOML's, but for tables."""
    if isinstance(value, Mapping):
        inside = ", ".join(f"{json.dumps(key)} = {_value(each)}" for key, each in value.items())
        return f"{{{inside}}}"
    return json.dumps(value)


def _stderr(process: subprocess.Popen[str]) -> IO[str]:
    if process.stderr is None:
        raise ServerFailed("the server was started without a pipe")
    return process.stderr
