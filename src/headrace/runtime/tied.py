"""Run another module's `main` in a child that does not outlive its parent.

Started as `INTERPRETER -m headrace.runtime.tied MODULE ARGUMENTS...` with the parent's pid in
`HEADRACE_PARENT_PID`, in whatever environment the module needs.
"""

from __future__ import annotations

import sys
from importlib import import_module

from headrace.process import die_with_parent


def main(arguments: list[str]) -> int:
    """The module's exit status."""
    die_with_parent()
    module, *rest = arguments
    status: int = import_module(module).main(rest)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
