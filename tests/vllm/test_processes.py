"""`vllm serve` with a load under way, and one of its processes killed.

Whoever asked gets an error, and no source, no other process and no file in /dev/shm is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import ROOT
from tests.vllm.engines import nothing_left, prompt_of, wait_until
from tests.vllm.stations import replay_of, station

WITHIN_S = 90.0


class Served:
    """A server in a session of its own, so that all that it starts can be found."""

    def __init__(self, model: Path, control: Path, log: Path) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self._port = found.getsockname()[1]
        transfer = {
            "kv_connector": "HeadraceConnector",
            "kv_connector_module_path": "headrace.vllm",
            "kv_role": "kv_consumer",
            "kv_connector_extra_config": {
                "sources": [replay_of(model, control)],
                "route": "streamed",
            },
        }
        options = {
            "--host": "127.0.0.1",
            "--port": str(self._port),
            "--dtype": "float32",
            "--max-model-len": "1024",
            "--block-size": "32",
            "--served-model-name": "tiny",
            "--kv-transfer-config": json.dumps(transfer),
        }
        words = [word for pair in options.items() for word in pair]
        words += ["--enforce-eager", "--no-enable-prefix-caching"]
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *words],
                cwd=ROOT,
                env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def members(self) -> dict[int, str]:
        """Living processes of its session, by pid, with what they call themselves."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                name = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:  # it has ended
                continue
            if stat[0] != "Z" and int(stat[3]) == self.process.pid:
                found[int(entry.name)] = name
        return found

    def pid_of(self, name: str) -> int:
        (pid,) = (pid for pid, its in self.members().items() if name in its)
        return pid

    def is_up(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        try:
            return bool(self._open("/health", None).status == 200)
        except OSError:
            return False

    def complete(self, prompt: list[int]) -> dict[str, Any]:
        """The answer to a prompt that a source prefills."""
        params = {"do_remote_prefill": True}
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "kv_transfer_params": params}
        greedy = {"temperature": 0.0, "ignore_eos": True}
        with self._open("/v1/completions", {**body, **greedy}) as answer:
            told: dict[str, Any] = json.load(answer)
        return told

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(asked, timeout=WITHIN_S)

    def end(self) -> None:
        """Leave nothing, whatever the test came to; what tracks shared memory ends by itself."""
        for pid, name in self.members().items():
            if "resource_tracker" not in name:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait(20)
        wait_until(lambda: not self.members(), lambda: str(self.members()))


@contextmanager
def served(tiny: Path, tmp_path: Path) -> Iterator[Served]:
    server = Served(tiny / "tiny-llama", tmp_path, tmp_path / "log")
    try:
        wait_until(server.is_up, lambda: server.log.read_text()[-3000:], WITHIN_S)
        yield server
    finally:
        server.end()


@pytest.mark.parametrize("victim", ["VLLM::EngineCore", "source_main", "serve"])
def test_one_is_killed_while_a_prompt_is_loaded(tiny: Path, tmp_path: Path, victim: str) -> None:
    prompt = prompt_of(100)
    answers: queue.Queue[object] = queue.Queue()
    with nothing_left(), served(tiny, tmp_path) as server:
        right = server.complete(prompt)
        assert right["usage"]["completion_tokens"] == 4
        with station(tmp_path, prompt) as here:

            def ask() -> None:
                try:
                    answers.put(server.complete(prompt))
                except OSError as exc:  # urllib's errors are
                    answers.put(exc)

            asking = threading.Thread(target=ask)
            asking.start()
            here.allow(2)
            wait_until(lambda: len(here.told()) > 2, lambda: "the source at its second commit")
            os.kill(server.pid_of(victim), signal.SIGKILL)
            asking.join(WITHIN_S)
        answer = answers.get_nowait()
        assert isinstance(answer, OSError), answer
        if victim == "source_main":  # vLLM goes on, with another source
            assert isinstance(answer, urllib.error.HTTPError)
            assert answer.code == 500
            assert server.complete(prompt)["choices"] == right["choices"]
            server.process.terminate()
        if victim == "serve":  # whose engine goes on, with any connector or none
            os.kill(server.pid_of("VLLM::EngineCore"), signal.SIGTERM)
        wait_until(lambda: not server.members(), lambda: str(server.members()), WITHIN_S)
