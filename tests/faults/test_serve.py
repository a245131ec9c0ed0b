"""A server whose processes are killed, told to stop, or never come up: real processes, real HTTP.

Decode steps are let through one by one where a request has to be under way, so that nothing here
depends on how fast the machine is.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from tests.conftest import children, open_fds
from tests.served import (
    QUICK,
    WITHIN_S,
    Served,
    Steps,
    decoder_table,
    model_directory,
    served_once,
)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """No child and no descriptor is left; `Served` looks for what the server leaves."""
    before = children(), open_fds()
    yield
    assert (children(), open_fds()) == before


class Ask(threading.Thread):
    """A request in a thread: its response, whole, or a stream's events as they come."""

    def __init__(self, served: Served, **body: Any) -> None:
        super().__init__(daemon=True)
        self.response: httpx.Response | None = None
        self.events: list[str] = []
        self.begun = threading.Event()
        self.cut = False
        self._body = {"model": "letters", "prompt": "hi", "max_tokens": 4, "temperature": 0} | body
        self._client = served.client()
        self.start()

    def run(self) -> None:
        with self._client as client:
            try:
                with client.stream("POST", "/v1/completions", json=self._body) as self.response:
                    for line in self.response.iter_lines():
                        if line:
                            self.events.append(line)
                            self.begun.set()
            except httpx.RemoteProtocolError:
                self.cut = True

    def done(self) -> Ask:
        self.join(WITHIN_S)
        assert not self.is_alive()
        return self

    @property
    def status(self) -> int:
        assert self.response is not None
        return self.response.status_code

    @property
    def text(self) -> str:
        """Of a stream."""
        told = [json.loads(each[6:]) for each in self.events if each != "data: [DONE]"]
        return "".join(each["choices"][0]["text"] for each in told if "choices" in each)

    @property
    def error(self) -> dict[str, Any]:
        """In the body, or in the stream."""
        error: dict[str, Any] = json.loads(self.events[-1].removeprefix("data: "))["error"]
        return error


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[Steps]:
    made = Steps(tmp_path / "steps")
    made.allow(1)  # the first token is told after the first step
    yield made
    made.open()


def waiting(served: Served, count: int) -> None:
    """Until so many requests are at an owner."""

    def at_owners() -> bool:
        requests = httpx.get(f"{served.url}/status", timeout=WITHIN_S).json()["open"]
        return sum(bool(each["choices"][0]["decoder"]) for each in requests) >= count

    served.until(at_owners, f"{count} requests run")


def test_a_killed_owner_fails_what_ran_on_it_and_others_serve_on(
    tmp_path: Path, steps: Steps
) -> None:
    """Whole and streamed requests on it end with an error; the other decoder takes new ones."""
    stuck = decoder_table("left", steps=str(steps.path))
    with Served(tmp_path, stuck, decoder_table("right"), QUICK) as served:
        served.wait_for(r"decoder \w+: ready", 2)
        streamed = Ask(served, stream=True, model="left")
        whole = Ask(served, model="left")
        waiting(served, 2)
        assert streamed.begun.wait(WITHIN_S)
        left = next(pid for pid in served.owners() if _has_open(pid, steps.path))
        os.kill(left, signal.SIGKILL)
        assert whole.done().status == 503
        assert whole.error["code"] == "owner-died"
        assert streamed.done().status == 200
        assert streamed.error["code"] == "owner-died"
        assert "data: [DONE]" not in streamed.events
        assert served.complete().status_code == 200
        assert served.complete(model="right").status_code == 200
        steps.open()
        served.wait_for(r"decoder left: ready", 2)
        assert served.complete(model="left").json()["choices"][0]["text"] == "EFGHIJKL"


def _has_open(pid: int, path: Path) -> bool:
    return any(os.path.realpath(each) == str(path) for each in Path(f"/proc/{pid}/fd").iterdir())


def test_a_killed_source_fails_one_request_at_most_and_the_other_takes_over(tmp_path: Path) -> None:
    with Served(tmp_path, decoder_table(num_sources=2), QUICK) as served:
        first, second = served.sources()
        for victim in (first, second):
            assert served.complete().status_code == 200
            os.kill(victim, signal.SIGKILL)
            statuses = []
            for _ in range(20):
                response = served.complete()
                statuses.append(response.status_code)
                if response.status_code == 200:
                    assert response.json()["choices"][0]["text"] == "EFGHIJKL"
                else:
                    assert response.json()["error"]["code"] in ("source-died", "no-source")
            assert statuses.count(503) <= 1
            served.until(lambda: len(served.sources()) == 2, "it is started again")
            served.until(
                lambda: httpx.get(f"{served.url}/status").text.count('"in service"') == 2,
                "both are in service",
            )


@pytest.mark.parametrize("group", [False, True])
def test_sigterm_lets_what_runs_end_whole_and_takes_no_more(
    tmp_path: Path, steps: Steps, group: bool
) -> None:
    """Also one to its whole group, of which owners and sources are."""
    with Served(tmp_path, decoder_table(steps=str(steps.path))) as served:
        running = Ask(served, stream=True)
        assert running.begun.wait(WITHIN_S)
        served.signal(group=group)
        served.wait_for("draining: 1 request")
        ready = httpx.get(f"{served.url}/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "draining")
        refused = served.complete()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting-down")
        assert int(refused.headers["retry-after"]) >= 1
        steps.open()
        assert running.done().text == "EFGH"
        assert running.events[-1] == "data: [DONE]"
        assert served.wait() == 0


def test_a_second_sigterm_ends_what_runs(tmp_path: Path, steps: Steps) -> None:
    with Served(tmp_path, decoder_table(steps=str(steps.path))) as served:
        streamed, whole = Ask(served, stream=True), Ask(served)
        assert streamed.begun.wait(WITHIN_S)
        waiting(served, 2)
        served.signal()
        served.wait_for("draining: 2 request")
        served.signal()
        assert streamed.done().error["code"] == "shutting-down"
        assert (whole.done().status, whole.error["code"]) == (503, "shutting-down")
        steps.open()  # the owner ends after its step
        assert served.wait() == 0


def test_a_drain_ends_at_its_time_limit(tmp_path: Path, steps: Steps) -> None:
    """An owner that is stuck in a decode step is killed, and the server ends all the same."""
    http = "[http]\nport = 0\ndrain_timeout_s = 0.2\n"
    with Served(tmp_path, decoder_table(steps=str(steps.path)), http) as served:
        streamed, whole = Ask(served, stream=True), Ask(served)
        assert streamed.begun.wait(WITHIN_S)
        waiting(served, 2)
        begun_s = time.monotonic()
        served.signal()
        assert served.wait() == 0
        assert time.monotonic() - begun_s < 0.2 + 15
        assert streamed.done().error["code"] == "shutting-down"
        assert "data: [DONE]" not in streamed.events
        assert (whole.done().status, whole.error["code"]) == (503, "shutting-down")


def test_a_killed_server_leaves_no_process_behind(tmp_path: Path) -> None:
    served = Served(tmp_path, decoder_table(num_sources=2), decoder_table("right"))
    served.wait_for(r"decoder \w+: ready", 2)
    assert (len(served.owners()), len(served.sources())) == (2, 3)
    served.signal(signal.SIGKILL)
    assert served.wait() == -signal.SIGKILL


def test_sigint_while_it_starts_ends_it(tmp_path: Path) -> None:
    with Served(tmp_path, ready=False) as served:
        served.wait_for("decoder left: starting")
        served.signal(signal.SIGINT)
        assert served.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_it_checks_ends_it_and_what_it_started(
    number: signal.Signals, tmp_path: Path
) -> None:
    """It checks an interpreter here, which is stuck; nobody can connect yet."""
    told = tmp_path / "pid"
    os.mkfifo(told)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $$ > {told}\nexec sleep 600\n")
    python.chmod(0o755)
    table = decoder_table().replace("lanes =", f'python = "{python}"\nlanes =', 1)
    with Served(tmp_path, table, ready=False) as served:
        pid = int(told.read_text())
        served.wait_for("checking the config")
        served.signal(number)
        assert served.wait() == 0
    assert served.lines == [
        "headrace: checking the config and its models",
        "headrace: told to stop before it served",
    ]
    assert not Path(f"/proc/{pid}").exists()


def test_a_pipe_of_keys_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    os.mkfifo(keys, 0o600)
    with open(os.open(keys, os.O_RDWR), "wb") as file:
        file.write(b"sk-secret\n")
        file.flush()
        http = f"[http]\nport = 0\napi_key_file = '{keys}'\n"
        served = Served(tmp_path, decoder_table(), http, ready=False)
        assert served.wait() == 2
    assert "http.api_key_file names no regular file" in served.lines[-1]


def test_owners_and_sources_have_no_key(tmp_path: Path) -> None:
    with Served(tmp_path, env={"HEADRACE_API_KEY": "sk-secret"}) as served:
        assert served.complete().status_code == 401
        pids = [*served.owners(), *served.sources()]
        assert len(pids) == 2
        for pid in pids:
            assert b"sk-secret" not in Path(f"/proc/{pid}/environ").read_bytes()
        headers = {"Authorization": "Bearer sk-secret"}
        assert httpx.get(f"{served.url}/v1/models", headers=headers).status_code == 200


def test_where_logs_are_json_every_line_is_and_a_restart_tells_its_own_time(
    tmp_path: Path,
) -> None:
    """An owner's death says how it ended, and its next start is timed by itself."""
    telemetry = "[telemetry]\nlog_json = true\nlog_level = 'error'\n"
    with Served(tmp_path, decoder_table(), QUICK, telemetry) as served:
        begun_s = time.monotonic()
        (owner,) = served.owners()
        served.until(lambda: time.monotonic() - begun_s > 0.6, "it is up for a while")
        os.kill(owner, signal.SIGKILL)
        served.wait_for("decoder left: waiting: its owner process died .status -9.")
        again = served.wait_for(r"decoder left: ready.* after ([0-9.]+) s", 2)
        assert float(again[1]) < time.monotonic() - begun_s - 0.5
        assert httpx.get(f"{served.url}/health").status_code == 200
    for line in served.lines:
        assert json.loads(line)["level"], line


def test_a_single_connection_is_served_and_the_next_is_told_why_not(tmp_path: Path) -> None:
    http = "[http]\nport = 0\nmax_connections = 1\n"
    with Served(tmp_path, decoder_table(), http) as served, served.client() as first:
        assert first.get("/v1/models").status_code == 200
        refused = httpx.get(f"{served.url}/v1/models")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["code"] == "too-many-connections"
        told = 'endpoint="models",status="503",terminal="too-many-connections"} 1.0'
        assert told in httpx.get(f"{served.url}/metrics").text
        assert httpx.get(f"{served.url}/health").status_code == 200
        assert first.get("/v1/models").status_code == 200


def test_a_port_in_use_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        http = f"[http]\nport = {taken.getsockname()[1]}\n"
        served = Served(tmp_path, decoder_table(), http, ready=False)
        assert served.wait() == 2
    (line,) = served.lines
    assert "is in use by another process" in line


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[http]\nprot = 8000\n", "prot"),
        ("[http]\nport = 70000\n", "port"),
        ("[http\n", "headrace.toml"),
    ],
)
def test_a_broken_config_is_refused_in_one_sentence(tmp_path: Path, text: str, told: str) -> None:
    model_directory(tmp_path / "model")
    (tmp_path / "headrace.toml").write_text(text + decoder_table())
    ended = served_once(tmp_path, ["--config=headrace.toml"])
    (line,) = ended.stderr.splitlines()
    assert (ended.returncode, told in line, ended.stdout) == (2, True, "")


def test_a_decoder_that_was_configured_wrongly_ends_the_server_with_2(tmp_path: Path) -> None:
    wrong = decoder_table("right", refuses="there is no lane of 3 legs")
    served = Served(tmp_path, decoder_table(), wrong, ready=False)
    assert served.wait() == 2
    assert "there is no lane of 3 legs" in served.lines[-1]
    assert not any("there is no lane of 3 legs" in line for line in served.lines[:-1])


def test_a_server_of_which_no_decoder_is_left_ends_with_1(tmp_path: Path) -> None:
    (tmp_path / "fails").touch()
    restart = "[restart]\nfirst_delay_s = 0.01\nmax_failures = 2\n"
    broken = decoder_table(fails=str(tmp_path / "fails"))
    served = Served(tmp_path, broken, restart, ready=False)
    assert served.wait() == 1
    assert "no such device" in served.lines[-1]
    assert sum("decoder left: starting" in line for line in served.lines) == 2


def test_clients_that_leave_free_all(tmp_path: Path, steps: Steps) -> None:
    """One while it waits, one before its first token, one in its stream; then all is free."""
    with Served(tmp_path, decoder_table(lanes=1, slots=1, steps=str(steps.path)), QUICK) as served:
        clients = []
        for at in range(3):
            body = json.dumps({"model": "letters", "prompt": "hi", "stream": at != 1}).encode()
            sock = socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])))
            head = (
                "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                f"Content-Length: {len(body)}\r\n\r\n"
            )
            sock.sendall(head.encode() + body)
            if not at:
                assert sock.recv(64).startswith(b"HTTP/1.1 200")
            clients.append(sock)
        for sock in reversed(clients):
            sock.close()
        served.wait_for("client-left 499", 3)
        steps.open()

        def free() -> bool:
            state = httpx.get(f"{served.url}/status").json()
            return not state["open"] and state["decoders"][0]["lanes_free"] == 1

        served.until(free, "the lane is free")
        assert served.complete().json()["choices"][0]["text"] == "EFGHIJKL"
