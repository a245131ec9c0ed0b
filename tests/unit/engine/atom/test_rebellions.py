"""How the vendor's packages are opened: against fakes, and against the real optimum-rbln where it
is, with a fake of the compiler that it runs on.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headrace.engine.atom import rebellions, smi
from headrace.engine.atom.sdk import Sdk
from headrace.engine.probing import is_there
from headrace.errors import BackendUnavailable
from tests.unit.engine.atom.fake_site import (
    KV_CACHE,
    write_facts,
    write_fake_site,
    write_fake_smi,
)

OPEN = """
from headrace.engine.atom.rebellions import open_sdk
sdk = open_sdk()
print(sdk.name, dict(sdk.versions), repr(sdk.driver))
print(sdk.rebel.__name__, sdk.rebel.device_count(), sdk.aligned(3))
print(sdk.load("compiled", 3))
"""


def child(site: Path, code: str, *, path: str) -> list[str]:
    """What lines of Python print where the fakes are found first."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]),
        "PATH": path,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(("tool", "driver"), [(True, "3.5.1"), (False, "")])
def test_what_is_opened(tmp_path: Path, tool: bool, driver: str) -> None:
    site = write_fake_site(tmp_path / "site")
    if tool:
        write_fake_smi(tmp_path / "bin")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}" if tool else "/nonexistent"
    versions = {"optimum-rbln": "0.12.0", "rebel-compiler": "0.12.0", "torch": "2.13.0+fake"}
    assert child(site, OPEN, path=path) == [
        f"rebellions {versions} {driver!r}",
        "rebel 2 [0.0, 0.0, 0.0]",
        "(('compiled',), {'export': False, 'rbln_device': 3})",
    ]


def test_an_sdk_by_name_is_a_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Sdk("fake rebellions", None, lambda directory, device: None, lambda numel: None, {}, "")
    module: Any = ModuleType("some_fake")
    module.make = lambda: made
    monkeypatch.setitem(sys.modules, "some_fake", module)
    assert rebellions.sdk_named("some_fake:make") is made


def test_without_a_name_it_is_the_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Sdk("rebellions", None, lambda directory, device: None, lambda numel: None, {}, "")
    monkeypatch.setattr(rebellions, "open_sdk", lambda: opened)
    assert rebellions.sdk_named(None) is opened


def test_a_driver_that_nothing_tells_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> smi.Said:
        raise BackendUnavailable("rebellions", "driver_missing", "rbln-smi -j", "gone", "")

    monkeypatch.setattr(smi, "ask", ask)
    assert rebellions._driver() == ""


FAKE_REBEL = """
class RBLNCompiledModel:
    def __init__(self, path):
        self.path = path

class Runtime:
    def __init__(self, compiled, **options):
        print(compiled.path.name, options["device"])

AsyncRuntime = Runtime

def npu_is_available(index):
    return True

def get_npu_name(index=0):
    return "RBLN-CA25"

def device_count():
    return 4

def compile(*arguments, num_devices=1):
    raise SystemExit("nothing is compiled here")
"""

LOAD = """
import sys
from pathlib import Path
from transformers import LlamaConfig
import optimum.rbln
from optimum.rbln.configuration_utils import RBLNCompileConfig
from headrace.engine.atom.rebellions import open_sdk

directory = Path("{directory}")
facts = optimum.rbln.RBLNLlamaForCausalLMConfig(
    batch_size=1, max_seq_len=256, dtype="float32", attn_impl="eager",
    kvcache_block_size=256, kvcache_num_blocks=1, prefill_chunk_size=128,
)
names = ("prefill", "decoder_batch_1")
inputs = [("input_ids", [1, 128], "int64")]
facts.set_compile_cfgs([RBLNCompileConfig(compiled_model_name=n, input_info=inputs) for n in names])
facts.freeze()
facts.save(directory)
LlamaConfig(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=128, intermediate_size=64, architectures=["LlamaForCausalLM"],
).save_pretrained(directory)
for name in names:
    (directory / (name + ".rbln")).touch()
model = open_sdk().load("{directory}", 3)
print(type(model).__name__)
print([name for name in sys.modules if name.startswith("torch_rbln")])
"""


@pytest.mark.skipif(not is_there("optimum.rbln"), reason="no optimum-rbln here")
def test_the_real_optimum_hands_the_device_to_each_runtime(tmp_path: Path) -> None:
    """And loads no torch backend by itself."""
    site, directory = tmp_path / "site", tmp_path / "compiled"
    (site / "rebel").mkdir(parents=True)
    directory.mkdir()
    (site / "rebel" / "__init__.py").write_text(FAKE_REBEL)
    (site / "rebel" / "kv_cache.py").write_text(KV_CACHE)
    (site / "rebel" / "compile_context.py").write_text("class CompileContext:\n    pass\n")
    write_facts(site, "rebel-compiler", "0.12.0")
    told = child(site, LOAD.format(directory=directory), path="/nonexistent")
    assert told == ["prefill.rbln 3", "decoder_batch_1.rbln 3", "RBLNLlamaForCausalLM", "[]"]


@pytest.mark.skipif(not is_there("optimum.rbln"), reason="no optimum-rbln here")
@pytest.mark.skipif(is_there("rebel"), reason="the vendor's packages are here")
def test_the_real_optimum_cannot_be_imported_without_rebel() -> None:
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", "import optimum.rbln"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'rebel'"
