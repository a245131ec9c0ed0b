"""A model of two cache groups that a `replay` source prefills for, and what must come of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from headrace.backends.null import decoder_like
from headrace.backends.replay import open as open_replay
from headrace.plan import compile_plan
from headrace.testing.sinks import MemorySink, ask
from tests.unit.engine.vllm.made_up import (
    BLOCK,
    HEAD_DIM,
    HEADS,
    FullAttentionSpec,
    SlidingWindowSpec,
    attention,
    cache_config,
    empty_cache,
    group,
    model_in,
    name_of,
    place_of,
    replay_options,
    vllm_config,
)
from tests.unit.vllm.gates import GATED, Gate

CANARY = 7.5
LAYERS = 3
WINDOW = 6
SLIDING = (0, 1)  # the layers of cache group 1; layer 2 is of group 0


class Model:
    """What vLLM would give the connector, for three layers of which two are sliding.

    more: of the `kv_connector_extra_config` beside its one source; gate: where that waits.
    """

    def __init__(
        self, directory: Path, *, gate: Gate | None = None, num_blocks: int = 24, **more: Any
    ) -> None:
        made = model_in(directory / "model")
        self.options = replay_options(made, LAYERS, window=WINDOW, full_every=LAYERS)
        source: dict[str, Any] = {"source": "replay", "options": self.options}
        if gate is not None:
            source = {"source": GATED, "options": {**self.options, "gate": str(gate.path)}}
        extra = {"sources": [source], "route": "streamed", "restart": False} | more
        modules = {
            name_of(at): attention(sliding_window=WINDOW if at in SLIDING else None)
            for at in range(LAYERS)
        }
        self.modules = modules
        self.config = vllm_config(made, modules, kv_connector_extra_config=extra)
        self.cache_config = cache_config(
            group([name_of(2)], FullAttentionSpec()),
            group([name_of(at) for at in SLIDING], SlidingWindowSpec(sliding_window=WINDOW)),
            num_blocks=num_blocks,
        )
        self.tensors = {name_of(at): empty_cache(num_blocks).fill_(CANARY) for at in range(LAYERS)}

    def made(self) -> tuple[Any, Any, dict[str, torch.Tensor]]:
        return self.config, self.cache_config, self.tensors

    def rows(
        self, layer: int, part: int, block_ids: Sequence[Sequence[int]], count: int
    ) -> torch.Tensor:
        """What lies in a request's blocks: [heads, positions, head_dim]."""
        tensor = self.tensors[name_of(layer)]
        ids = block_ids[1 if layer in SLIDING else 0]
        places = place_of(BLOCK, HEAD_DIM)
        flat = tensor.view(tensor.shape[0], HEADS, -1)
        cells = [flat[ids[at // BLOCK]][:, places[part, at % BLOCK]] for at in range(count)]
        return torch.stack(cells, dim=1)

    def untouched(self, *block_ids: Sequence[Sequence[int]]) -> bool:
        """Whether all but these blocks, by cache group, are as they were before."""
        for layer in range(LAYERS):
            at = 1 if layer in SLIDING else 0
            written = {block for ids in block_ids for block in ids[at]}
            tensor = self.tensors[name_of(layer)]
            rest = [block for block in range(tensor.shape[0]) if block not in written]
            if not bool((tensor[rest] == CANARY).all()):
                return False
        return True

    def check_loaded(
        self, tokens: Sequence[int], block_ids: Sequence[Sequence[int]], start: int = 0
    ) -> None:
        """The blocks hold what the source makes of `tokens`, from `start` on, where it is live."""
        engine = open_replay(self.options)
        manifest = engine.manifest()
        count = len(tokens)
        plan = compile_plan(decoder_like(manifest), manifest.layouts[0], count, 64)
        sink = MemorySink(plan, ask(count))
        engine.prefill_stream(tokens, sink)
        assert manifest.layouts == ("head_major",)
        for (layer, part), nbytes in sink.cells().items():
            low = plan.windows[layer][0]
            cells = torch.frombuffer(bytearray(nbytes), dtype=torch.int32)
            made = cells.view(HEADS, count - low, HEAD_DIM)
            first = max(low, start)
            landed = self.rows(layer, part, block_ids, count).contiguous().view(torch.int32)
            assert torch.equal(landed[:, first:], made[:, first - low :]), (layer, part)
