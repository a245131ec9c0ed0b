"""The command line starts where nothing heavy is installed, to say what is missing."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "numpy", "transformers", "tokenizers", "safetensors", "matplotlib", "gguf")


def test_the_commands_are_there_without_any_heavy_package() -> None:
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in HEAVY)
    code = f"import sys; {blocked}from headrace.cli import run_command; run_command(['--version'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
