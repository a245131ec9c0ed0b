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
from headrace.engine.atom.prompts import STEPS, Reference, imported, lengths
from headrace.engine.atom.record import BY_POSITION, Verified
from headrace.engine.records import Facts
from headrace.engine.tensors import DTYPES
from headrace.errors import Refused

NEAR: Final = 0.1
"""Largest distance to the reference, as a share of its rms, that counts as the same numbers: 16-bit
rounding gives some hundredths at most, another format or another row a third and more.
"""

ROW_NEAR: Final = 0.4
"""Largest distance of one row, as a share of how far rows are from their mean: another position's
is at about 1.4.
"""

LOGITS_NEAR: Final = 0.2
"""Largest distance of a row of logits to the reference, as a share of its spread.

Each of some hundred roundings to the 8 bits of bfloat16 that a row passes through adds up to 1/256
of a share, and their sum grows with the root of their number: some hundredths in all. Weights of
another model give about one. What is nearer than rounding is told by no comparison.
"""

ARGMAX_SPREADS: Final = 4
"""Two tokens may change places at the top where the reference has them nearer than so many of the
rms differences between the two rows.
"""

GARBAGE: Final = 2.0**13
"""Larger than what a model computes, and a number in every format."""


def number_format(bench: Bench) -> Facts:
    """In which format what the card computed by itself is near to the checkpoint's states, in every
    cache.

    own_prefill: how it computed, here and in the steps after this one.
    """
    reference = _reference(bench)
    bench.compute(bench.short)
    worst: dict[str, float] = {}
    compared = [each for each in bench.opened.caches if reference.has(each, bench.short)]
    for cache in compared:
        want = _wanted(reference, cache, 0, bench.short)
        for name, values in readings(cache, bench.prompt(cache, bench.short)).items():
            worst[name] = max(worst.get(name, 0.0), distance(values, want))
    near = [name for name, far in worst.items() if far <= NEAR]
    found = near[0] if len(near) == 1 else None
    if found is not None:
        bench.number_format = "declared" if found == "declared" else "custom_float16"
    return {
        "found": found,
        "near_within": NEAR,
        "own_prefill": bench.own_prefill,
        "caches": len(compared),
        "distance": worst,
    }


def row_order(bench: Bench) -> Facts:
    """Which position a row has: of a sliding window, on both sides of its end and past twice of it,
    and of full attention within a block and in the next one.

    not_reached: tokens of the prompts that are too long to wait for.
    """
    reference = _reference(bench)
    reached, not_reached = bench.reached(lengths(bench.opened.caches, bench.opened.positions))
    found: Facts = {}
    there = 0
    for num_tokens in reached:
        bench.logits[num_tokens] = bench.compute(num_tokens, there)
        there = num_tokens
        orders: dict[str, set[str]] = {}
        for cache in bench.opened.caches:
            if reference.has(cache, num_tokens):
                name = "full" if cache.kind == "full" else f"window {cache.rows}"
                orders.setdefault(name, set()).add(_order(bench, reference, cache, num_tokens))
        for name, each in orders.items():
            found[f"{num_tokens} tokens, {name}"] = " and ".join(sorted(each))
    odd = sorted(set(found.values()) - {BY_POSITION})
    order = " and ".join(odd) or (BY_POSITION if found else "unknown")
    return {"order": order, "not_reached": not_reached, **found}


def logits(bench: Bench) -> Facts:
    """Whether the logits of what the card computed are near to those of the checkpoint.

    So a model that was compiled from another one of the same shape is told, also where the two
    differ behind the last keys and values alone.
    """
    reference = _reference(bench)
    facts: Facts = {}
    for num_tokens, got in bench.logits.items():
        if num_tokens not in reference.logits:
            continue
        want = torch.from_numpy(reference.logits[num_tokens])
        if want.shape != got.shape:
            raise Refused(
                f"the card gives {got.numel()} logits, the checkpoint {want.numel()}", field="model"
            )
        got, want = got - got.mean(), want - want.mean()
        behind = float(want.max() - want[int(got.argmax())])
        error = float((got - want).square().mean().sqrt())
        facts[f"{num_tokens} tokens"] = {
            "distance": distance(got, want),
            "argmax_agrees": behind <= ARGMAX_SPREADS * error,
        }
    each_near = [
        each["distance"] <= LOGITS_NEAR and each["argmax_agrees"] for each in facts.values()
    ]
    near = all(each_near) if facts else None
    return {"near": near, "near_within": LOGITS_NEAR, **facts}


def import_decodes(bench: Bench) -> Facts:
    """Whether a prompt that the card computed, fetched and imported, decodes to the same bits.

    clearing_seen: whether the same lane decodes to something else while it is cleared: if not, what
    is decoded is not what was imported. zeros_behind: whether the bits are the same only once what
    the card's prefill left behind the prompt's last row was cleared, as an import has it.
    not_reached: tokens of the prompts that are too long to wait for.
    """
    facts: Facts = {}
    lane = _lane(bench, clears=True)
    reached, not_reached = bench.reached(imported(bench.opened.caches, bench.opened.positions))
    for num_tokens in reached:
        facts[f"{num_tokens} tokens"] = _import_decodes(
            bench, lane, num_tokens, twice=not bench.by_steps or num_tokens == reached[0]
        )
    names = ("own_repeatable", "clearing_seen", "identical", "argmax_agrees")
    prompts = list(facts.values())
    held = {name: bool(prompts) and all(each.get(name, True) for each in prompts) for name in names}
    return {**held, "not_reached": not_reached, **facts}


def _import_decodes(bench: Bench, lane: AtomLane, num_tokens: int, *, twice: bool) -> Facts:
    """twice: see that the card's own decode is the same again."""
    own = _Own(bench, num_tokens)
    facts: Facts = {}
    if twice:
        facts["own_repeatable"] = _same(own.rows, own.again(bench))
    lane.begin(num_tokens)
    cleared = bench.opened.decode(own.tokens[0], num_tokens)
    got = _imported(bench, lane, own)
    zeros_behind = not (bench.by_steps or _same(own.rows, got))
    wanted = own.again(bench, clear_behind=True) if zeros_behind else own.rows
    pairs = list(zip(wanted, got, strict=True))
    return {
        **facts,
        "clearing_seen": not torch.equal(cleared, own.rows[0]),
        "identical": _same(wanted, got),
        "zeros_behind": zeros_behind,
        "max_difference": max(float((a - b).abs().max()) for a, b in pairs),
        "argmax_agrees": all(int(a.argmax()) == int(b.argmax()) for a, b in pairs),
    }


def reuse(bench: Bench) -> Facts:
    """Whether an imported prompt decodes to other bits where a lane was not cleared before.

    One prompt is short, and one is decoded across the end of its block.
    """
    compiled = bench.opened
    ends = {each.rows - 1 for each in compiled.caches if each.kind == "full"}
    fit = {count for count in ends if 1 <= count <= compiled.positions - STEPS}
    facts: Facts = {}
    for num_tokens in bench.reached({bench.short} | fit)[0]:
        own = _Own(bench, num_tokens)
        lane = _lane(bench, clears=False)  # which is cleared when it is made
        wanted = _imported(bench, lane, own)
        _fill(bench)
        facts[f"{num_tokens} tokens"] = not _same(wanted, _imported(bench, lane, own))
    return {"clears": any(facts.values()), **facts}


class _Own:
    """What the card leaves of a prompt that it computed in a cleared lane, and greedy steps after.

    tokens: what was fed. rows: the logits of each step. states: by cache, the cells that it held of
    the prompt, [heads, rows, head_dim] as they are stored.
    """

    def __init__(self, bench: Bench, num_tokens: int) -> None:
        compiled = bench.opened
        self.num_tokens = num_tokens
        logits = bench.compute(num_tokens)
        self.states = [bench.prompt(cache, num_tokens) for cache in compiled.caches]
        self.tokens: list[int] = []
        self.rows: list[torch.Tensor] = []
        for step in range(STEPS):
            self.tokens.append(int(logits.argmax()))
            logits = compiled.decode(self.tokens[-1], num_tokens + step)
            self.rows.append(logits)

    def again(self, bench: Bench, *, clear_behind: bool = False) -> list[torch.Tensor]:
        """The rows of logits once more; with all that lies behind the prompt cleared before."""
        bench.compute(self.num_tokens)
        if clear_behind:
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
        values = readings(cache, states)[bench.format]
        lane.write(cache.layer, cache.part, window_start(cache, own.num_tokens), values)
    lane.check_flushed()
    rows = own.fed(bench)
    lane.end()
    return rows


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
    """The order of a prompt's rows in words, from what the card left of it."""
    cells = bench.prompt(cache, num_tokens)
    got = readings(cache, cells)[bench.format]
    start = window_start(cache, num_tokens)
    want = _wanted(reference, cache, start, num_tokens)
    if distance(got, want) <= NEAR and _farthest_row(got, want) <= ROW_NEAR:
        return BY_POSITION
    far = (got - want[:, :1]).square().sum((0, 2))
    turn = int(far.nan_to_num(float("inf")).argmin())
    if turn and distance(got.roll(-turn, 1), want) <= NEAR:
        return f"turned by {turn} of {got.shape[1]} rows"
    return "unknown"


def _farthest_row(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest distance of a row, as a share of how far rows are from their mean.

    Two that are exchanged among thousands are seen in no mean, and rows may have much in common.
    """
    if got.shape[1] == 1:
        return 0.0
    spread = (want - want.mean(1, keepdim=True)).square().sum((0, 2)).mean()
    return float(((got - want).square().sum((0, 2)).max() / spread).sqrt())


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
