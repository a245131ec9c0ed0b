"""A source, an owner or a check in another virtual environment: bytes and messages cross.

So it needs no torch, and none of what the command line needs.

The environment is made without a network: `python -m venv --without-pip`, msgspec's installed
package copied in, and the tree's path in a `.pth` file.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

import headrace
from headrace.backends.null import decoder_like
from headrace.backends.replay import open as open_replay
from headrace.cli import run_command
from headrace.errors import PeerDied, Refused
from headrace.plan import compile_plan
from headrace.runtime.config import OwnerConfig, SourceConfig
from headrace.runtime.prefill_worker import SubprocessPrefillWorker
from headrace.runtime.requests import RequestOptions
from headrace.runtime.router import OwnerClient, RouteResult
from headrace.testing.sinks import MemorySink, ask
from tests.docs.reading import ROOT, blocks

pytestmark = pytest.mark.usefixtures("nothing_left")

GEOMETRY = {"layers": 4, "heads": 2, "head_dim": 8, "window": 16, "full_every": 2}
CONTEXT = 64
START_TIMEOUT_S = 30.0
BACKENDS = ROOT / "docs" / "add-a-backend.md"
TREE = Path(headrace.__file__).parents[1]
PAIR = ["--source", "replay", "--decoder", "null"]


class Environment:
    """A virtual environment that has no more than was put into it."""

    def __init__(self, root: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root)], check=True)
        self.python = str(root / "bin" / "python")
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.packages = root / "lib" / version / "site-packages"

    def add_msgspec(self) -> None:
        package = Path(msgspec.__file__).parent
        shutil.copytree(package, self.packages / package.name)

    def add_headrace(self) -> None:
        (self.packages / "headrace-tree.pth").write_text(f"{TREE}\n")

    def run(self, code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([self.python, "-c", code], capture_output=True, text=True)


@pytest.fixture(autouse=True)
def _no_python_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process was told about paths would defeat the other environment."""
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.fixture(scope="module")
def lean(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """msgspec and headrace, and nothing else."""
    made = Environment(tmp_path_factory.mktemp("lean") / "venv")
    made.add_msgspec()
    made.add_headrace()
    return made


def worker(interpreter: str, engine: str = "replay") -> SubprocessPrefillWorker:
    return SubprocessPrefillWorker(
        engine,
        GEOMETRY if engine == "replay" else {},
        context=CONTEXT,
        interpreter=interpreter,
        start_timeout_s=START_TIMEOUT_S,
    )


def refusal(interpreter: str, engine: str = "replay") -> str:
    with worker(interpreter, engine) as started:
        raise AssertionError(f"{started} was not refused")


@pytest.mark.parametrize(
    "package", ["torch", "numpy", "transformers", "pytest", "cyclopts", "rich"]
)
def test_the_environment_is_lean(lean: Environment, package: str) -> None:
    assert lean.run("import headrace.runtime.source_main").returncode == 0
    failed = lean.run(f"import {package}")
    assert failed.returncode == 1
    assert "ModuleNotFoundError" in failed.stderr


def test_the_replay_source_runs_there(lean: Environment) -> None:
    """It gives the bytes that this environment gives, on every route."""
    tokens = [at % 31 for at in range(40)]
    engine = open_replay(GEOMETRY)
    plan = compile_plan(decoder_like(engine.manifest()), "head_major", len(tokens), CONTEXT)
    sink = MemorySink(plan, ask(len(tokens)))
    engine.prefill_stream(tokens, sink)
    wanted = sink.cells()
    with worker(lean.python) as there:
        pid = there._handle.pid
        assert os.readlink(f"/proc/{pid}/exe") == os.path.realpath(lean.python)
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        assert command[0].decode() == lean.python
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "torch" not in maps
        assert "numpy" not in maps
        for route in ("whole", "chunked", "streamed"):
            options = RequestOptions(route=route, digest=True)
            parts = there.prefill(tokens, options).result(30.0).parts
            assert {(layer, part): parts[layer][part] for layer, part in wanted} == wanted


@pytest.mark.parametrize("module", ["lab_source", "lab_whole"])
def test_an_engine_that_is_not_public_runs_there(
    lean: Environment, tmp_path: Path, module: str
) -> None:
    """The docs' own: one that streams, and one that gives all at once."""
    for block in blocks(BACKENDS):
        if block.file is not None and block.file.startswith("lab_"):
            (tmp_path / block.file).write_text(block.code, encoding="utf-8")
    tokens = [at % 31 for at in range(40)]
    with SubprocessPrefillWorker(
        f"{module}:open",
        context=CONTEXT,
        interpreter=lean.python,
        start_timeout_s=START_TIMEOUT_S,
        env={"PYTHONPATH": str(tmp_path)},
    ) as there:
        whole = there.prefill(tokens).result(30.0)
        assert whole.windows == ((0, 40),) * 4
        first = struct.unpack_from("<40f", whole.parts[3][1][:160])
        assert first == (1300.0,) * 8 + (1301.0 + 1 / 4096,) * 8 + first[16:]
        streamed = RequestOptions(route="streamed", group_layers=3, chunk=7, digest=True)
        if module == "lab_source":
            assert there.prefill(tokens, streamed).result(30.0) == whole
        else:
            with pytest.raises(Refused, match="whole results only"):
                there.prefill(tokens, streamed).result(30.0)


def test_an_engine_that_the_environment_lacks_is_refused(lean: Environment) -> None:
    with pytest.raises(Refused, match=r"source torch is unavailable: .*sdk_missing") as caught:
        refusal(lean.python, "torch")
    assert "No module named 'torch'" in str(caught.value)
    assert "Install headrace" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_interpreter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused) as caught:
        refusal(str(tmp_path / "nowhere" / "python"))
    assert str(caught.value) == (
        f"interpreter '{tmp_path}/nowhere/python' is missing or not executable. Give the path of a "
        "Python that has headrace installed, such as ENVIRONMENT/bin/python"
    )
    assert caught.value.field == "interpreter"


def test_an_interpreter_without_headrace_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bare = Environment(tmp_path / "venv")
    with pytest.raises(Refused) as caught:
        refusal(bare.python)
    text = str(caught.value)
    assert bare.python in text
    assert "headrace" in text
    assert "install" in text
    assert "\n" not in text


def test_an_interpreter_without_msgspec_is_refused(tmp_path: Path) -> None:
    bare = Environment(tmp_path / "venv")
    bare.add_headrace()
    with pytest.raises(Refused, match=r"cannot run headrace: .*msgspec") as caught:
        refusal(bare.python)
    assert bare.python in str(caught.value)


def test_what_is_no_python_is_refused() -> None:
    with pytest.raises((Refused, PeerDied)) as caught:
        refusal("/bin/true")
    assert "\n" not in str(caught.value)


def test_the_other_environment_is_used_for_real(lean: Environment) -> None:
    """The check above would pass if `interpreter` were ignored and torch merely not loaded."""
    prefix = lean.run("import sys; print(sys.prefix)").stdout.strip()
    assert prefix == str(Path(lean.python).parents[1])
    assert prefix != sysconfig.get_config_var("prefix")


@pytest.fixture
def _tree_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children of this interpreter find headrace, wherever it is installed."""
    monkeypatch.setenv("PYTHONPATH", str(TREE))


def owner(python: str | None = None) -> OwnerConfig:
    return OwnerConfig(
        "null",
        {"context": CONTEXT, "lanes": 2},
        (SourceConfig("replay", GEOMETRY, python=python),),
        CONTEXT,
        start_timeout_s=START_TIMEOUT_S,
    )


def interpreters_of(client: OwnerClient) -> tuple[str, str]:
    """What the owner's process and its source's were started with."""
    pid = client.pid
    (source,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    commands = [Path(f"/proc/{each}/cmdline").read_bytes().split(b"\0") for each in (pid, source)]
    return commands[0][0].decode(), commands[1][0].decode()


def served(config: OwnerConfig, interpreter: str | None) -> tuple[RouteResult, tuple[str, str]]:
    """What a request came to, and with which interpreters."""
    client = OwnerClient(config, interpreter=interpreter)
    try:
        client.start()
        asked = RequestOptions(route="streamed", max_tokens=0, audit=True)
        return client.result(client.submit(list(range(9)), asked)), interpreters_of(client)
    finally:
        client.close()


@pytest.mark.usefixtures("_tree_is_found")
def test_an_owner_runs_there_and_its_source_here(lean: Environment) -> None:
    """It publishes the bytes that an owner of this environment publishes."""
    result, interpreters = served(owner(), lean.python)
    assert result.ended.outcome == "finished"
    assert interpreters == (lean.python, sys.executable)
    here, interpreters = served(owner(), None)
    assert interpreters == (sys.executable, sys.executable)
    assert result.ended.kv_digests == here.ended.kv_digests != ()


@pytest.mark.usefixtures("_tree_is_found")
def test_a_source_that_names_its_own_keeps_it(lean: Environment) -> None:
    result, interpreters = served(owner(python=lean.python), lean.python)
    assert interpreters == (lean.python, lean.python)
    assert result.ended.outcome == "finished"
    _, interpreters = served(owner(python=lean.python), None)
    assert interpreters == (sys.executable, lean.python)


@pytest.fixture(params=["owner", "check"])
def refused_decoder_python(
    request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> Callable[[str], str]:
    """The one sentence about a decoder's interpreter, of a router or of `headrace check`."""

    def refused(python: str) -> str:
        if request.param == "check":
            assert run_command(["check", *PAIR, "--decoder-python", python]) == 2
            text = capfd.readouterr().err.strip()
        else:
            client = OwnerClient(owner(), interpreter=python)
            with pytest.raises(Refused) as caught:
                client.start()
            client.close()
            text = str(caught.value)
        assert python in text
        assert "--decoder-python" in text
        assert "\n" not in text
        return text

    return refused


def test_a_decoders_interpreter_that_cannot_run_it_is_refused(
    tmp_path: Path, refused_decoder_python: Callable[[str], str]
) -> None:
    bare = Environment(tmp_path / "venv")
    assert "No module named 'msgspec'" in refused_decoder_python(bare.python)
    bare.add_msgspec()
    assert "No module named 'headrace'" in refused_decoder_python(bare.python)
    assert "is missing" in refused_decoder_python(str(tmp_path / "nowhere"))
    assert "is not a Python" in refused_decoder_python("/bin/true")
    other = tmp_path / "other"
    other.write_text("#!/bin/sh\necho headrace 0.0.1\n")
    other.chmod(0o755)
    assert "is 0.0.1, and this one is" in refused_decoder_python(str(other))


@pytest.mark.usefixtures("_tree_is_found")
def test_routes_are_compared_there(lean: Environment, capfd: pytest.CaptureFixture[str]) -> None:
    how = ["--decoder-python", lean.python, "--route", "compare", "--max-tokens", "0", "--json"]
    assert run_command(["run", *PAIR, "--prompt", "abc", *how]) == 0
    told = json.loads(capfd.readouterr().out)
    assert (told["identical"], told["fake"], told["outcome"]) == (True, False, "finished")


def check_there(python: str, *arguments: str) -> int:
    return run_command(["check", *PAIR, "--decoder-python", python, "--quick", *arguments])


@pytest.mark.usefixtures("_tree_is_found")
def test_a_check_runs_there(
    lean: Environment, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where nothing of what the command line needs is installed."""
    cases = ["--only", "facts", "--only", "exactness"]
    assert check_there(lean.python, *cases, "--report", str(tmp_path)) == 0
    assert "replay -> null: all 2 cases hold" in capfd.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["stamp"]["packages"]["torch"] == ""  # it is installed here
    assert f"--decoder-python {lean.python}" in report["asked"]["command"]
    assert check_there(lean.python, "--only", "luck") == 2
    assert "there is no case 'luck'" in capfd.readouterr().err


@pytest.mark.usefixtures("_tree_is_found")
def test_a_check_there_is_interrupted_from_here(lean: Environment) -> None:
    """Once it is at work; it reports what it has, and nothing of it is left."""
    command = ["check", *PAIR, "--decoder-python", lean.python, "--quick", "--repeat", "1000"]
    with subprocess.Popen(
        [sys.executable, "-m", "headrace", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            child = wait_for_child(process.pid)
            wait_for_child(child)
            os.kill(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "interrupted" in out + err
    assert not Path(f"/proc/{child}").exists()


def wait_for_child(pid: int) -> int:
    """The only child of a process, once there is one that is at work."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    while True:
        found = [int(child) for child in children.read_text().split()]
        for child in found:
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
                command = Path(f"/proc/{child}/cmdline").read_bytes()
                if any(name in command for name in (b"runtime.elsewhere", b"runtime.source_main")):
                    return child
