"""The only file that imports Rebellions' modules; whoever needs one is handed it."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import Any, Final

from headrace.engine.atom import smi
from headrace.engine.atom.sdk import VENDOR, Sdk
from headrace.errors import BackendUnavailable

SDK_VERSION: Final = "0.12"
"""What the engine was written for; others are refused by preflight."""

PACKAGES: Final = ("optimum-rbln", "rebel-compiler", "torch")
"""Whose versions decide what is computed and how it is kept."""


def open_sdk() -> Sdk:
    """Import what the engine uses; preflight has told what is missing before."""
    rebel = import_rebel()
    aligned = import_kv_cache().aligned_tensor
    models = import_optimum().RBLNAutoModelForCausalLM

    def load(directory: str, device: int) -> Any:
        return models.from_pretrained(directory, export=False, rbln_device=device)

    return Sdk(
        name=VENDOR,
        rebel=rebel,
        load=load,
        aligned=aligned,
        versions={name: version(name) for name in PACKAGES},
        driver=_driver(),
    )


def sdk_named(name: str | None) -> Sdk:
    """The installed packages, or what `module:factory` makes in their place, which is a fake."""
    if name is None:
        return open_sdk()
    module, _, factory = name.partition(":")
    made: Sdk = getattr(import_module(module), factory)()
    return made


def import_rebel() -> ModuleType:
    """`rebel`, which lists cards and runs compiled models."""
    return import_module("rebel")


def import_kv_cache() -> ModuleType:
    """`rebel.kv_cache`, which `rebel` does not import by itself."""
    return import_module("rebel.kv_cache")


def import_optimum() -> ModuleType:
    """`optimum.rbln`, whose classes are imported when they are first asked for."""
    return import_module("optimum.rbln")


def _driver() -> str:
    """The kernel driver's version; empty where nothing tells it."""
    with suppress(BackendUnavailable):
        return smi.ask().driver
    return ""
