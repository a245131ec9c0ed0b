"""What `--source` decides of the other options; each refuses with one sentence."""

from __future__ import annotations

from typing import Final

from headrace.engine import environments
from headrace.engine.environments import RNGD
from headrace.errors import Refused

TAKE_A_MODEL: Final = ("torch", "cuda", "rngd")
RNGD_DTYPE: Final = "bfloat16"
DTYPE: Final = "float32"


def check_source(source: str, *, dtype: str | None, emulate: bool) -> None:
    """Refuse --emulate for another source than rngd, and a dtype that rngd does not compute in."""
    if emulate and source != RNGD.name:
        raise Refused(f"--emulate is for --source rngd, and it is {source}; leave --emulate out")
    if source == RNGD.name and dtype not in (None, RNGD_DTYPE):
        raise Refused(
            f"--dtype is {dtype} and --source rngd computes in {RNGD_DTYPE}; leave --dtype out",
            field="dtype",
        )


def dtype_for(source: str, given: str | None) -> str:
    """The dtype of weights and cache, on both sides."""
    return given or (RNGD_DTYPE if source == RNGD.name else DTYPE)


def interpreter_for(source: str, given: str | None) -> str | None:
    """The interpreter of a source's environment: the given one, or for rngd the one that
    `headrace rngd setup` made.

    Raises:
        BackendUnavailable: there is no environment for rngd.
    """
    return environments.find(RNGD) if given is None and source == RNGD.name else given
