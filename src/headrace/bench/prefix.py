"""Time to the first token of a prompt that the decoder has kept, against that of a cold one.

In each repeat a prompt that nobody has seen is served in turn by each of these, the next repeat in
the reverse order as far as one does not need the other before it:

    cold                prefilled, and not kept
    first               prefilled, and kept: what keeping costs
    identical           the same again: the kept memory is gone on from as it lies
    identical-copied    the same while another lane holds that memory, so its rows are copied
    cold-longer         the same and `rest` tokens more, prefilled, cut where the first part ends
    longer-KIND         the same, gone on from what is kept; KIND is who may compute the rest:
                        `recompute` (the source, from 0), `own-cache` (the source, from its cache)
                        or `owner` (the owner or the source, as the owner expects to be faster)

Each kind has a source, a decoder and an owner of its own, one thread each. Before it is measured an
owner serves two prompts cold, so that it knows how fast its source is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

from headrace.backends.base import Decoder
from headrace.backends.load import open_decoder, prefill_engine_of
from headrace.bench.families import random_prompt
from headrace.bench.rows import RowFile, busy_share
from headrace.bench.stand import Stand, finished, load_1min, pairing_facts
from headrace.engine.text import max_positions_of
from headrace.errors import Refused
from headrace.runtime.requests import Request, RequestOptions
from headrace.runtime.worker import SourceHandle

CLAIM: Final = "prefix"
KEY: Final = ("model", "prompt_tokens", "rest", "kind", "label", "repeat")
KINDS: Final = ("recompute", "own-cache", "owner")
KEPT: Final = 4  # memories beside the lanes
LANES: Final = 2
OWN_CACHE_NBYTES: Final = 1 << 30
MARGIN: Final = 8
_WARM_UP: Final = 2
_WARM_SEED: Final = 1 << 20
_WARM_STEPS: Final = 2  # so that an owner knows its decode step


class Settings(NamedTuple):
    """What is measured: a model in float32, a prompt's length, and tokens more."""

    name: str
    directory: Path
    vocab_size: int
    num_tokens: int
    rest: int

    @property
    def context(self) -> int:
        return self.num_tokens + self.rest + MARGIN


def run(settings: Settings, repeats: int, file: RowFile) -> Iterator[dict[str, Any]]:
    """Measure what `file` does not hold yet, append it there, and yield each row.

    Raises:
        RequestFailed: a request did not finish. Refused: the model cannot hold the prompts.
    """
    longest = max_positions_of(settings.directory)
    if settings.context > longest:
        raise Refused(
            f"{settings.name} holds {longest} positions and {settings.context} are needed; ask for "
            "a shorter prompt",
            field="tokens",
        )
    for kind in KINDS:
        missing = [at for at in range(repeats) if _last(settings, kind, at) not in file]
        if not missing:
            continue
        with ExitStack() as stack:
            stand = stack.enter_context(_open(settings, kind))
            for warm in range(_WARM_UP):
                tokens = _prompt(settings, _WARM_SEED + warm, settings.rest)
                stand.serve(tokens, _options(prefix="shared", max_tokens=_WARM_STEPS + 1))
            for repeat in missing:
                for row in _repeat(stand, settings, kind, repeat):
                    yield file.append(row)


def _repeat(stand: Stand, settings: Settings, kind: str, repeat: int) -> Iterator[dict[str, Any]]:
    prompt = _prompt(settings, repeat, 0)
    longer = _prompt(settings, repeat, settings.rest)
    cut = (settings.num_tokens,)

    def served(label: str, tokens: Sequence[int], **asked: Any) -> dict[str, Any]:
        busy = busy_share()
        request = _serve(stand, tokens, _options(**asked))
        row = _row(settings, kind, label, repeat, request)
        return row | {"busy_before": round(busy, 3), "load_1min": load_1min()} | stand.facts

    def colds() -> Iterator[dict[str, Any]]:
        yield served("cold", prompt)
        yield served("cold-longer", longer, prefill_cuts=cut)

    def kept() -> Iterator[dict[str, Any]]:
        yield served("first", prompt, prefix="shared")
        yield served("identical", prompt, prefix="shared")
        holder = _serve(stand, prompt, _options(prefix="shared", hold=True))
        try:
            yield served("identical-copied", prompt, prefix="shared")
        finally:
            stand.owner.release(holder)
        yield served(f"longer-{kind}", longer, prefix="shared")

    parts = (colds, kept) if repeat % 2 == 0 else (kept, colds)
    for part in parts:
        yield from part()


def _serve(stand: Stand, tokens: Sequence[int], options: RequestOptions) -> Request:
    """Run one request; the owner need not come to rest after it, since an entry may be held."""
    request = stand.owner.submit(tokens, options)
    stand.owner.run_until_done(request)
    return finished(request)


def _row(
    settings: Settings, kind: str, label: str, repeat: int, request: Request
) -> dict[str, Any]:
    measured, reuse = request.measured, request.reuse
    if measured is None:
        raise Refused("a request without figures")
    return {
        **_last(settings, kind, repeat),
        "label": label,
        "ttft_ns": measured.first_token_ns - measured.submitted_ns,
        "kv_nbytes": measured.kv_nbytes,
        "kept_positions": 0 if reuse is None else reuse.positions,
        "remainder": "" if reuse is None else reuse.remainder,
        "reason": "" if reuse is None else reuse.reason,
    }


def _last(settings: Settings, kind: str, repeat: int) -> dict[str, Any]:
    """What identifies the last row of a repeat."""
    return {
        "model": settings.name,
        "prompt_tokens": settings.num_tokens,
        "rest": settings.rest,
        "kind": kind,
        "label": "cold-longer" if repeat % 2 else f"longer-{kind}",
        "repeat": repeat,
    }


def _open(settings: Settings, kind: str) -> Stand:
    options: dict[str, Any] = {
        "model": str(settings.directory),
        "dtype": "float32",
        "threads": 1,
    }
    own = {"own_cache_nbytes": OWN_CACHE_NBYTES} if kind == "own-cache" else {}
    with ExitStack() as undo:
        handle = SourceHandle("torch", options | own)
        undo.callback(handle.close)
        handle.start()  # it loads while this process loads the decoder
        decoder = _decoder(settings, options)
        undo.callback(decoder.close)
        local = prefill_engine_of(decoder) if kind == "owner" else None
        facts = pairing_facts(decoder)
        stand = Stand(handle, decoder, context=settings.context, facts=facts, local=local)
        undo.pop_all()
    return stand


def _decoder(settings: Settings, options: dict[str, Any]) -> Decoder:
    held = {"lanes": LANES, "context": settings.context}
    probe = open_decoder("cpu", options | {"lanes": 1, "context": settings.context})
    one = probe.statistics()["nbytes"]
    probe.close()
    # The tails of sliding layers are at most what a lane's memory has of them.
    return open_decoder("cpu", options | held | {"keep_nbytes": 2 * KEPT * one})


def _options(**asked: Any) -> RequestOptions:
    return RequestOptions(**{"max_tokens": 1, **asked})


def _prompt(settings: Settings, repeat: int, rest: int) -> list[int]:
    """A prompt of its own for each repeat; with `rest` it begins as without."""
    whole = random_prompt(settings.num_tokens + settings.rest, settings.vocab_size, seed=repeat)
    return whole[: settings.num_tokens + rest]
