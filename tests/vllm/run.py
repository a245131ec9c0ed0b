"""Runs these tests in vLLM's environment: `python -m tests.vllm.run`, by the project's own Python.

That has what the torch sources need, and vLLM's environment what vLLM needs; neither has both.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from headrace.engine.environments import VLLM_FOR_TESTS, find
from headrace.errors import BackendUnavailable
from tests.vllm.conftest import ROOT, TORCH_PYTHON

CONFIG: Final = Path(__file__).with_name("pytest.ini")


def command() -> list[str]:
    """pytest in that environment; the paths and options of a run follow.

    Raises:
        BackendUnavailable: there is no such environment.
    """
    return [find(VLLM_FOR_TESTS), "-m", "pytest", "-c", str(CONFIG)]


def environment() -> dict[str, str]:
    """The variables of such a run; a named Python for torch sources is kept."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    return {TORCH_PYTHON: sys.executable, **os.environ, "PYTHONPATH": paths}


def main() -> None:
    """Become pytest there."""
    try:
        given = command()
    except BackendUnavailable as exc:
        sys.exit(f"{exc}\nThese tests need it made with: headrace vllm-env --for-tests")
    os.chdir(ROOT)
    os.execve(given[0], [*given, *(sys.argv[1:] or ["tests/vllm"])], environment())


if __name__ == "__main__":
    main()
