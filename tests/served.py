"""A real `headrace serve` over real owner and source processes, small enough to start in a second.

Its sources are replay engines and its decoder is memory with a counter: after token t comes t + 1.
Its tokenizer has one token for each byte, so that a text counts up through the alphabet. No torch.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import pytest

from headrace.backends.null import decoder_like
from headrace.backends.replay import open as open_replay
from headrace.errors import Refused
from tests.faults.census import left_in_shm, names_in_shm
from tests.faults.lab import CountingDecoder

MODEL = "letters"
END = 0  # the token that ends a text
CONTEXT = 256
WITHIN_S = 30.0
GEOMETRY: dict[str, Any] = {"layers": 4, "heads": 2, "head_dim": 8, "vocab_size": 256}
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def open_decoder(options: Mapping[str, Any]) -> CountingDecoder:
    """The factory of the decoder.

    steps: a FIFO of which each decode step takes a byte; while nobody has it open for writing, it
    does not wait. fails: a file; while it is there, no decoder can be opened. refuses: why not.
    """
    if "refuses" in options:
        raise Refused(options["refuses"], field="refuses")
    if Path(options.get("fails", "/nowhere")).exists():
        raise OSError("no such device")
    manifest = decoder_like(open_replay(GEOMETRY).manifest())
    decoder = CountingDecoder(manifest, context=options["context"], lanes=options["lanes"])
    if "steps" in options:
        steps = os.open(options["steps"], os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(steps, True)
        decoder.before_step = lambda: os.read(steps, 1)
    return decoder


def model_directory(path: Path) -> Path:
    """A model that is a tokenizer, a chat template and a config."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    path.mkdir()
    whole = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in whole}
    rest = [byte for byte in range(256) if byte not in letters]
    letters |= {byte: chr(256 + at) for at, byte in enumerate(rest)}
    vocabulary = {letter: byte for byte, letter in letters.items() if byte != END} | {"<end>": END}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"vocab_size": 256, "max_position_embeddings": 4096, "eos_token_id": END}
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    header = b"{}      "  # weights that nobody loads
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return path


def decoder_table(
    name: str = "left", *, lanes: int = 2, slots: int = 4, num_sources: int = 1, **options: Any
) -> str:
    """A `[[decoders]]` of a config, also served by its own name; `options` are the decoder's."""
    lines = [
        "[[decoders]]",
        f'name = "{name}"',
        'model = "MODEL_DIRECTORY"',
        f'served_as = ["{MODEL}", "{name}"]',
        'decoder = "tests.served:open_decoder"',
        f"lanes = {lanes}",
        f"context = {CONTEXT}",
        f"options = {_inline(options)}",
    ]
    for at in range(num_sources):
        lines += ["[[decoders.sources]]", 'source = "replay"', f'name = "{name}-{at}"']
        lines += [f"slots = {slots}", f"options = {_inline(GEOMETRY)}"]
    return "\n".join([*lines, ""])


def _inline(table: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in table.items()) + "}"


QUICK = "[restart]\nfirst_delay_s = 0.01\n[page]\nlook_every_s = 0.05\n"


class Steps:
    """The writing end of a FIFO that a decoder takes its steps from."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self._fd: int | None = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def allow(self, steps: int) -> None:
        assert self._fd is not None
        os.write(self._fd, bytes(steps))

    def open(self) -> None:
        """Let it run free from here on."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Served:
    """The server's process. `lines`: what it printed and logged, as it comes."""

    def __init__(
        self,
        directory: Path,
        *tables: str,
        arguments: Sequence[str] = (),
        ready: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`tables`: of its config. `arguments`: instead of a config. ready: wait until it is."""
        if not arguments:
            arguments = [f"--config={_config(directory, tables or (decoder_table(),))}"]
        self.shm = names_in_shm()
        self.lines: list[str] = []
        self.url = ""
        self._seen: set[int] = set()
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "headrace", "serve", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
            process_group=0,
        )
        self._told = threading.Condition()
        self._all_told = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if ready:
            try:
                line = self.wait_for(r"ready: (http://\S+)/v1")
            except BaseException:
                self._process.kill()
                raise
            self.url = line[1]
            self.owners()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with self._told:
                self.lines.append(line.rstrip("\n"))
                self._told.notify_all()
        with self._told:
            self._all_told = True
            self._told.notify_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for(self, pattern: str, count: int = 1) -> re.Match[str]:
        """Wait until so many lines have the pattern; the last of them."""

        def found() -> list[re.Match[str]]:
            return [match for line in self.lines if (match := re.search(pattern, line))]

        with self._told:
            self._told.wait_for(lambda: len(found()) >= count or self._all_told, WITHIN_S)
            matches = found()
        if len(matches) < count:
            pytest.fail(f"not within {WITHIN_S} s: {pattern!r} x {count}\n" + "\n".join(self.lines))
        return matches[count - 1]

    def owners(self) -> list[int]:
        """Pids of the owner processes that are alive."""
        found = _children(self.pid)
        self._seen.update(found, *(_children(pid) for pid in found))
        return found

    def sources(self) -> list[int]:
        """Pids of the source processes that are alive."""
        found = [pid for owner in self.owners() for pid in _children(owner)]
        self._seen.update(found)
        return found

    # Asking it.

    def client(self, **more: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=WITHIN_S, **more)

    def complete(self, prompt: str = "hi", **body: Any) -> httpx.Response:
        """A completion; greedy, and of 8 tokens, unless `body` says otherwise."""
        asked = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0} | body
        return httpx.post(f"{self.url}/v1/completions", json=asked, timeout=WITHIN_S)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Ask until it holds."""
        deadline_s = time.monotonic() + WITHIN_S
        while not condition():
            if time.monotonic() > deadline_s:
                pytest.fail(f"not within {WITHIN_S} s: {what}\n" + "\n".join(self.lines[-20:]))
            time.sleep(0.01)

    # Its end.

    def signal(self, number: signal.Signals = signal.SIGTERM, *, group: bool = False) -> None:
        """To the server's process, or as `timeout` and a terminal do to all that it started too."""
        if group:
            os.killpg(self.pid, number)
        else:
            self._process.send_signal(number)

    def wait(self) -> int:
        """Wait until it has ended, and all that it started; its exit status."""
        status = self._process.wait(WITHIN_S)
        self._reader.join(WITHIN_S)
        assert self._process.stderr is not None
        self._process.stderr.close()
        self.until(lambda: not any(map(_alive, self._seen)), f"{self._seen} end")
        assert not left_in_shm(self.shm)
        return status

    def close(self) -> None:
        """SIGTERM, unless it has ended; it ends well and leaves nothing."""
        if self._process.returncode is None:
            self.sources()
            self.signal()
            try:
                status = self.wait()
            finally:
                self._process.kill()
            assert status == 0, "\n".join(self.lines)
        assert not any("Traceback" in line for line in self.lines), "\n".join(self.lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._process.kill()
            self._process.wait()


def served_once(directory: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """`headrace serve` with arguments that it cannot serve with: how it ended."""
    return subprocess.run(
        [sys.executable, "-m", "headrace", "serve", *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )


def _config(directory: Path, tables: Sequence[str]) -> Path:
    """A headrace.toml of these tables, with a model beside it."""
    model = directory / "model"
    if not model.exists():
        model_directory(model)
    config = "\n".join(tables)
    if "[http]" not in config:
        config += "\n[http]\nport = 0\n"
    path = directory / "headrace.toml"
    path.write_text(config.replace("MODEL_DIRECTORY", str(model)))
    return path


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, task.read_text().split())
        except (FileNotFoundError, ProcessLookupError):  # a thread that has ended since
            continue
    return sorted(found)


def _alive(pid: int) -> bool:
    """Whether it runs; one that is dead and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
