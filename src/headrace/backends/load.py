"""Which engine or decoder a name stands for: a closed list, or any importable `module:factory`.

Only the module that is asked for is imported, so that a vendor's SDK is never touched by a process
that does not use it. A factory takes one mapping of options and returns the engine or decoder.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from headrace.backends.base import Decoder, PrefillEngine, PrefillsItself
from headrace.backends.legacy import LegacyEngine
from headrace.errors import BackendUnavailable, Refused

SOURCES: Final[dict[str, str]] = {
    "torch": "headrace.backends.torch:open",
    "cuda": "headrace.backends.cuda_source:open",
    "rngd": "headrace.backends.rngd:open",
    "vllm": "headrace.backends.vllm:open",
    "replay": "headrace.backends.replay:open",
}
DECODERS: Final[dict[str, str]] = {
    "cpu": "headrace.backends.cpu:open",
    "cuda": "headrace.backends.cuda:open",
    "atom": "headrace.backends.atom:open",
    "null": "headrace.backends.null:open",
}
ONE_LANE: Final = ("atom",)
"""The listed decoders that have one lane, and so no option `lanes`."""

_HINTS: Final[dict[str, str]] = {
    "rngd": "It runs in an environment of its own: run headrace rngd setup, and leave "
    "--source-python out",
    "vllm": "It runs in an environment of its own: run headrace vllm-env, and name its Python with "
    "--source-python",
    "atom": "It runs in the vendor's own environment: name its Python in HEADRACE_ATOM_PYTHON or "
    "with --decoder-python",
}


def open_source(name: str, options: Mapping[str, Any]) -> PrefillEngine:
    """The prefill engine called `name`, or made by the factory `module:factory`.

    An engine that has only `prefill(tokens)` is wrapped and serves the whole route.

    Raises:
        Refused: no such name, or nothing importable there.
        BackendUnavailable: it needs a package that is not installed here.
    """
    engine = find_factory("source", name)(options)
    if hasattr(engine, "prefill") and not hasattr(engine, "prefill_stream"):
        return LegacyEngine(engine)
    return cast(PrefillEngine, engine)


def open_decoder(name: str, options: Mapping[str, Any]) -> Decoder:
    """The decoder called `name`, or made by the factory `module:factory`; raises as above."""
    return cast(Decoder, find_factory("decoder", name)(options))


def find_factory(role: str, name: str) -> Callable[[Mapping[str, Any]], Any]:
    """What a name of a `source` or a `decoder` stands for; raises as `open_source`."""
    check_name(role, name)
    known = SOURCES if role == "source" else DECODERS
    module_name, _, attribute = known.get(name, name).partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as exc:
        if name in known:
            raise BackendUnavailable(
                name,
                "sdk_missing",
                f"import {module_name}",
                str(exc),
                _HINTS.get(name, "Install headrace[cpu] into the environment that runs it"),
            ) from exc
        raise Refused(f"{role} {name!r}: cannot import it: {exc}", field=role) from exc
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise Refused(f"{role} {name!r}: {module_name} has no factory {attribute!r}", field=role)
    return cast(Callable[[Mapping[str, Any]], Any], factory)


def size_options(decoder: str, *, lanes: int, context: int) -> dict[str, int]:
    """The options that say how many lanes a decoder has, and how many positions each holds."""
    return {"context": context} if decoder in ONE_LANE else {"lanes": lanes, "context": context}


def prefill_engine_of(decoder: Decoder) -> PrefillEngine | None:
    """The decoder's own prefill engine, for the owner's process; None if it has none."""
    return decoder.prefill_engine() if isinstance(decoder, PrefillsItself) else None


def check_name(role: str, name: str) -> None:
    """Refuse a name that is neither listed for `role` nor of the form `module:factory`."""
    known = SOURCES if role == "source" else DECODERS
    if name not in known and ":" not in name:
        raise Refused(
            f"unknown {role} {name!r}; known are {', '.join(known)}, or give module:factory",
            field=role,
        )
