"""The kernels of one model, loaded when a chunk first needs them and kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from headrace.engine.faults import raised_as
from headrace.engine.rngd.buckets import Chunk
from headrace.engine.rngd.executor import Executor, Program
from headrace.engine.rngd.family import Config, Family
from headrace.engine.rngd.sdk import Sdk
from headrace.engine.rngd.signature import changed


class Kernels:
    """Programs by role and bucket."""

    def __init__(
        self, sdk: Sdk, executor: Executor, family: Family, config: Config, max_positions: int
    ) -> None:
        """config: of the text decoder. max_positions: how long the caches and rope tables are."""
        self._module = sdk.kernels(family.module)
        self._executor = executor
        self._family = family
        self._kinds = family.kinds(config)
        self._windows = {kind: shape.window for kind, shape in family.geometry(config).items()}
        self._slots = max_positions + 1
        self._overrides = dict(family.overrides(config, max_positions))
        self._loaded: dict[tuple[str, tuple[int, ...]], Program] = {}
        self.told: Callable[[str], None] = lambda label: None
        """Called with what is about to be loaded."""

    def token_wise(self, layer: int, chunk: Chunk) -> Program:
        """The kernel that makes the query and the K/V of a layer: `first` or `mid`."""
        if layer == 0:
            name = self._family.first
        else:
            name = self._mid(self._kinds[layer - 1], self._kinds[layer])
        return self._load(name, num_tokens=chunk.tokens, num_kv_cache_blocks=self._slots)

    def attention(self, kind: str, chunk: Chunk) -> Program:
        """The kernel that attends to what is in a layer's cache."""
        return self._load(
            self._family.attention[kind],
            batch_size=1,
            attention_size=self.attention_size(kind, chunk),
            input_ids_size=chunk.tokens,
            num_kv_cache_blocks=self._slots,
            **self._family.attention_options.get(kind, {}),
        )

    def attention_size(self, kind: str, chunk: Chunk) -> int:
        """How many positions that kernel looks at."""
        window = self._windows[kind]
        return chunk.attention if window is None else chunk.window_size(window)

    def last(self, chunk: Chunk) -> Program:
        """The kernel that ends the last layer and gives logits."""
        return self._load(self._family.last, num_tokens=chunk.tokens)

    def of_chunk(self, chunk: Chunk) -> Iterator[tuple[int, Program]]:
        """Every kernel that a prompt's last chunk needs, with a layer that it is called for."""
        for layer in range(len(self._kinds)):
            yield layer, self.token_wise(layer, chunk)
            yield layer, self.attention(self._kinds[layer], chunk)
        yield len(self._kinds), self.last(chunk)

    def _mid(self, ended: str, begun: str) -> str:
        if (ended, begun) not in self._family.mid:
            raise changed(
                f"of {self._family.module}", f"there is none from a {ended} to a {begun} layer"
            )
        return self._family.mid[ended, begun]

    def _load(self, name: str, **sizes: Any) -> Program:
        key = name, tuple(sizes.values())
        if key not in self._loaded:
            factory = getattr(self._module, name, None)
            if factory is None:
                raise changed(name, f"the kernel library's {self._family.module} has none so named")
            shape = ", ".join(f"{size}={value}" for size, value in sizes.items())
            self.told(f"{name} {shape}")
            with raised_as(lambda told: changed(name, f"it cannot be made for {shape}: {told}")):
                kernel = factory(**sizes, hf_config_overrides=self._overrides)
                self._loaded[key] = self._executor.load(kernel)
        return self._loaded[key]
