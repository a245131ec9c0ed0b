"""Every family of the vendor's kernels but Llama, emulated on the CPU, in processes of their own.

Kernels for 8 bit weights quantise activations too: every 128 elements of a row that a linear layer
takes, by their own largest. Three bits of fraction are left, so K, V and logits are several times
further from float32 than bf16 alone would make them. Such a kernel is held against a torch that
quantises in the same places. In the first layer both agree as well as bf16 can. Further on, where
one rounds up and the other down, a bit of the eighth becomes a bit of the third, in torch's own
float32 and bf16 as well. So the bound is what torch's two are apart, and a quarter more. Means of
squares are bounded, no single number: one that is rounded the other way is far off and is right.

A mistake is planted in torch: the distance is the same as if the kernels had made it.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import torch
import transformers

from headrace.backends.load import open_decoder
from headrace.backends.null import NullDecoder, decoder_like
from headrace.bench.rngd_states import Prefilled, States, distance, prefill
from headrace.bench.stand import Stand, finished
from headrace.engine.loading import load_model
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.requests import RequestOptions
from headrace.runtime.worker import SourceHandle
from tests.rngd_checkpoints import BLOCK, LARGEST, checkpoint_of

pytestmark = [pytest.mark.rngd_emulation, pytest.mark.usefixtures("nothing_left")]

CONTEXT: Final = 128
WINDOW: Final = 32
NUM_TOKENS: Final = 40
"""More than the window: the first rows of a sliding layer are in no slot."""

KV_FACTOR, LOGITS_FACTOR = 1.25, 1.5
"""How many times the rms of torch's own distance a layer's K or V, or the one row of logits, may
have."""


class Model(NamedTuple):
    """family: of the checkpoint. quantised: its 8 bit form. relative: the most rms of K, V or
    logits against a float32 that quantises nothing, as part of their own rms. exact: a prompt has
    the same bits however it is cut into pieces. hybrid: with sliding layers. needs: what the
    decoder's side loads it with.
    """

    family: str
    quantised: bool
    relative: float
    buckets: tuple[int, ...]
    exact: bool = True
    hybrid: bool = False
    needs: tuple[str, ...] = ()

    @property
    def directory(self) -> Path:
        checkpoint = checkpoint_of(self.family)
        return checkpoint.kernels if self.quantised else checkpoint.plain


MODELS: Final = {
    "qwen3_bf16": Model("qwen3", False, 0.015, (8, 32)),
    "qwen3": Model("qwen3", True, 0.10, (8, 32), needs=("accelerate",)),
    "exaone4": Model("exaone4", True, 0.10, (8, 32), hybrid=True, needs=("accelerate",)),
    "gemma4": Model(
        "gemma4",
        True,
        0.10,
        (32,),
        exact=False,
        hybrid=True,
        needs=("accelerate", "compressed_tensors"),
    ),
}


@dataclass(frozen=True)
class Case:
    """A model's source with a decoder that is memory only, and its prompt, prefilled at once."""

    name: str
    model: Model
    stand: Stand
    whole: Prefilled


def prompt(num_tokens: int = NUM_TOKENS) -> list[int]:
    draw = random.Random(0)
    return [draw.randrange(512) for _ in range(num_tokens)]


def source_options(model: Model) -> dict[str, Any]:
    options = {"token_buckets": model.buckets, "max_positions": CONTEXT}
    return {"model": str(model.directory), "emulate": True, "threads": 1, **options}


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, rngd_python: str) -> Iterator[Case]:
    model = MODELS[request.param]
    handle = SourceHandle("rngd", source_options(model), interpreter=rngd_python)
    handle.start()
    decoder = NullDecoder(decoder_like(handle.manifest), context=CONTEXT, lanes=1)
    with Stand(handle, decoder, context=CONTEXT) as stand:
        yield Case(request.param, model, stand, prefill(stand, prompt()))


# ---- the numbers


def over_bound(mine: States, rounded: States, exact: States) -> list[str]:
    """Where the kernels are further from torch than the bound allows.

    rounded, exact: torch's, in bf16 and in float32, in the arithmetic of the kernels.
    """
    found = []
    for (layer, part), wanted in exact.cells.items():
        theirs = distance(rounded.cells[layer, part], wanted).rms
        cells = mine.cells[layer, part]
        apart = distance(cells, wanted[-len(cells) :]).rms
        if not apart <= KV_FACTOR * theirs:
            found.append(f"layer {layer} {'KV'[part]}: {apart:.4g}, torch's is {theirs:.4g}")
    theirs, apart = (distance(each.logits, exact.logits).rms for each in (rounded, mine))
    if not apart <= LOGITS_FACTOR * theirs:
        found.append(f"logits: {apart:.4g}, torch's is {theirs:.4g}")
    return found


def relative(mine: torch.Tensor, exact: torch.Tensor) -> float:
    wanted = exact[-len(mine) :]
    return distance(mine, wanted).rms / distance(wanted, torch.zeros_like(wanted)).rms


def quantised(activations: torch.Tensor) -> torch.Tensor:
    """What is left of them in the kernels for 8 bit weights."""
    blocks = activations.float().reshape(-1, BLOCK)
    scales = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST
    kept = (blocks / scales).to(torch.float8_e4m3fn).float() * scales
    return kept.reshape(activations.shape).to(activations.dtype)


def masks(module: Any, mistake: str) -> dict[str, torch.Tensor]:
    """What a hybrid's layers add to their scores, with a mistake in those that slide."""
    row, column = torch.arange(NUM_TOKENS)[:, None], torch.arange(NUM_TOKENS)[None]
    seen = {
        "window at the wrong end": (column < WINDOW) | (column == row),
        "window too short": column > row - WINDOW + 1,
        "window too long": column >= row - WINDOW,
    }[mistake]
    causal = column <= row
    return {
        kind: torch.zeros(mask.shape, dtype=module.dtype).masked_fill(~mask, -torch.inf)[None, None]
        for kind, mask in (("sliding_attention", seen & causal), ("full_attention", causal))
    }


MISTAKES: Final = ("position", "k and v", "one scale doubled")
WINDOW_MISTAKES: Final = ("window at the wrong end", "window too short", "window too long")


def torchs(model: Model, dtype: str, *, plain: bool = False, mistake: str = "") -> States:
    """All positions of all layers, and logits, by the model's own library.

    plain: quantise nothing.
    """
    loaded = load_model(checkpoint_of(model.family).plain, dtype=dtype)
    module = loaded.module
    for layer in module.model.modules() if model.quantised and not plain else ():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_pre_hook(lambda _, given: (quantised(given[0]),))
    if mistake == "one scale doubled":
        module.model.layers[0].self_attn.o_proj.weight[:BLOCK, :BLOCK] *= 2
    told: dict[str, Any] = {"position_ids": torch.arange(NUM_TOKENS)[None]}
    if mistake == "position":
        told["position_ids"] += 1
    if mistake in WINDOW_MISTAKES:
        told["attention_mask"] = masks(module, mistake)
    cache = transformers.DynamicCache()  # without a config: it keeps every row of a sliding layer
    with torch.inference_mode():
        told |= {"input_ids": torch.tensor([prompt()]), loaded.cache_argument: cache}
        given = module(logits_to_keep=1, **told)
    cells = {}
    for index, layer in enumerate(cache.layers):
        for part, kept in enumerate((layer.keys, layer.values)):
            cells[index, part ^ (mistake == "k and v")] = kept[0].transpose(0, 1).float()
    return States(cells, given.logits[0, 0].float())


def test_the_numbers_are_those_of_the_models_own_library(case: Case) -> None:
    mine = case.whole.states()
    assert over_bound(mine, torchs(case.model, "bfloat16"), torchs(case.model, "float32")) == []
    exact = torchs(case.model, "float32", plain=True)
    pairs = [(mine.cells[key], exact.cells[key]) for key in exact.cells]
    pairs.append((mine.logits, exact.logits))
    worst = max(relative(*pair) for pair in pairs)
    assert worst <= case.model.relative


def test_the_bound_shows_every_mistake(case: Case) -> None:
    mine = case.whole.states()
    for mistake in (*MISTAKES, *(WINDOW_MISTAKES if case.model.hybrid else ())):
        wrong = [torchs(case.model, dtype, mistake=mistake) for dtype in ("bfloat16", "float32")]
        assert over_bound(mine, *wrong), mistake


def test_the_model_quantises_where_its_publisher_says() -> None:
    """What the other tests hold kernels against, by a package that reads such checkpoints."""
    pytest.importorskip("compressed_tensors", reason="it is what reads this checkpoint")
    model = MODELS["gemma4"]
    published = load_model(model.directory, dtype="float32").module
    with torch.inference_mode():
        given = published(input_ids=torch.tensor([prompt()]), logits_to_keep=1)
    assert torch.equal(given.logits[0, 0], torchs(model, "float32").logits)


# ---- the bytes


ROUTES: Final[tuple[dict[str, Any], ...]] = (
    {"route": "chunked", "chunk": 7},
    {"route": "streamed", "group_layers": 1},
    {"route": "streamed", "group_layers": 2, "emission": "cache_groups"},
)


def test_every_route_has_the_same_bytes(case: Case) -> None:
    rows = {len(cells) for cells in case.whole.states().cells.values()}
    assert rows == ({NUM_TOKENS, WINDOW} if case.model.hybrid else {NUM_TOKENS})
    assert not any(set(raw) == {0xFF} for raw in case.whole.cells.values())
    for asked in ROUTES:
        assert prefill(case.stand, prompt(), **asked).same_bytes(case.whole), asked


def test_a_prompt_in_pieces_has_the_same_bytes(case: Case) -> None:
    """Not so where it matters which chip computes a row: pieces put rows on other chips."""
    if not case.model.exact:
        pytest.skip("this family's bits depend on the chip that owns a row")
    cut = prefill(case.stand, prompt(), prefill_cuts=(8,), route="streamed", group_layers=1)
    assert cut.same_bytes(case.whole)


# ---- a decoder goes on


@contextmanager
def owner_of(model: Model, interpreter: str) -> Iterator[DecoderOwner]:
    """An owner with a cpu decoder in bf16 and the emulated source."""
    handle = SourceHandle("rngd", source_options(model), interpreter=interpreter)
    handle.start()
    try:
        options = {"model": str(model.directory), "dtype": "bfloat16", "threads": 1}
        decoder = open_decoder("cpu", {**options, "lanes": 1, "context": CONTEXT})
        owner = DecoderOwner(decoder, context=CONTEXT)
        try:
            owner.attach(handle)
            yield owner
            owner.drain()
            owner.check_integrity()
        finally:
            owner.close()
    finally:
        handle.close()


@pytest.mark.parametrize("name", MODELS)
def test_a_decoder_goes_on_with_the_same_tokens_by_every_route(name: str, rngd_python: str) -> None:
    model = MODELS[name]
    missing = [package for package in model.needs if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"the decoder's side loads this checkpoint with {', '.join(missing)}")
    with owner_of(model, rngd_python) as owner:
        found = [decoded(owner, asked) for asked in ({"route": "whole"}, *ROUTES[:2])]
    assert len(found[0][0]) == 6
    assert all(each == found[0] for each in found)


def decoded(owner: DecoderOwner, asked: dict[str, Any]) -> tuple[Any, ...]:
    """Tokens, and digests of all logits and of the K and V that the decoder ended with."""
    options = RequestOptions(max_tokens=6, audit=True, digest=True, **asked)
    request = owner.submit(prompt(), options)
    owner.run_until_done(request)
    finished(request)
    return request.tokens, request.logits_digest, request.kv_digests
