"""A fake Python for the tests of environments: a script that makes what `venv` makes, and a fake
pip in it that does what the test says; and small wheels for a real pip.
"""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

PIP_WORKS: Final = "echo Successfully installed"

_SCRIPT = """#!/bin/sh
case "$*" in
*"-m venv"*)
    for directory; do :; done
    mkdir -p "$directory/bin" "$directory/site"
    cp "$0" "$directory/bin/python"
    echo "environment=$PYTHONPATH$PIP_TARGET"
    ;;
*"-m pip"*)
    cd "$(dirname "$0")/.."
    echo "$@" > pip-arguments
    echo "$TMPDIR" > pip-temporary
    {pip}
    ;;
*get_path*) cd "$(dirname "$0")/../site" && pwd ;;
*) exec {python} "$@" ;;
esac
"""


def write_fake_python(path: Path, pip: str = PIP_WORKS) -> str:
    """Write the script; `pip` is what its environment's pip does, in the words of a shell."""
    path.write_text(_SCRIPT.replace("{pip}", pip).replace("{python}", sys.executable))
    path.chmod(0o755)
    return str(path)


def with_a_quick_venv(directory: Path) -> str:
    """This Python, but `venv` links its pip into what it makes: unpacking another takes seconds."""
    spec = find_spec("pip")
    if spec is None or spec.origin is None:
        pytest.skip("there is no pip here")
    python = directory / "quick"
    python.write_text(
        f"""#!/bin/sh
for directory; do :; done
{sys.executable} -m venv --without-pip "$directory"
cd "$directory"/lib/python3*/site-packages && ln -s {Path(spec.origin).parent} pip
"""
    )
    python.chmod(0o755)
    return str(python)


def write_wheel(
    directory: Path, name: str, version: str = "1.0", requires: Sequence[str] = ()
) -> None:
    """Write a wheel of one empty module."""
    module = name.replace("-", "_")
    required = "".join(f"Requires-Dist: {each}\n" for each in requires)
    info = f"{module}-{version}.dist-info"
    facts = {
        f"{module}.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{required}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(directory / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in facts.items():
            wheel.writestr(path, text)
