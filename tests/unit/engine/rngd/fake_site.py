"""A directory of fake vendor packages, which a child of preflight finds first on its path.

They have the names that preflight looks for, and nothing behind them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

VERSION: Final = "2026.4.0"

TORCH = """
import os
assert os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0", "this process would load any backend"
__version__ = "2.10.0+fake"
"""

REGISTER = """
import torch
torch.furiosa = object()
"""

TORCH_FURIOSA = """
fusion = None

def set_fusion(number):
    global fusion
    if fusion not in (None, number):
        raise RuntimeError(f"num_fusion is already set, {fusion}")
    fusion = number

def get_fusion():
    raise SystemExit("get_fusion was called")

def is_available(*device):
    raise SystemExit("is_available was trusted")

get_available_devices = is_available

class Event:
    record = query = synchronize = None

class CompileModule:
    from_module = build_tp_module = None

class config:
    cache_context = None

TclModule = Runnable = TpModule = set_stream = current_stream = empty_sharded = None

class Stream:
    def __init__(self, device):
        if fusion != 8:
            raise RuntimeError("no fusion was set before the first device")
"""

KERNELS = "def __getattr__(name):\n    return None\n"

SMI = """
class CoreStatus:
    Available, Occupied = "available", "occupied"

class Card:
    def __init__(self, name, status=CoreStatus.Available):
        self.name, self.status = name, status
    def device_name(self):
        return self.name
    def core_status(self):
        return {0: CoreStatus.Available, 1: self.status}

cards, on_bus = [Card("npu0"), Card("npu1", CoreStatus.Occupied)], 2

def list_devices():
    return cards

def list_pci_devices():
    return [object()] * on_bus

def driver_info():
    return "1.2.3 (fake)"
"""

FILES: Final[Mapping[str, str]] = {
    "numpy/__init__.py": "__version__ = '2.0.0+fake'\n",
    "torch/__init__.py": TORCH,
    "furiosa/torch/__init__.py": TORCH_FURIOSA,
    "furiosa/torch/_register.py": REGISTER,
    "furiosa/kernels/__init__.py": "",
    "furiosa/kernels/llama.py": KERNELS,
    "furiosa/kernels/qwen3.py": KERNELS,
    "furiosa/kernels/exaone4.py": KERNELS,
    "furiosa/kernels/gemma4.py": KERNELS,
    "furiosa_smi.py": SMI,
}


def write_fake_site(
    directory: Path, changed: Mapping[str, str] | None = None, *, version: str = VERSION
) -> Path:
    """Write the fakes below `directory`; `changed` replaces files by their names."""
    for name, text in {**FILES, **(changed or {})}.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for package in ("furiosa-torch", "furiosa-kernels", "furiosa-smi", "furiosa-tcc"):
        facts = directory / f"{package.replace('-', '_')}-{version}.dist-info" / "METADATA"
        facts.parent.mkdir()
        facts.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return directory
