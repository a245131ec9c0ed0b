"""Back-to-back requests at an owner of one lane: from the end of A to the first token of B.

B is submitted right after A and is prefilled while A decodes. A decodes for as many tokens as take
a `share` of B's prefill, so that B's prefill is over when A ends, or is not. Three modes:

    off        no prefetch: B is granted a slot when A has given the lane back; streamed
    whole      prefetch, by the whole route: all of B is told and imported after its prefill
    streamed   prefetch, by layer group: what is told before A ends is parked and imported then, the
               rest is streamed live

A is streamed in every mode. Without prefetch the owner, its decoder and its source are others than
with it, and all are warm. Each repeat takes the modes once forth and once back (`half`), the next
one begins with another; ratios are taken within a half. What the import of B takes alone, its
prefill and a decode step are measured first.

The goal of the streamed mode: the time is at most the import of what was parked and one layer
group. It can be kept only where B's prefill is over when A ends: then the group is its import.
Where some of the prefill stays, nothing is faster than that, so the bound of such a row is what
stays of the prefill or the import of what was parked, whichever is longer, and one group, its
computing and its import. Nothing is added for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from headrace.backends.base import Decoder
from headrace.backends.load import DECODERS, open_decoder, size_options
from headrace.bench import paced
from headrace.bench.families import random_prompt
from headrace.bench.rows import RowFile, busy_share
from headrace.bench.stand import Stand, finished, load_1min, pairing_facts
from headrace.errors import Refused
from headrace.messages import Measured, Route
from headrace.runtime.requests import Request, RequestOptions
from headrace.runtime.worker import SourceHandle

CLAIM: Final = "lane"
KEY: Final = ("setting", "prompt_tokens", "share", "mode", "repeat", "half")
NUM_SLOTS: Final = 2
_LEARNED: Final = 3  # runs that a figure of B alone is the least of
_WARM_STEPS: Final = 4


class Mode(NamedTuple):
    """How B goes."""

    name: str
    prefetch_depth: int
    route: Route


MODES: Final = (
    Mode("off", 0, "streamed"),
    Mode("whole", 1, "whole"),
    Mode("streamed", 1, "streamed"),
)


@dataclass(frozen=True)
class Setting:
    """The pairing and what is asked of it.

    name: of the pairing, as rows keep it. decoder: a listed name or `module:factory`, whose options
    are `decoder_options` and, for a listed one, the size of its lane. source: likewise, or `paced`
    for one that feeds this decoder with `prefill_mb_s` of KV. source_python: the interpreter of its
    environment, None for this one. most_tokens: that A may need, so that a lane holds the prompt
    and these.
    """

    name: str
    decoder: str
    source: str
    num_tokens: int
    decoder_options: Mapping[str, Any] = field(default_factory=dict)
    source_options: Mapping[str, Any] = field(default_factory=dict)
    source_python: str | None = None
    prefill_mb_s: float = 200.0
    group_layers: int = 1
    shares: tuple[float, ...] = (0.25, 0.6, 1.5)
    repeats: int = 10
    most_tokens: int = 512

    @property
    def context(self) -> int:
        return self.num_tokens + self.most_tokens


class Alone(NamedTuple):
    """B by itself, ns: its prefill, the import of all its KV, and a decode step after it."""

    prefill_ns: int
    import_ns: int
    step_ns: int


def run(setting: Setting, file: RowFile) -> Iterator[dict[str, Any]]:
    """Measure what `file` does not hold yet, append it there, and yield each row.

    Raises:
        Refused: the decoder has not one lane, or A would need more tokens than its lane holds.
        RequestFailed: a request did not finish.
    """
    missing = [place for place in _places(setting) if _identity(setting, *place) not in file]
    if not missing:
        return
    with ExitStack() as stack:
        stands = {
            depth: stack.enter_context(_open(setting, depth))
            for depth in sorted({mode.prefetch_depth for _, _, _, mode in missing})
        }
        alone = {depth: _learn(stand, setting) for depth, stand in stands.items()}
        for place in missing:
            depth = place[3].prefetch_depth
            yield file.append(_one(stands[depth], alone[depth], setting, *place))


def run_asked(asked: Mapping[str, Any], told: Callable[[Any], None]) -> list[dict[str, Any]]:
    """`run` as the process of another environment is asked for it; tells and returns the rows.

    `asked` has the `setting`, what `RowFile` takes as `settings` and `resume`, and its path `out`.

    Raises: as `run`.
    """
    given = dict(asked["setting"])
    setting = Setting(**given | {"shares": tuple(given["shares"])})
    out = None if asked["out"] is None else Path(asked["out"])
    file = RowFile(out, CLAIM, KEY, settings=asked["settings"], resume=asked["resume"])
    for row in run(setting, file):
        told(row)
    return file.rows


def _places(setting: Setting) -> Iterator[tuple[float, int, int, Mode]]:
    """Share, repeat, half and mode, in the order in which they are taken."""
    for share in setting.shares:
        for repeat in range(setting.repeats):
            first = repeat % len(MODES)
            turned = [*MODES[first:], *MODES[:first]]
            for half in (0, 1):
                for mode in turned[::-1] if half else turned:
                    yield share, repeat, half, mode


def _identity(setting: Setting, share: float, repeat: int, half: int, mode: Mode) -> dict[str, Any]:
    return {
        "setting": setting.name,
        "prompt_tokens": setting.num_tokens,
        "share": share,
        "mode": mode.name,
        "repeat": repeat,
        "half": half,
    }


def _open(setting: Setting, prefetch_depth: int) -> Stand:
    options = dict(setting.decoder_options)
    if setting.decoder in DECODERS:
        options |= size_options(setting.decoder, lanes=1, context=setting.context)
    with ExitStack() as undo:
        decoder = open_decoder(setting.decoder, options)
        undo.callback(decoder.close)
        lanes = decoder.caps.max_lanes
        if lanes != 1 or not decoder.caps.decodes:
            raise Refused(
                f"{setting.decoder} has {lanes} lanes and decodes: {decoder.caps.decodes}; give a "
                "decoder with one lane that decodes",
                field="decoder",
            )
        handle = SourceHandle(
            *_source_of(setting, decoder), interpreter=setting.source_python, num_slots=NUM_SLOTS
        )
        undo.callback(handle.close)
        handle.start()
        stand = Stand(
            handle,
            decoder,
            context=setting.context,
            facts=pairing_facts(decoder),
            prefetch_depth=prefetch_depth,
        )
        undo.pop_all()
        return stand


def _source_of(setting: Setting, decoder: Decoder) -> tuple[str, dict[str, Any]]:
    options = dict(setting.source_options)
    if setting.source != "paced":
        return setting.source, options
    nbytes_per_s = setting.prefill_mb_s * 1e6
    pace = paced.options_for(decoder.manifest(), setting.num_tokens, nbytes_per_s)
    return paced.FACTORY, pace | options


def _learn(stand: Stand, setting: Setting) -> Alone:
    """Serve B alone; what is least of a few runs is what it takes."""
    prompt = _prompt(stand, setting, 1)
    found = []
    for route in ("streamed", "whole") * _LEARNED:
        request = stand.serve(prompt, _options(setting, route, 1 + _WARM_STEPS))
        measured = _measured(request)
        decoding_ns = measured.ended_ns - measured.first_token_ns
        prefill_ns = measured.source_final_ns - measured.prefill_begun_ns
        found.append(Alone(prefill_ns, measured.import_ns, decoding_ns // _WARM_STEPS))
    return Alone(*(min(column) for column in zip(*found, strict=True)))


def _prompt(stand: Stand, setting: Setting, seed: int) -> list[int]:
    return random_prompt(setting.num_tokens, stand.decoder.manifest().vocab_size, seed)


def _options(
    setting: Setting, route: Route, max_tokens: int, *, trace: bool = False
) -> RequestOptions:
    return RequestOptions(
        route=route,
        group_layers=setting.group_layers if route == "streamed" else 1,
        max_tokens=max_tokens,
        trace=trace,
    )


def _tokens_of_a(setting: Setting, alone: Alone, share: float) -> int:
    """The first token takes no step; each of the others takes one."""
    num_tokens = 1 + max(1, round(share * alone.prefill_ns / max(1, alone.step_ns)))
    if num_tokens > setting.most_tokens:
        raise Refused(
            f"A decodes for {share:g} of B's prefill, which is {num_tokens} tokens, and its lane "
            f"has room for {setting.most_tokens}; raise --most-tokens or ask for less",
            field="most_tokens",
        )
    return num_tokens


def _one(
    stand: Stand, alone: Alone, setting: Setting, share: float, repeat: int, half: int, mode: Mode
) -> dict[str, Any]:
    num_tokens = _tokens_of_a(setting, alone, share)
    prompts = _prompt(stand, setting, 2 * repeat), _prompt(stand, setting, 2 * repeat + 1)
    busy = busy_share(0.1)
    owner = stand.owner
    a = owner.submit(prompts[0], _options(setting, "streamed", num_tokens))
    b = owner.submit(prompts[1], _options(setting, mode.route, 1, trace=True))
    owner.run_until_done(a, b)
    owner.drain()
    return {
        **_identity(setting, share, repeat, half, mode),
        **times_of(finished(a), finished(b), alone),
        "tokens_of_a": num_tokens,
        "alone": alone._asdict(),
        "pairing": stand.facts,
        "busy_before": round(busy, 3),
        "load_1min": load_1min(),
    }


def times_of(a: Request, b: Request, alone: Alone) -> dict[str, Any]:
    """What a row tells of one pair, ns and bytes.

    gap_ns: from the end of A to B's first token. rest_ns: of B's prefill, when A ended.
    parked_import_ns: what the import of what was parked takes. goal_ns: that and the import of one
    group. bound_ns: what can be kept, as the module tells.
    """
    first, second = _measured(a), _measured(b)
    parked_nbytes = _parked_nbytes(b)
    prefill_ns = second.source_final_ns - second.prefill_begun_ns
    rest_ns = max(0, second.source_final_ns - max(first.ended_ns, second.prefill_begun_ns))
    import_ns = alone.import_ns * second.last_group_nbytes // max(1, second.kv_nbytes)
    parked_import_ns = alone.import_ns * parked_nbytes // max(1, second.kv_nbytes)
    computing_ns = prefill_ns // max(1, second.groups) if rest_ns else 0
    return {
        "gap_ns": second.first_token_ns - first.ended_ns,
        "rest_ns": rest_ns,
        "goal_ns": parked_import_ns + import_ns,
        "bound_ns": max(rest_ns, parked_import_ns) + computing_ns + import_ns,
        "ended_at_share": (first.ended_ns - second.prefill_begun_ns) / max(1, prefill_ns),
        "prefill_ns": prefill_ns,
        "tail_ns": second.tail_ns,
        "parked_ns": second.parked_ns,
        "parked_nbytes": parked_nbytes,
        "parked_import_ns": parked_import_ns,
        "import_ns": second.import_ns,
        "kv_nbytes": second.kv_nbytes,
        "groups": second.groups,
        "token_ns_of_a": (first.ended_ns - first.first_token_ns) // max(1, len(a.tokens) - 1),
    }


def _parked_nbytes(request: Request) -> int:
    """Bytes that were told and could not be imported yet."""
    told: Sequence[Any] = request.owner_intervals
    until_ns = max((each.ended_ns for each in told if each.kind == "parked"), default=0)
    return sum(e.nbytes for e in told if e.kind == "validated" and e.begun_ns <= until_ns)


def _measured(request: Request) -> Measured:
    measured = finished(request).measured
    if measured is None:
        raise Refused(f"nothing was measured of a request: {request.reason}")
    return measured
