"""A forward only queues: nothing in it moves between host and device, or is read back.

Either would hold the host up until the device had done all that was queued. The device here is
torch's `meta`: its tensors have shapes and no values, and whoever asks for one is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.engine.lanes import Lane
from headrace.engine.loading import LoadedModel, load_model
from headrace.engine.prefill import Seed, TakenCache, needed_rows, run_prefill
from headrace.engine.tensors import dtype_of
from tests.e2e.families import (
    CONTEXT,
    FAMILIES,
    WINDOW,
    decoder_of,
    directory_of,
    make_prompt,
    source_of,
)

NUM_TOKENS, CUT = 40, 23
DTYPE = "bfloat16"  # the grouped products of a mixture of experts have no other on this device
READS = "aten.item", "aten._local_scalar_dense", "aten.is_nonzero", "aten.equal", "aten.nonzero"
MAKERS = ("tensor", "as_tensor", "asarray", "new_tensor", "from_numpy")
IDS = ["tensor"]  # of the prompt, made on the device before anything is queued

by_family = pytest.mark.parametrize("family", FAMILIES)


class Crossings(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down the calls for which a host would wait for its device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []
        self.calls = 0
        self._filled = Filled(self.found)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.calls += 1
        name = str(func)
        if name.startswith(READS):
            self.found.append(name)
        made = func(*args, **(kwargs or {}))
        tensors = [
            each for each in tree_leaves((args, kwargs, made)) if isinstance(each, torch.Tensor)
        ]
        if len({each.device.type for each in tensors if each.numel()}) > 1:
            self.found.append(name)
        return made

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._filled.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        self._filled.__exit__(*exc)  # type: ignore[no-untyped-call]
        super().__exit__(*exc)  # type: ignore[no-untyped-call]


class Filled(TorchFunctionMode):
    """Writes down the tensors that are made on the device of numbers that Python has.

    Their copy is made out of sight of a `TorchDispatchMode`.
    """

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in MAKERS and made.device.type == "meta" and made.numel():
            self._found.append(name)
        return made


class Nobody:
    """A taker of nothing."""

    keep_full = False

    def begin(self, start: int, stop: int) -> None: ...

    def take(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None: ...

    def end(self, start: int, stop: int, cache: TakenCache) -> None: ...


def model_of(family: str) -> LoadedModel:
    model = load_model(directory_of(family), dtype=DTYPE)
    return replace(model, module=model.module.to("meta"), device="meta")


def prefill(family: str, seed: Seed | None = None) -> list[str]:
    """What crosses in a prefill of several forwards."""
    model, layers = model_of(family), source_of(family, DTYPE).manifest().layers
    with Crossings() as crossings:
        run_prefill(
            model,
            layers,
            make_prompt(NUM_TOKENS),
            17,
            Nobody(),
            cuts=(CUT,),
            seed=seed,
            forward=model.forward_logits,
        )
    assert crossings.calls > 100
    return crossings.found


@by_family
def test_a_prefill_only_queues(family: str) -> None:
    assert prefill(family) == IDS


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_nor_does_one_wait_that_goes_on_from_a_seed(family: str) -> None:
    states = [
        [
            torch.empty(
                (part.heads, needed_rows(layer, CUT), part.head_dim),
                dtype=dtype_of(part),
                device="meta",
            )
            for part in layer.parts
        ]
        for layer in source_of(family, DTYPE).manifest().layers
    ]
    assert prefill(family, Seed(CUT, tuple((keys, values) for keys, values in states))) == IDS


@by_family
def test_a_decode_step_only_queues(family: str) -> None:
    model, crossings = model_of(family), Crossings()
    layers = decoder_of(family, DTYPE).manifest().layers
    lane = Lane(layers, CONTEXT, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8).to("meta"))
    lane.begin(NUM_TOKENS)
    lane.publish()
    ids = torch.tensor([[5]], device="meta")
    with crossings:
        for _ in range(WINDOW + 2):  # a sliding layer moves its rows back once
            model.forward_logits(ids, lane.cache)
    assert lane.length == NUM_TOKENS + WINDOW + 2
    assert crossings.calls > 100
    assert crossings.found == []


@pytest.mark.parametrize("bug", ["item", "quick", "to", "made", "like", "copied"])
def test_what_crosses_is_seen(bug: str) -> None:
    there = torch.full((), 5, device="meta")
    with Crossings() as crossings:
        match bug:
            case "item":
                with pytest.raises(RuntimeError):
                    there.item()
            case "quick":
                with pytest.raises(RuntimeError), torch.inference_mode():
                    torch.full((), 5, device="meta").item()
            case "to":
                torch.ones(3).to("meta")
            case "made":
                torch.tensor([1, 2], device="meta")
            case "like":
                there.new_tensor([1, 2])
            case _:
                torch.empty(3, device="meta").copy_(torch.ones(3))
    assert len(crossings.found) == 1
