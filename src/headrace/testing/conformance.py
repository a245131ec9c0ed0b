"""The suites that an adapter's author subclasses, in one place.

    from headrace.testing.conformance import DecoderConformance, PrefillEngineConformance
    from headrace.testing.conformance import PairConformance

The first two check one side alone and need no process. The third checks a source and a decoder
together, with real processes and on real devices; `headrace check` runs the same.
"""

from __future__ import annotations

from headrace.testing.conformance_decoder import DecoderConformance
from headrace.testing.conformance_engine import PrefillEngineConformance
from headrace.testing.pair.cases import PairConformance

__all__ = ["DecoderConformance", "PairConformance", "PrefillEngineConformance"]
