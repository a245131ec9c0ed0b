"""The layer loop: a prompt's chunks through first, attention, mid, ... and last.

Caches belong to this object. A prompt's position p lies in slot p + 1 of every layer's cache, so
that any range of positions is one range of rows; slot 0 takes what is padding. A layer's K and V
are final when the kernel that makes them was called, before its attention runs, and that is when
`final` is told: whoever listens may read rows while the rest goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from headrace.engine.rngd.buckets import Buckets, Chunk
from headrace.engine.rngd.executor import Executor, Program, Ticket, bind
from headrace.engine.rngd.family import Config, Family, TensorsByName, number
from headrace.engine.rngd.inputs import ChunkInputs, attention_inputs, token_inputs
from headrace.engine.rngd.kernels import Kernels
from headrace.engine.rngd.rope import table
from headrace.engine.rngd.sdk import Sdk
from headrace.engine.rngd.signature import Tensor, changed

CACHES: Final = {"k_cache": 0, "v_cache": 1}
STAGES: Final = ("first", "attention", "mid", "last")
"""What the host's time is told by. On a card a call returns before its kernel has run."""


class LayerProgram:
    """Computes prompts of one model, one at a time."""

    def __init__(
        self,
        sdk: Sdk,
        executor: Executor,
        family: Family,
        config: Config,
        weights: TensorsByName,
        buckets: Buckets,
    ) -> None:
        """config: the checkpoint's. Kernels and weights are loaded when they are first needed."""
        self._executor = executor
        self._family, self._config = family, family.text(config)
        self.kernels = Kernels(sdk, executor, family, self._config, buckets.max_positions)
        self._kinds = family.kinds(self._config)
        self._geometry = family.geometry(self._config)
        self._buckets = buckets
        self._weights = weights
        self._placed: dict[tuple[str, tuple[int, ...]], Any] = {}
        self._caches: dict[tuple[int, int], tuple[Tensor, Any]] = {}
        self._head: torch.Tensor | None = None
        self.stage_ns: dict[str, int] = dict.fromkeys(STAGES, 0)

    def prepare(self, shapes: Sequence[Chunk]) -> None:
        """Load kernels for chunks of these shapes, the caches, and all weights.

        Raises:
            Refused: the checkpoint's weights are not what its config says.
            BackendUnavailable: a kernel is not as expected, or cannot be compiled.
        """
        for shape in shapes:
            for layer, program in self.kernels.of_chunk(shape):
                for tensor in program.signature.arguments:
                    if tensor.name in CACHES:
                        self._cache(layer, tensor)
                    elif tensor.name in self._family.ropes or tensor.name in self._family.weights:
                        self._weight(layer, tensor)
        self._take_head()
        if self._family.embed is not None:
            self._family.embed(self._config, self._weights, torch.zeros(1, dtype=torch.int32))

    def run(
        self,
        tokens: Sequence[int],
        pieces: Sequence[tuple[int, int]],
        *,
        begin: Callable[[int, int], None],
        final: Callable[[int], None],
        end: Callable[[int, int], None],
    ) -> tuple[Tensor, Any, int]:
        """Compute a prompt; returns the logits of its last chunk and the last position's row there.

        begin, end: positions [start, stop) are about to be computed, are computed in all layers.
        final: the positions being computed are final in this layer.
        """
        given = torch.tensor(list(tokens), dtype=torch.int32)
        chunks = self._buckets.chunks(pieces)
        state: Mapping[str, Any] = {}
        for chunk in chunks:
            begin(chunk.start, chunk.stop)
            inputs = self._token_inputs(given, chunk)
            state = self._layers(chunk, inputs, final, last=chunk is chunks[-1])
            end(chunk.start, chunk.stop)
        program = self.kernels.last(chunks[-1])
        (logits,) = self._call("last", program, len(self._kinds), state)
        return program.signature.results[0], logits, chunks[-1].length - 1

    def read(self, layer: int, part: int, start: int, stop: int, target: torch.Tensor) -> Ticket:
        """Begin to copy positions [start, stop) of a part (0 = K, 1 = V) of a layer's cache.

        target: contiguous host memory, bf16, [positions, heads, head_dim].
        """
        tensor, cache = self._caches[layer, part]
        return self._executor.read(tensor, cache, start + 1, stop + 1, target[:, None])

    @property
    def last_width(self) -> int:
        """How many numbers `read_last` copies: logits, or what the host makes them of."""
        name = "vocab_size" if self._family.head is None else "hidden_size"
        return number(self._config, name)

    def read_last(self, given: tuple[Tensor, Any, int], target: torch.Tensor) -> Ticket:
        """Begin to copy the last position's row of what `run` gave into `target`, bf16
        [1, last_width].
        """
        tensor, logits, row = given
        return self._executor.read(tensor, logits, row, row + 1, target)

    def logits(self, row: torch.Tensor) -> torch.Tensor:
        """float32 [vocab_size] out of the row that `read_last` copied."""
        head = self._take_head()
        if head is not None:
            row = torch.nn.functional.linear(row, head)
        return row[0].to(torch.float32)

    def _take_head(self) -> torch.Tensor | None:
        if self._head is None and self._family.head is not None:
            shape = number(self._config, "vocab_size"), self.last_width
            self._head = self._weights.tensor(self._family.head, shape, "bfloat16")
        return self._head

    def _layers(
        self, chunk: Chunk, inputs: ChunkInputs, final: Callable[[int], None], *, last: bool
    ) -> Mapping[str, Any]:
        """All layers of a chunk; what the `last` kernel takes, if this is the last chunk."""
        state: dict[str, Any] = {}
        by_kind = {kind: self._attention_inputs(chunk, kind) for kind in set(self._kinds)}
        for layer, kind in enumerate(self._kinds):
            program = self.kernels.token_wise(layer, chunk)
            role = "mid" if layer else "first"
            query, hidden = self._call(role, program, layer, state, inputs)
            final(layer)
            if layer == len(self._kinds) - 1 and not last:
                break  # nobody needs what comes after the last layer's K and V
            attention = self.kernels.attention(kind, chunk)
            (mixed,) = self._call("attention", attention, layer, {"query": query}, by_kind[kind])
            state = {"weighted_v": mixed, "hidden_states": hidden}
        return state

    def _call(
        self,
        role: str,
        program: Program,
        layer: int,
        state: Mapping[str, Any],
        inputs: ChunkInputs | None = None,
    ) -> Sequence[Any]:
        named = dict(state)
        for tensor in program.signature.arguments:
            name = tensor.name
            if name in named:
                continue
            if name in CACHES:
                named[name] = self._cache(layer, tensor)
            elif inputs is not None and name in inputs:
                named[name] = inputs.place(tensor)
            elif name in self._family.ropes or name in self._family.weights:
                named[name] = self._weight(layer, tensor)
        arguments = bind(program.signature, named)
        began = time.perf_counter_ns()
        results = program(arguments)
        self.stage_ns[role] += time.perf_counter_ns() - began
        return results

    def _token_inputs(self, tokens: torch.Tensor, chunk: Chunk) -> ChunkInputs:
        hosts = token_inputs(tokens, chunk)
        if self._family.embed is not None:
            rows = self._family.embed(self._config, self._weights, hosts.pop("input_ids"))
            hosts["hidden_states"] = rows
        return ChunkInputs(self._executor, hosts)

    def _attention_inputs(self, chunk: Chunk, kind: str) -> ChunkInputs:
        size = self.kernels.attention_size(kind, chunk)
        hosts = attention_inputs(chunk, size, self._geometry[kind].window)
        return ChunkInputs(self._executor, hosts)

    def _cache(self, layer: int, tensor: Tensor) -> Any:
        key = layer, CACHES[tensor.name]
        if key not in self._caches:
            shape = self._geometry[self._kinds[layer]]
            wanted = (self._buckets.max_positions + 1, 1, shape.heads, shape.head_dim)
            if tensor.shape != wanted:
                raise changed("of a cache", f"it is {tensor.shape}, expected {wanted}")
            self._caches[key] = tensor, self._executor.zeros(tensor)
        known, cache = self._caches[key]
        if known.stored != tensor.stored:
            raise changed("of a cache", f"one takes {known.stored}, another {tensor.stored}")
        return cache

    def _weight(self, layer: int, tensor: Tensor) -> Any:
        if tensor.name in self._family.ropes:
            name = tensor.name
        else:
            name = self._family.weights[tensor.name].format(layer=layer, ended=layer - 1)
        key = name, tensor.stored
        if key not in self._placed:
            self._placed[key] = self._executor.place(tensor, self._host_weight(name, tensor))
        return self._placed[key]

    def _host_weight(self, name: str, tensor: Tensor) -> torch.Tensor:
        if tensor.name not in self._family.ropes:
            return self._weights.tensor(name, tensor.shape, tensor.dtype)
        made = table(self._family.ropes[tensor.name](self._config), self._buckets.max_positions)
        if tuple(made.shape) != tensor.shape:
            raise changed("of a rope table", f"it is {tensor.shape}, expected {tuple(made.shape)}")
        return made
