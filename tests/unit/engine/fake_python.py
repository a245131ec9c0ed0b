"""A fake Python for the tests of environments: a script that makes what `venv` makes, and a fake
pip in it that does what the test says.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

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
