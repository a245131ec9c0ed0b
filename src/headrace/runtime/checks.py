"""What can never be served is refused at submit, by the option's name."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from headrace.backends.base import Decoder, ReservesByLabel
from headrace.errors import Refused
from headrace.geometry import Manifest
from headrace.ids import AttemptId
from headrace.messages import Prefill, Sampling
from headrace.plan import Plan
from headrace.protocol.books import PlanFor
from headrace.protocol.source import MOST_SPANS, expected_spans
from headrace.runtime.requests import MAX_DEADLINE_S, RequestOptions


def prompt_of(tokens: Sequence[int]) -> array[int]:
    """The prompt as u32 ids. Raises: Refused."""
    try:
        return array("I", tokens)
    except (TypeError, OverflowError) as exc:
        raise Refused(f"the prompt is no sequence of token ids: {exc}", field="prompt") from exc


def check_request(
    tokens: Sequence[int],
    options: RequestOptions,
    decoder: Decoder,
    manifest: Manifest,
    context: int,
    sides: Iterable[tuple[Manifest, PlanFor]],
) -> list[Plan]:
    """Check a request against its owner and all sources that it may go to; returns their plans.

    Raises:
        Refused: it can never be served as asked; the text says what to change.
    """
    options.check_values()
    if any(not 0 <= token < manifest.vocab_size for token in tokens):
        raise Refused(f"a token id is outside [0, {manifest.vocab_size})", field="prompt")
    if options.max_tokens > 1 and not (decoder.caps.decodes or options.hold):
        raise Refused(
            f"max_tokens is {options.max_tokens} and this decoder cannot decode; give 0 or 1",
            field="max_tokens",
        )
    for name, asked in (("digest", options.digest), ("poison", options.poison)):
        if asked and not decoder.caps.reads_back:
            raise Refused(
                f"{name} looks at the bytes as landed, and this decoder keeps its cache in another "
                f"number format than the source's; leave {name} out, or have both of one",
                field=name,
            )
    if options.max_tokens > 0 and not options.hold:
        _check_sampling(options.sampling)
    if any(cut >= len(tokens) for cut in options.prefill_cuts):
        raise Refused(
            f"prefill_cuts are {options.prefill_cuts}, and the prompt has {len(tokens)} positions; "
            "cut inside it",
            field="prefill_cuts",
        )
    reach = len(tokens) + (0 if options.hold else max(options.max_tokens - 1, 0))
    if reach > context:
        raise Refused(
            f"{len(tokens)} prompt tokens and {options.max_tokens} to decode need a context of "
            f"{reach}, and it is {context}; raise --context or ask for less",
            field="context",
        )
    plans = []
    for source, plan_for in sides:
        options.check(source, manifest)
        plan = plan_for(len(tokens), 0)
        _check_cuts(options, plan)
        plans.append(plan)
    return plans


def check_start(
    start: int,
    num_tokens: int,
    options: RequestOptions,
    decoder: Decoder,
    sides: Iterable[tuple[Manifest, PlanFor]],
) -> None:
    """Refuse a `start` that no storage can have, or that a source cannot go on from."""
    if not isinstance(decoder, ReservesByLabel):
        raise Refused("start is for a decoder whose storage its caller binds", field="start")
    if options.prefix != "off":
        raise Refused("start and prefix both say where to go on from; give one", field="start")
    if not 0 < start < num_tokens:
        raise Refused(
            f"start is {start} and the prompt has {num_tokens} positions; leave at least one",
            field="start",
        )
    if any(source.prefix == "none" for source, _ in sides):
        raise Refused("a source here emits whole prompts only; leave start out", field="start")


def _check_cuts(options: RequestOptions, plan: Plan) -> None:
    if options.route == "auto":
        return  # what is chosen can be told
    num_spans = expected_spans(grant(AttemptId(0, 0, 0), 0, 0, plan.num_tokens, options), plan)
    if num_spans > MOST_SPANS:
        raise Refused(
            f"this is cut into {num_spans} spans and at most {MOST_SPANS} can be told; use "
            "larger chunks or layer groups",
            field="chunk",
        )


def grant(
    attempt: AttemptId,
    slot: int,
    generation: int,
    num_tokens: int,
    options: RequestOptions,
    start: int = 0,
    cuts: tuple[int, ...] | None = None,
) -> Prefill:
    """The message that grants a source its slot, with how the request is to be cut.

    A request that asks for `auto` and for which nothing was chosen goes whole. `start`: the first
    position that it is to emit. `cuts`: by default those that the request asks for.
    """
    return Prefill(
        attempt,
        slot,
        generation,
        num_tokens,
        "whole" if options.route == "auto" else options.route,
        options.group_layers,
        options.chunk,
        options.prefill_chunk,
        options.emission,
        options.digest,
        start,
        options.prefill_cuts if cuts is None else cuts,
    )


def _check_sampling(sampling: Sampling) -> None:
    try:
        from headrace.engine.sampling import check_sampling
    except ImportError as exc:
        why = str(exc).strip().rpartition("\n")[2]  # numpy's is a page, whose last line tells
        raise Refused(
            f"choosing tokens needs numpy ({why}); install headrace[cpu], or ask for max_tokens=0",
            field="max_tokens",
        ) from exc
    check_sampling(sampling)


def check_bounds(
    progress_timeout_s: float,
    drain_timeout_s: float,
    chunk_nbytes: int | None,
    budget_nbytes: int | None,
    import_share: float,
    prefetch_depth: int,
) -> None:
    """Refuse bounds of an owner that would bound nothing, by their names."""
    if prefetch_depth < 0:
        raise Refused(
            f"prefetch_depth is {prefetch_depth}; it is a number of requests, and 0 for none",
            field="prefetch_depth",
        )
    for name, seconds in (
        ("progress_timeout_s", progress_timeout_s),
        ("drain_timeout_s", drain_timeout_s),
    ):
        if not 0 < seconds <= MAX_DEADLINE_S:
            raise Refused(f"{name} is {seconds}; it is a time in seconds above 0", field=name)
    if not 0 < import_share <= 1:
        raise Refused(
            f"import_share is {import_share}; it is a share of decode time above 0, at most 1",
            field="import_share",
        )
    for name, nbytes in (("chunk_nbytes", chunk_nbytes), ("budget_nbytes", budget_nbytes)):
        if nbytes is not None and nbytes < 1:
            raise Refused(f"{name} is {nbytes}; it is a number of bytes above 0", field=name)
