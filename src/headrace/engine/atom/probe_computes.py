"""The steps of a probe that have the card compute.

In which numbers and in which order it keeps what it computed, and whether the same, imported,
decodes to the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from headrace.engine.atom import number_format as formats
from headrace.engine.atom.blocks import window_start
from headrace.engine.atom.caches import Cache
from headrace.engine.atom.lane import AtomLane
from headrace.engine.atom.probe_bench import Bench, Place, distance, readings
from headrace.engine.atom.prompts import STEPS, Reference, lengths, past_window
from headrace.engine.atom.record import BY_POSITION, Verified
from headrace.engine.records import Facts
from headrace.engine.tensors import DTYPES
from headrace.errors import Refused

NEAR: Final = 0.05
"""Largest distance to the reference, as a share of its rms, that counts as the same numbers: 16-bit
rounding gives about a hundredth, another format or another row about one.
"""

GARBAGE: Final = 2.0**13
"""Larger than what a model computes, and a number in every format."""


def number_format(bench: Bench) -> Facts:
    """In which format what the card's own prefill left is near to the checkpoint's states."""
    reference = _reference(bench)
    bench.prefill(bench.short)
    worst: dict[str, float] = {}
    compared = [each for each in bench.opened.caches if (each.layer, each.part) in reference.states]
    for cache in compared:
        want = _wanted(reference, cache, 0, bench.short)
        for name, values in readings(cache, bench.prompt(cache, bench.short)).items():
            worst[name] = max(worst.get(name, 0.0), distance(values, want))
    near = [name for name, far in worst.items() if far <= NEAR]
    found = near[0] if len(near) == 1 else None
    if found is not None:
        bench.number_format = "declared" if found == "declared" else "custom_float16"
    return {"found": found, "near_within": NEAR, "caches": len(compared), "distance": worst}


def sliding_order(bench: Bench) -> Facts:
    """Which position a row of a sliding window has, for prompts on both sides of its end."""
    reference = _reference(bench)
    sliding = [
        each
        for each in bench.opened.caches
        if each.kind == "sliding" and (each.layer, each.part) in reference.states
    ]
    facts: Facts = {}
    for window in sorted({each.rows for each in sliding}):
        for num_tokens in (bench.short, window, past_window(window)):
            if num_tokens > bench.opened.positions:
                continue
            bench.prefill(num_tokens)
            orders = {
                _order(bench, reference, each, num_tokens)
                for each in sliding
                if each.rows == window
            }
            facts[f"{num_tokens} tokens, window {window}"] = " and ".join(sorted(orders))
    odd = sorted(set(facts.values()) - {BY_POSITION})
    return {"order": " and ".join(odd) or BY_POSITION, **facts} if facts else {"order": "no window"}


def import_decodes(bench: Bench) -> Facts:
    """Whether a prompt that the card prefilled, fetched and imported, decodes to the same bits.

    clearing_seen: whether the same lane decodes to something else while it is cleared: if not, what
    is decoded is not what was imported. zeros_behind: whether the bits are the same only once what
    the card's prefill left behind the prompt's last row was cleared, as an import has it.
    """
    facts: Facts = {}
    lane = _lane(bench, clears=True)
    for num_tokens in _prompts(bench):
        own = _Own(bench, num_tokens)
        again = _Own(bench, num_tokens)
        lane.begin(num_tokens)
        cleared = bench.opened.decode(own.tokens[0], num_tokens)
        imported = _imported(bench, lane, own)
        zeros_behind = not _same(own.rows, imported)
        wanted = own.without_padding(bench) if zeros_behind else own.rows
        pairs = list(zip(wanted, imported, strict=True))
        facts[f"{num_tokens} tokens"] = {
            "own_repeatable": _same(own.rows, again.rows),
            "clearing_seen": not torch.equal(cleared, own.rows[0]),
            "identical": _same(wanted, imported),
            "zeros_behind": zeros_behind,
            "max_difference": max(float((a - b).abs().max()) for a, b in pairs),
            "argmax_agrees": all(int(a.argmax()) == int(b.argmax()) for a, b in pairs),
        }
    names = ("own_repeatable", "clearing_seen", "identical", "argmax_agrees")
    prompts = list(facts.values())
    held = {name: bool(prompts) and all(each[name] for each in prompts) for name in names}
    return {**held, **facts}


def reuse(bench: Bench) -> Facts:
    """Whether an imported prompt decodes to other bits where a lane was not cleared before.

    One prompt is short, and one is decoded across the end of its block.
    """
    compiled = bench.opened
    ends = {each.rows - 1 for each in compiled.caches if each.kind == "full"}
    fit = {count for count in ends if 1 <= count <= compiled.positions - STEPS}
    facts: Facts = {}
    for num_tokens in sorted({bench.short} | fit):
        own = _Own(bench, num_tokens)
        lane = _lane(bench, clears=False)  # which is cleared when it is made
        wanted = _imported(bench, lane, own)
        _fill(bench)
        facts[f"{num_tokens} tokens"] = not _same(wanted, _imported(bench, lane, own))
    return {"clears": any(facts.values()), **facts}


class _Own:
    """What the card's own prefill of a prompt leaves in a cleared lane, and greedy steps after it.

    tokens: what was fed. rows: the logits of each step. states: by cache, what it held after the
    prefill, float32 [heads, rows, head_dim].
    """

    def __init__(self, bench: Bench, num_tokens: int) -> None:
        compiled = bench.opened
        self.num_tokens = num_tokens
        logits = bench.prefill(num_tokens)
        self.states = [
            readings(cache, bench.prompt(cache, num_tokens))[bench.format]
            for cache in compiled.caches
        ]
        self.tokens: list[int] = []
        self.rows: list[torch.Tensor] = []
        for step in range(STEPS):
            self.tokens.append(int(logits.argmax()))
            logits = compiled.decode(self.tokens[-1], num_tokens + step)
            self.rows.append(logits)

    def without_padding(self, bench: Bench) -> list[torch.Tensor]:
        """The rows of logits where all that lies behind the prompt was cleared before."""
        bench.prefill(self.num_tokens)
        bench.clear_behind(self.num_tokens)
        return self.fed(bench)

    def fed(self, bench: Bench) -> list[torch.Tensor]:
        """The rows of logits of the same tokens, on top of what is there."""
        return [
            bench.opened.decode(token, self.num_tokens + step)
            for step, token in enumerate(self.tokens)
        ]


def _lane(bench: Bench, *, clears: bool) -> AtomLane:
    found = Verified(bench.format, bench.sub_blocks, clears, warms_up=False)
    return AtomLane(bench.sdk, bench.opened, found, "float32")


def _imported(bench: Bench, lane: AtomLane, own: _Own) -> list[torch.Tensor]:
    """The rows of logits after the states were imported; a cast from float32 gives their bits."""
    lane.begin(own.num_tokens)
    for cache, states in zip(bench.opened.caches, own.states, strict=True):
        lane.write(cache.layer, cache.part, window_start(cache, own.num_tokens), states)
    lane.check_flushed()
    rows = own.fed(bench)
    lane.end()
    return rows


def _prompts(bench: Bench) -> list[int]:
    room = bench.opened.positions - STEPS
    return [
        count for count in lengths(bench.opened.caches, bench.opened.positions) if count <= room
    ]


def _fill(bench: Bench) -> None:
    """Large numbers of both signs, in every block of the lane."""
    for place in bench.places():
        cache = place.cache
        values = torch.full((cache.elements // cache.blocks,), GARBAGE)
        values[::3] *= -1
        if bench.format == "custom_float16":
            bits = formats.encode(values)
        else:
            bits = values.to(DTYPES[cache.dtype]).view(torch.int16)
        bench.send(Place(cache, place.block), bits)


def _order(bench: Bench, reference: Reference, cache: Cache, num_tokens: int) -> str:
    """The order of a window's rows in words, from what the card's own prefill left."""
    cells = bench.prompt(cache, num_tokens)
    got = readings(cache, cells)[bench.format]
    start = window_start(cache, num_tokens)
    want = _wanted(reference, cache, start, num_tokens)
    if distance(got, want) <= NEAR:
        return BY_POSITION
    far = (got - want[:, :1]).square().sum((0, 2))
    turn = int(far.nan_to_num(float("inf")).argmin())
    if turn and distance(got.roll(-turn, 1), want) <= NEAR:
        return f"turned by {turn} of {got.shape[1]} rows"
    return "unknown"


def _reference(bench: Bench) -> Reference:
    if bench.reference is None:
        raise Refused(
            "no reference was given, and nothing else tells the formats apart; "
            "`headrace atom probe` computes one from the checkpoint",
            field="reference",
        )
    if bench.reference.tokens != bench.tokens or not bench.reference.states:
        raise Refused("the reference is of other prompts; compute it again", field="reference")
    return bench.reference


def _wanted(reference: Reference, cache: Cache, start: int, stop: int) -> torch.Tensor:
    return torch.from_numpy(reference.states[cache.layer, cache.part][:, start:stop])


def _same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """The same bits, all of them numbers."""
    return all(
        torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(some, others, strict=True)
    )
