"""headrace: stream the KV cache of a request into a decoder while its prefill is still running.

The public names are below; everything else may change. They are loaded when first used, so that
importing the package needs msgspec alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headrace.version import VERSION

if TYPE_CHECKING:
    from headrace.backends.base import (
        Caps,
        Cells,
        Decoder,
        Done,
        Entry,
        Fence,
        PrefillEngine,
        PrefillSink,
        PrefillsItself,
        Reservation,
        SlotView,
        SpanWriter,
    )
    from headrace.backends.legacy import WholePrefill
    from headrace.backends.null import NullDecoder, decoder_like
    from headrace.errors import (
        BackendUnavailable,
        Cancelled,
        Closed,
        DeviceError,
        HeadraceError,
        LocalProtocolError,
        PeerDied,
        Refused,
        RemoteProtocolError,
        WouldBlock,
    )
    from headrace.geometry import Full, Layer, Manifest, Part, Shared, Sliding
    from headrace.ids import Span
    from headrace.messages import Sampling
    from headrace.plan import Copy, Plan, Region
    from headrace.protocol.commands import Cause
    from headrace.runtime.owner import DecoderOwner
    from headrace.runtime.prefill_worker import (
        PrefillFailed,
        PrefillResult,
        SubprocessPrefillWorker,
    )
    from headrace.runtime.requests import Request, RequestOptions
    from headrace.runtime.supervisor import RestartPolicy
    from headrace.runtime.worker import SourceHandle

__version__ = VERSION

_HOMES = {
    "BackendUnavailable": "headrace.errors",
    "Cancelled": "headrace.errors",
    "Caps": "headrace.backends.base",
    "Cause": "headrace.protocol.commands",
    "Closed": "headrace.errors",
    "Cells": "headrace.backends.base",
    "Copy": "headrace.plan",
    "Decoder": "headrace.backends.base",
    "DecoderOwner": "headrace.runtime.owner",
    "DeviceError": "headrace.errors",
    "Done": "headrace.backends.base",
    "Entry": "headrace.backends.base",
    "Fence": "headrace.backends.base",
    "Full": "headrace.geometry",
    "HeadraceError": "headrace.errors",
    "Layer": "headrace.geometry",
    "LocalProtocolError": "headrace.errors",
    "Manifest": "headrace.geometry",
    "NullDecoder": "headrace.backends.null",
    "Part": "headrace.geometry",
    "PeerDied": "headrace.errors",
    "Plan": "headrace.plan",
    "PrefillEngine": "headrace.backends.base",
    "PrefillFailed": "headrace.runtime.prefill_worker",
    "PrefillResult": "headrace.runtime.prefill_worker",
    "PrefillSink": "headrace.backends.base",
    "PrefillsItself": "headrace.backends.base",
    "Refused": "headrace.errors",
    "Region": "headrace.plan",
    "RemoteProtocolError": "headrace.errors",
    "Request": "headrace.runtime.requests",
    "RequestOptions": "headrace.runtime.requests",
    "Reservation": "headrace.backends.base",
    "RestartPolicy": "headrace.runtime.supervisor",
    "Sampling": "headrace.messages",
    "Shared": "headrace.geometry",
    "Sliding": "headrace.geometry",
    "SlotView": "headrace.backends.base",
    "SourceHandle": "headrace.runtime.worker",
    "Span": "headrace.ids",
    "SpanWriter": "headrace.backends.base",
    "SubprocessPrefillWorker": "headrace.runtime.prefill_worker",
    "WholePrefill": "headrace.backends.legacy",
    "WouldBlock": "headrace.errors",
    "decoder_like": "headrace.backends.null",
}

__all__ = [
    "BackendUnavailable",
    "Cancelled",
    "Caps",
    "Cause",
    "Cells",
    "Closed",
    "Copy",
    "Decoder",
    "DecoderOwner",
    "DeviceError",
    "Done",
    "Entry",
    "Fence",
    "Full",
    "HeadraceError",
    "Layer",
    "LocalProtocolError",
    "Manifest",
    "NullDecoder",
    "Part",
    "PeerDied",
    "Plan",
    "PrefillEngine",
    "PrefillFailed",
    "PrefillResult",
    "PrefillSink",
    "PrefillsItself",
    "Refused",
    "Region",
    "RemoteProtocolError",
    "Request",
    "RequestOptions",
    "Reservation",
    "RestartPolicy",
    "Sampling",
    "Shared",
    "Sliding",
    "SlotView",
    "SourceHandle",
    "Span",
    "SpanWriter",
    "SubprocessPrefillWorker",
    "WholePrefill",
    "WouldBlock",
    "__version__",
    "decoder_like",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")
