"""A prefill that vLLM computes, taken layer by layer, and what must not come out of its forward."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from headrace.backends.null import decoder_like
from headrace.backends.replay import open as open_replay
from headrace.backends.takers import taker_of
from headrace.engine.vllm.producing import Producing
from headrace.errors import Cancelled, LocalProtocolError
from headrace.plan import compile_plan
from headrace.testing.sinks import MemorySink, ask
from tests.unit.backends.plain_cache import PlainCache

pytestmark = pytest.mark.usefixtures("one_thread")

GEOMETRY: dict[str, Any] = {
    "layers": 3,
    "heads": 2,
    "head_dim": 4,
    "dtype": "float32",
    "window": 6,
    "full_every": 3,
    "vocab_size": 32,
    "max_positions": 40,
}
TABLE = torch.tensor([5, 2, 9, 11], dtype=torch.int32)
SHARING = 7  # a module of no layer of its own


class Cache(PlainCache):
    """What is told by the names "0", "1" and "2"."""

    def layer_of(self, name: str) -> int | None:
        return None if int(name) == SHARING else int(name)

    def kernel_block_size(self, layer: int) -> int:
        return 4


class Taken:
    """A taker that keeps what it is told; `raises`: at which call, counted from 0."""

    def __init__(self, raises: int = -1) -> None:
        self.told: list[Any] = []
        self.rows: list[torch.Tensor] = []
        self.states: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._raises = raises

    def _tell(self, *what: Any) -> None:
        if len(self.told) == self._raises:
            raise Cancelled("withdrawn")
        self.told.append(what)

    def begin(self, start: int, stop: int) -> None:
        self._tell("begin", start, stop)

    def take(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._tell("take", layer)
        self.rows += [keys, values]

    def end(self, start: int, stop: int, cache: Any) -> None:
        self._tell("end", start, stop)
        self.states.append(cache.states(2))


class Prefill:
    """The forward of vLLM's, for one prompt of random states."""

    def __init__(self, num_tokens: int) -> None:
        self.cache = Cache(decoder_like(open_replay(GEOMETRY).manifest()))
        self.producing = Producing()
        self.producing.cache = self.cache
        generator = torch.Generator().manual_seed(1)
        self.states = torch.randn(3, 2, num_tokens, 2, 4, generator=generator)

    def step(self, start: int, stop: int) -> None:
        """One step, in which each layer asks what is scheduled first, as the connector does."""
        positions = torch.arange(start, stop)
        cells = TABLE[positions // 4].long() * 4 + positions % 4
        for layer in range(3):
            self.producing.scheduled(start, stop)
            rows = self.states[layer, 0, start:stop], self.states[layer, 1, start:stop]
            self.cache.write(layer, rows, cells)
            self.producing.saved(str(layer), TABLE)
            self.producing.saved(str(SHARING), TABLE)
        self.producing.stepped()


def test_steps_of_a_prefill_are_told_one_by_one() -> None:
    prefill, taken = Prefill(11), Taken()
    prefill.producing.begin(taken)
    assert prefill.producing.at_work
    prefill.step(0, 8)
    prefill.step(8, 11)
    assert prefill.producing.end() == 11
    assert not prefill.producing.at_work
    takes = [("take", 0), ("take", 1), ("take", 2)]
    first, second = [("begin", 0, 8), *takes, ("end", 0, 8)], [("begin", 8, 11), *takes]
    assert taken.told == [*first, *second, ("end", 8, 11)]
    for at, rows in enumerate(taken.rows):
        piece = slice(0, 8) if at < 6 else slice(8, 11)
        assert torch.equal(rows, prefill.states[at % 6 // 2, at % 2, piece].permute(1, 0, 2))
    for stop, (keys, values) in zip((8, 11), taken.states, strict=True):
        assert torch.equal(keys, prefill.states[2, 0, :stop].permute(1, 0, 2))
        assert torch.equal(values, prefill.states[2, 1, :stop].permute(1, 0, 2))


@pytest.mark.parametrize("route", ["whole", "chunked", "streamed"])
@pytest.mark.parametrize("cuts", [(0, 11), (0, 4, 11), (0, 3, 8, 11)])
def test_every_route_puts_the_same_bytes_into_the_slot(route: Any, cuts: tuple[int, ...]) -> None:
    prefill = Prefill(11)
    plan = compile_plan(prefill.cache.manifest(), "token_major", 11, 40)
    sink = MemorySink(plan, ask(11, route, chunk=3))
    taker = taker_of(sink, 0)
    prefill.producing.begin(taker)
    for start, stop in pairwise(cuts):
        prefill.step(start, stop)
    assert prefill.producing.failure is None
    assert prefill.producing.end() == 11
    taker.finish()
    sink.final(None, token=1)
    for (layer, part), nbytes in sink.cells().items():
        low = plan.windows[layer][0]
        assert nbytes == prefill.states[layer, part, low:].contiguous().numpy().tobytes()
    assert not sink.stray_bytes()


@pytest.mark.parametrize("raises", range(10))
def test_what_a_taker_raises_is_kept_until_after_the_step(raises: int) -> None:
    """And nothing more is taken: vLLM's forward runs to its end."""
    prefill, taken = Prefill(8), Taken(raises)
    prefill.producing.begin(taken)
    prefill.step(0, 4)
    prefill.step(4, 8)
    assert isinstance(prefill.producing.failure, Cancelled)
    assert len(taken.told) == raises
    assert not prefill.producing.at_work
    prefill.producing.end()
    again = Taken()
    prefill.producing.begin(again)
    assert prefill.producing.at_work
    assert prefill.producing.failure is None
    prefill.step(0, 8)
    assert len(again.told) == 5


@pytest.mark.parametrize("second", [(6, 8), (2, 8), (0, 8)])
def test_a_step_that_does_not_go_on_where_the_last_ended(second: tuple[int, int]) -> None:
    """vLLM's own prefix cache, or a preemption: what is skipped would not be carried."""
    prefill, taken = Prefill(8), Taken()
    prefill.producing.begin(taken)
    prefill.step(0, 4)
    prefill.step(*second)
    failure = prefill.producing.failure
    assert isinstance(failure, LocalProtocolError)
    assert str(failure) == f"vLLM computes from position {second[0]}, and [0, 4) was taken"
    assert taken.told[-1] == ("end", 0, 4)


def test_nothing_is_taken_without_a_prefill() -> None:
    prefill = Prefill(8)
    prefill.step(0, 8)
    prefill.producing.stepped()
    prefill.producing.saved("0", TABLE)
    assert prefill.producing.failure is None
    taken = Taken()
    prefill.producing.begin(taken)
    prefill.producing.saved("0", TABLE)
    prefill.producing.stepped()
    assert taken.told == []
    assert prefill.producing.end() == 0


def test_states_and_rows_that_nobody_has() -> None:
    producing = Producing()
    with pytest.raises(LocalProtocolError, match="between two steps"):
        producing.states(0)
    producing.begin(Taken())
    producing.scheduled(0, 4)
    producing.saved("0", TABLE)
    with pytest.raises(LocalProtocolError, match="has not registered its cache"):
        producing.states(0)
