"""A source in another virtual environment: bytes and messages cross, so that it needs no torch.

The environment is made without a network: `python -m venv --without-pip`, msgspec's installed
package copied in, and the tree's path in a `.pth` file.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import sysconfig
from pathlib import Path

import msgspec
import pytest

import headrace
from headrace.backends.null import decoder_like
from headrace.backends.replay import open as open_replay
from headrace.errors import PeerDied, Refused
from headrace.plan import compile_plan
from headrace.runtime.prefill_worker import SubprocessPrefillWorker
from headrace.runtime.requests import RequestOptions
from headrace.testing.sinks import MemorySink, ask
from tests.docs.reading import ROOT, blocks

pytestmark = pytest.mark.usefixtures("nothing_left")

GEOMETRY = {"layers": 4, "heads": 2, "head_dim": 8, "window": 16, "full_every": 2}
CONTEXT = 64
START_TIMEOUT_S = 30.0
BACKENDS = ROOT / "docs" / "add-a-backend.md"


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
        tree = Path(headrace.__file__).parents[1]
        (self.packages / "headrace-tree.pth").write_text(f"{tree}\n")

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


@pytest.mark.parametrize("package", ["torch", "numpy", "transformers", "pytest"])
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
