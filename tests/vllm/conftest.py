"""What the tests in vLLM's environment share; anywhere else they are skipped with the reason."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
TORCH_PYTHON = "HEADRACE_TORCH_PYTHON"
MODELS = ("smollm2-135m", "gemma3-270m")

_SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the tests look into the engine
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all of them, and skip them where there is no vLLM."""
    skip = pytest.mark.skip(reason="no vLLM in this environment; run: make test-vllm")
    here = [item for item in items if HERE in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.vllm)
        if importlib.util.find_spec("vllm") is None:
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def _vllm_on_one_core() -> Iterator[None]:
    """vLLM reads its settings when it is imported, and every child inherits them."""
    before = dict(os.environ)
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ.update({name: os.environ.get(name, value) for name, value in _SETTINGS.items()})
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def torch_python() -> str:
    """An interpreter with what the torch source needs, which vLLM's environment lacks."""
    named = os.environ.get(TORCH_PYTHON)
    if not named:
        pytest.skip(f"no torch source: {TORCH_PYTHON} names no interpreter; run: make test-vllm")
    return named


@pytest.fixture(scope="session")
def tiny(torch_python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the tiny random checkpoints."""
    directory = tmp_path_factory.mktemp("tiny")
    command = [torch_python, "-m", "tests.vllm.checkpoints", str(directory)]
    subprocess.run(command, check=True, cwd=ROOT, stdout=sys.stderr)
    return directory


def directory_of(name: str, tiny: Path) -> Path:
    """A model's directory; skips where a real one was not pulled."""
    from headrace.engine.models import resolve
    from headrace.errors import Refused

    if name not in MODELS:
        return tiny / name
    try:
        return resolve(name)
    except Refused as exc:
        pytest.skip(f"{name} is not here: {exc}")
