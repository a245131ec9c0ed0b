"""headrace: stream the KV cache of a request into a decoder while its prefill is still running.

The public names are below; everything else may change. They are loaded when first used, so that
importing the package needs msgspec alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headrace.version import VERSION

if TYPE_CHECKING:
    from headrace.backends.base import Decoder, PrefillEngine, PrefillSink
    from headrace.geometry import Manifest
    from headrace.runtime.owner import DecoderOwner
    from headrace.runtime.prefill_worker import PrefillResult, SubprocessPrefillWorker
    from headrace.runtime.requests import Request, RequestOptions
    from headrace.runtime.worker import SourceHandle

__version__ = VERSION

_HOMES = {
    "Decoder": "headrace.backends.base",
    "DecoderOwner": "headrace.runtime.owner",
    "Manifest": "headrace.geometry",
    "PrefillEngine": "headrace.backends.base",
    "PrefillResult": "headrace.runtime.prefill_worker",
    "PrefillSink": "headrace.backends.base",
    "Request": "headrace.runtime.requests",
    "RequestOptions": "headrace.runtime.requests",
    "SourceHandle": "headrace.runtime.worker",
    "SubprocessPrefillWorker": "headrace.runtime.prefill_worker",
}

__all__ = [
    "Decoder",
    "DecoderOwner",
    "Manifest",
    "PrefillEngine",
    "PrefillResult",
    "PrefillSink",
    "Request",
    "RequestOptions",
    "SourceHandle",
    "SubprocessPrefillWorker",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")
