"""The protocol's bounds on messages, made small so that short prompts reach them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from headrace.protocol import handoff, source
from headrace.testing.fault_lab.setting import MAX_PROGRESS, MAX_SPANS, MOST_SPANS

_BOUNDS: Final = (
    (handoff, "MAX_PROGRESS", MAX_PROGRESS),
    (source, "MAX_PROGRESS", MAX_PROGRESS),
    (source, "MAX_SPANS", MAX_SPANS),
    (source, "_EVEN_MESSAGES", MAX_PROGRESS * 3 // 4),
    (source, "MOST_SPANS", MOST_SPANS),
)


@contextmanager
def tiny_bounds() -> Iterator[None]:
    """At most MAX_PROGRESS messages of MAX_SPANS spans inside this block."""
    kept = [(module, name, getattr(module, name)) for module, name, _ in _BOUNDS]
    for module, name, bound in _BOUNDS:
        setattr(module, name, bound)
    try:
        yield
    finally:
        for module, name, bound in kept:
            setattr(module, name, bound)
