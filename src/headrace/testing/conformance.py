"""The suites that an adapter's author subclasses, in one place.

    from headrace.testing.conformance import DecoderConformance, PrefillEngineConformance
    from headrace.testing.conformance import KeepingConformance, PairConformance

The first three check one side alone and need no process; `KeepingConformance` is for a decoder that
keeps entries. `PairConformance` checks a source and a decoder together, with real processes and on
real devices; `headrace check` runs the same.
"""

from __future__ import annotations

from headrace.testing.conformance_decoder import DecoderConformance
from headrace.testing.conformance_engine import PrefillEngineConformance
from headrace.testing.conformance_keeping import KeepingConformance
from headrace.testing.pair.cases import PairConformance

__all__ = [
    "DecoderConformance",
    "KeepingConformance",
    "PairConformance",
    "PrefillEngineConformance",
]
