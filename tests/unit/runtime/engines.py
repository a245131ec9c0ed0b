"""Engines that go wrong before they serve anything."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from headrace.backends.base import PrefillEngine
from headrace.backends.replay import ReplayEngine
from headrace.backends.replay import open as open_replay
from headrace.channel import Channel
from headrace.errors import BackendUnavailable, Refused
from headrace.geometry import Manifest, Sliding
from headrace.messages import Attached

missing = None


class _Changed(ReplayEngine):
    def manifest(self) -> Manifest:
        manifest = super().manifest()
        first, *rest = manifest.layers
        return replace(manifest, layers=(replace(first, kind=Sliding(16, 15)), *rest))


class _BadManifest(ReplayEngine):
    def manifest(self) -> Manifest:
        raise ZeroDivisionError("no layers to divide by")


def _replay(kind: type[ReplayEngine], options: Mapping[str, Any]) -> PrefillEngine:
    return kind(open_replay(options)._options)


def open_short_tail(options: Mapping[str, Any]) -> PrefillEngine:
    return _replay(_Changed, options)


def open_bad_manifest(options: Mapping[str, Any]) -> PrefillEngine:
    return _replay(_BadManifest, options)


def open_raising(options: Mapping[str, Any]) -> PrefillEngine:
    raise OSError("no such device")


def open_surrogate(options: Mapping[str, Any]) -> PrefillEngine:
    """An error whose text is no UTF-8, as a path from the file system may be."""
    raise OSError(f"no file {os.fsdecode(b'caf' + bytes([0xE9]))}")


def open_refusing(options: Mapping[str, Any]) -> PrefillEngine:
    raise Refused("will not do float8", field="dtype")


def open_unavailable(options: Mapping[str, Any]) -> PrefillEngine:
    raise BackendUnavailable("vendor", "probe", "ls /dev/npu", "nothing there", "Buy one")


def open_slow(options: Mapping[str, Any]) -> PrefillEngine:
    """Loads until somebody writes into a FIFO, which nobody does."""
    with open(options["pipe"], "rb") as pipe:
        pipe.read()
    return open_replay({})


def _channel() -> Channel[Any, Any]:
    """The channel of this source process, which its main function holds."""
    return next(each for each in gc.get_objects() if isinstance(each, Channel))


def open_babbling(options: Mapping[str, Any]) -> PrefillEngine:
    _channel().send(Attached(7))
    return open_replay({})


def open_descriptors(options: Mapping[str, Any]) -> PrefillEngine:
    _channel().send(Attached(7), [2, 2])
    return open_replay({})


def open_short(options: Mapping[str, Any]) -> PrefillEngine:
    raise Refused("needs 9 bytes, 8 bytes available", shortage=True)


def open_out_of_memory(options: Mapping[str, Any]) -> PrefillEngine:
    raise MemoryError
