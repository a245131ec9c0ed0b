"""The only file that imports FuriosaAI's modules; whoever needs one is handed it."""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import Any

from headrace.engine.rngd.sdk import Sdk
from headrace.errors import BackendUnavailable, Refused

FUSIONS = (1, 2, 4, 8, 16, 32)
"""How many PEs can be one device; a chip has eight."""


PACKAGES = ("furiosa-torch", "furiosa-kernels", "furiosa-smi", "furiosa-tcc", "torch")
"""Whose versions decide what is computed; furiosa-tcc is the compiler."""


def open_sdk() -> Sdk:
    """Import what the engine uses; preflight has told what is missing before."""
    torch = import_torch_furiosa()
    # Registering the device turns its logger all the way up, which is a line for each kernel call.
    logging.getLogger("furiosa_torch").setLevel(logging.WARNING)
    return Sdk(
        name="furiosa",
        torch=torch,
        kernels=import_kernels,
        smi=import_smi(),
        versions={name: version(name) for name in PACKAGES},
    )


def sdk_named(name: str | None) -> Sdk:
    """The installed packages, or what `module:factory` makes in their place, which is a fake."""
    if name is None:
        return open_sdk()
    module, _, factory = name.partition(":")
    made: Sdk = getattr(import_module(module), factory)()
    return made


def import_torch_furiosa() -> ModuleType:
    """`furiosa.torch`, with the device `furiosa` registered in torch.

    Where torch loads no device backends by itself (TORCH_DEVICE_BACKEND_AUTOLOAD=0, as in each
    process that headrace starts), importing `furiosa.torch` registers nothing.
    """
    # The vendor has a log of its own; the root's handlers would print all of it a second time.
    logging.getLogger("furiosa_torch").propagate = False
    import_module("furiosa.torch._register")
    return import_module("furiosa.torch")


def import_kernels(family: str) -> ModuleType:
    """`furiosa.kernels.FAMILY`, the factories of a model family's kernels."""
    return import_module(f"furiosa.kernels.{family}")


def import_smi() -> ModuleType:
    """`furiosa_smi`, which lists cards and needs no torch."""
    return import_module("furiosa_smi")


def set_fusion_once(torch_furiosa: Any, fusion: int) -> None:
    """Have devices of `fusion` PEs in this process; the same number once more is harmless.

    The vendor's runtime takes it once. Whatever asks for a device, a stream or the fusion itself
    before fixes it at 1, so nothing may call `get_fusion` ahead of this.

    Raises:
        Refused: there is no such fusion.
        BackendUnavailable: device_busy: this process has another already.
    """
    if fusion not in FUSIONS:
        known = ", ".join(map(str, FUSIONS))
        raise Refused(f"fusion is {fusion}; choose one of {known}", field="fusion")
    try:
        torch_furiosa.set_fusion(fusion)
    except RuntimeError as exc:
        raise BackendUnavailable(
            "furiosa",
            "device_busy",
            f"set_fusion({fusion})",
            str(exc),
            "Start another process: the runtime takes its fusion once",
        ) from exc
