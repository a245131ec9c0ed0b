"""A directory of fake vendor packages and a fake `rbln-smi`, which preflight's child finds first.

They have the names that preflight looks for, and nothing behind them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

VERSION: Final = "0.12.0"
TORCH_VERSION: Final = "2.13.0"

TORCH = f"""
import os
assert os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0", "this process would load any backend"
__version__ = "{TORCH_VERSION}+fake"
"""

REBEL = """
names = ["RBLN-CA25", "RBLN-CA25"]

class Runtime:
    pass

class RBLNCompiledModel:
    pass

def npu_is_available(index):
    return index < len(names)

def get_npu_name(index):
    return names[index] if index < len(names) else None

def device_count():
    return len(names)
"""

KV_CACHE = "def aligned_tensor(numel):\n    return [0.0] * numel\n"

OPTIMUM = """
import rebel

class RBLNAutoModelForCausalLM:
    @classmethod
    def from_pretrained(cls, *arguments, **keywords):
        return arguments, keywords
"""

FILES: Final[Mapping[str, str]] = {
    "numpy/__init__.py": "__version__ = '2.0.0+fake'\n",
    "torch/__init__.py": TORCH,
    "rebel/__init__.py": REBEL,
    "rebel/kv_cache.py": KV_CACHE,
    "optimum/rbln/__init__.py": OPTIMUM,
}

SMI = """{
  "KMD_version": "3.5.1",
  "devices": [
    {
      "npu": 0, "name": "RBLN-CA25", "uuid": "a", "device": "rbln0", "status": "normal",
      "pci": {"dev": "0x1250", "bus_id": "0000:51:00.0", "numa_node": "0"},
      "memory": {"used": "0", "total": "16877879296"}, "util": "0.0"
    },
    {
      "npu": 1, "name": "RBLN-CA25", "uuid": "b", "device": "rbln1", "status": "normal",
      "pci": {"dev": "0x1250", "bus_id": "0000:52:00.0", "numa_node": "0"},
      "memory": {"used": "3758096384", "total": "16877879296"}, "util": "50.0"
    }
  ],
  "contexts": [
    {"ctx_id": "10001", "npu": 1, "pid": "4711", "process": "python3", "memalloc": "3.5GiB"}
  ]
}"""
"""What the fake `rbln-smi -j` prints: two cards, and one of them used."""


def write_fake_site(
    directory: Path, changed: Mapping[str, str] | None = None, *, version: str = VERSION
) -> Path:
    """Write the fake packages below `directory`; `changed` replaces files by their names."""
    for name, text in {**FILES, **(changed or {})}.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    write_facts(directory, "rebel-compiler", version)
    write_facts(directory, "torch", f"{TORCH_VERSION}+fake")
    needs = [f"torch=={TORCH_VERSION}+cpu", "torchvision==0.28.0+cpu; python_version >= '3'"]
    write_facts(directory, "optimum-rbln", version, needs)
    return directory


def write_facts(
    directory: Path, package: str, version: str, requires: list[str] | None = None
) -> None:
    """Write what an installed package says of itself."""
    facts = directory / f"{package.replace('-', '_')}.dist-info" / "METADATA"
    facts.parent.mkdir(parents=True, exist_ok=True)
    lines = ["Metadata-Version: 2.1", f"Name: {package}", f"Version: {version}"]
    facts.write_text(
        "\n".join([*lines, *(f"Requires-Dist: {each}" for each in requires or []), ""])
    )


def write_fake_smi(directory: Path, does: str = f"cat <<'END'\n{SMI}\nEND\n") -> Path:
    """Write a program `rbln-smi` that does this, in the words of a shell."""
    directory.mkdir(exist_ok=True)
    path = directory / "rbln-smi"
    path.write_text(f'#!/bin/sh\n[ "$*" = -j ] || exit 9\n{does}\n')
    path.chmod(0o755)
    return path


def printing(said: str) -> str:
    """What a fake `rbln-smi` does that prints this."""
    return f"cat <<'END'\n{said}\nEND\n"
