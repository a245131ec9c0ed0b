from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest

from headrace.engine.rngd.furiosa import FUSIONS, set_fusion_once
from headrace.errors import BackendUnavailable, Refused


class FakeTorchFuriosa:
    """A fake that takes its fusion once, as the vendor's runtime does."""

    def __init__(self) -> None:
        self.fusion = 0

    def set_fusion(self, fusion: int) -> None:
        if self.fusion not in (0, fusion):
            raise RuntimeError(f"num_fusion is already set, {self.fusion}")
        self.fusion = fusion


@pytest.mark.parametrize("fusion", FUSIONS)
def test_the_same_fusion_twice_is_harmless(fusion: int) -> None:
    runtime: Any = FakeTorchFuriosa()
    set_fusion_once(runtime, fusion)
    set_fusion_once(runtime, fusion)
    assert runtime.fusion == fusion


def test_another_fusion_is_unavailable_in_this_process() -> None:
    runtime = FakeTorchFuriosa()
    set_fusion_once(runtime, 8)
    with pytest.raises(BackendUnavailable, match="num_fusion is already set, 8") as caught:
        set_fusion_once(runtime, 4)
    assert (caught.value.stage, caught.value.probe) == ("device_busy", "set_fusion(4)")
    assert runtime.fusion == 8


@pytest.mark.parametrize("fusion", [-1, 0, 3, 64])
def test_a_fusion_that_does_not_exist_is_refused(fusion: int) -> None:
    runtime = FakeTorchFuriosa()
    with pytest.raises(Refused, match=f"fusion is {fusion}; choose one of 1, 2, 4, 8, 16, 32"):
        set_fusion_once(runtime, fusion)
    assert runtime.fusion == 0


def run(interpreter: str, code: str) -> str:
    """What lines of Python print in the vendor's environment, as a source process is started."""
    done = subprocess.run(
        [interpreter, "-c", f"from headrace.engine.rngd.furiosa import *\n{code}"],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.rngd_emulation
def test_the_real_device_is_registered_where_torch_loads_no_backends(rngd_python: str) -> None:
    """And the real runtime takes its fusion once."""
    code = """
import torch
print(hasattr(torch, "furiosa"))
torch_furiosa = import_torch_furiosa()
print(hasattr(torch, "furiosa"), torch.furiosa.is_available())
set_fusion_once(torch_furiosa, 8)
set_fusion_once(torch_furiosa, 8)
print(torch_furiosa.get_fusion().num_fusion)
try:
    set_fusion_once(torch_furiosa, 4)
except BackendUnavailable as exc:
    print(exc.stage)
"""
    assert run(rngd_python, code).split() == ["False", "True", "True", "8", "device_busy"]


@pytest.mark.rngd_emulation
def test_asking_the_real_runtime_for_its_fusion_fixes_it(rngd_python: str) -> None:
    """So nothing may ask first."""
    code = """
torch_furiosa = import_torch_furiosa()
torch_furiosa.get_fusion()
try:
    set_fusion_once(torch_furiosa, 8)
except BackendUnavailable as exc:
    print(exc.stage)
"""
    assert run(rngd_python, code).split() == ["device_busy"]
