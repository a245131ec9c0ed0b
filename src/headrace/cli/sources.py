"""What `--source` decides of the other options; each refuses with one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from headrace.engine import environments
from headrace.engine.environments import RNGD
from headrace.errors import Refused
from headrace.runtime.interpreters import check_interpreter

TAKE_A_MODEL: Final = ("torch", "cuda", "rngd")
REPLAY: Final = "replay"
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


def options_for(
    source: str, model: Mapping[str, Any], *, emulate: bool = False, share_device: bool = False
) -> dict[str, Any]:
    """The options of a source that the flags give: its model, unless it is replay.

    `model`: of the checkpoint, empty if none was named.
    """
    if source == REPLAY:
        return {}
    options = dict(model)
    if source == RNGD.name:
        flags = {"emulate": emulate, "share_device": share_device}
        options |= {name: True for name, given in flags.items() if given}
    return options


def interpreter_for(source: str, given: str | None) -> str | None:
    """The interpreter of a source's environment: the given one, or for rngd the one that
    `headrace rngd setup` made; None for this process's own.

    Raises:
        BackendUnavailable: there is no environment for rngd.
        Refused: it cannot run headrace, or its headrace is another version.
    """
    interpreter = environments.find(RNGD) if given is None and source == RNGD.name else given
    if interpreter is not None:
        check_interpreter(interpreter, "--source-python")
    return interpreter


def is_emulated(source: str, source_options: Mapping[str, Any]) -> bool:
    """Whether a source's kernels run on the CPU, whichever option asked for it."""
    return source == RNGD.name and bool(source_options.get("emulate"))


def pair_name(source: str, decoder: str, *, emulated: bool, fake: bool) -> str:
    """A pair as it is named wherever a figure of it is shown.

    An emulated source always says so, and so does a decoder on a fake of its vendor's packages.
    """
    marks = " (emulated)" if emulated else "", " (fake)" if fake else ""
    return f"{source}{marks[0]} -> {decoder}{marks[1]}"
