"""One attempt run by an engine, in a source process or in the owner's own: how it ends."""

from __future__ import annotations

import logging
import time
from array import array

from headrace.backends.base import PrefillEngine
from headrace.errors import Cancelled, PeerDied, Unquiet
from headrace.messages import Failed, Released
from headrace.plan import TOKEN_NBYTES
from headrace.protocol.source import SourceAttempt
from headrace.runtime.sink import SlotSink

_log = logging.getLogger("headrace.source")


def run_attempt(
    engine: PrefillEngine, attempt: SourceAttempt, sink: SlotSink, slot: memoryview
) -> list[Failed | Released]:
    """Prefill the prompt that lies in `slot`; returns what is still to be told, in this order.

    Whatever the engine raises fails its attempt and nothing else.

    Raises:
        PeerDied: the owner is gone, so there is nobody to tell.
        Unquiet: the slot may still be written, so its lease cannot be given back.
    """
    plan = attempt.plan
    prompt = slot[plan.slot.prompt_offset :][: TOKEN_NBYTES * plan.num_tokens]
    tokens = array("I", prompt.tobytes())
    attempt.start(time.monotonic_ns())
    try:
        engine.prefill_stream(tokens, sink, plan.start)
        last: list[Failed] = attempt.fail("the engine returned without its final")
    except Cancelled:
        _log.debug("attempt %s cancelled", attempt.prefill.attempt)
        last = attempt.fail("the engine gave up an attempt that nobody cancelled")
    except (PeerDied, Unquiet):
        raise
    except Exception as exc:
        _log.debug("attempt %s failed", attempt.prefill.attempt, exc_info=True)
        last = attempt.fail(f"{type(exc).__name__}: {exc}")
    return [*last, attempt.returned()]
