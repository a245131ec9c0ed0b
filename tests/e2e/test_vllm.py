"""One pair with vLLM itself, where its environment is; all that needs vLLM: `make test-vllm`."""

from __future__ import annotations

import subprocess

import pytest

from headrace.errors import BackendUnavailable
from tests.vllm import run
from tests.vllm.conftest import ROOT

SMOKE = ["tests/vllm/test_pairs.py", "-k", "torch-tiny-qwen3", "-q"]


@pytest.mark.vllm
def test_a_torch_source_feeds_vllm() -> None:
    try:
        command = run.command()
    except BackendUnavailable as exc:
        pytest.skip(f"no vLLM here: {exc}")
    done = subprocess.run(
        [*command, *SMOKE],
        cwd=ROOT,
        env=run.environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert "3 passed" in done.stdout
