"""Where the environment of the ATOM decoder is found. Its owner makes it: rebel-compiler comes from
the vendor's own index, for those who have an account there.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import Final

from headrace.engine.atom.sdk import VENDOR
from headrace.engine.probing import version_of
from headrace.errors import BackendUnavailable

NAME: Final = "atom"
"""The decoder, as --decoder names it."""

VARIABLE: Final = "HEADRACE_ATOM_PYTHON"
PACKAGE: Final = "optimum-rbln"

SETUP: Final = (
    "Install headrace beside Rebellions' packages (PYTHON -m pip install headrace; it needs only "
    f"msgspec) and name that Python in {VARIABLE} or with --decoder-python; rebel-compiler comes "
    "from the vendor's own index, with an account, so headrace does not make this environment"
)


def find() -> str:
    """The interpreter of the decoder's environment: the variable's, or this one.

    Raises:
        BackendUnavailable: sdk_missing: none is named, and this one has not the vendor's packages.
    """
    if named := os.environ.get(VARIABLE):
        if shutil.which(named) is None:
            text = f"{named} is no program that can be run"
            raise BackendUnavailable(VENDOR, "sdk_missing", VARIABLE, text, SETUP)
        return named
    if version_of(PACKAGE) is None:
        text = f"{PACKAGE} not installed in {sys.prefix}, and {VARIABLE} is not set"
        raise BackendUnavailable(VENDOR, "sdk_missing", "environment", text, SETUP)
    return sys.executable
