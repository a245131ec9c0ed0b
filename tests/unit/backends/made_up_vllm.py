"""A package `vllm` whose engine writes random states into a plain cache, by chunks, as it is told.

It tells the process's `Producing` what the connector would tell it.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from headrace.engine.vllm.producing import HERE
from tests.unit.backends.plain_cache import PlainCache

LONGEST = 40  # the model's
TOKEN = 17
TEXT: dict[str, Any] = {
    "max_position_embeddings": LONGEST,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 16,
}


class Cache(PlainCache):
    def layer_of(self, name: str) -> int:
        return int(name)

    def kernel_block_size(self, layer: int) -> int:
        return 4


class Engine:
    """One request at a time. refuses: what making it raises.

    silent: steps that are not told; mute: it ends without a token; steps: those
    that were run. lingers: a request that was aborted goes with the next step.
    """

    def __init__(self, cache: Cache, refuses: Exception | None = None) -> None:
        self.cache = cache
        self.refuses = refuses
        self.text = SimpleNamespace(**TEXT)
        self.connects = True
        self.renames = False
        self.lingers = False
        self.silent: set[int] = set()
        self.mute = False
        self.asked: dict[str, Any] = {}
        self.aborted: list[str] = []
        self.steps = 0
        self.ended = False
        self.states = torch.zeros(0)
        self._tokens: dict[str, list[int]] = {}
        self._at = 0

    # What the source calls.

    def LLM(self, **asked: Any) -> SimpleNamespace:  # noqa: N802
        if self.refuses is not None:
            raise self.refuses
        self.asked = asked
        length = SimpleNamespace(model_config=SimpleNamespace(max_model_len=asked["max_model_len"]))
        self.vllm_config = length
        self.engine_core = SimpleNamespace(shutdown=self._end)
        HERE.cache = self.cache if self.connects else None
        return SimpleNamespace(llm_engine=self)

    def add_request(self, name: str, prompt: Any, params: Any) -> str | None:
        assert not self._tokens, "one at a time"
        assert (params.max_tokens, params.temperature) == (1, 0.0)
        self._tokens[name] = prompt["prompt_token_ids"]
        count = len(self._tokens[name])
        generator = torch.Generator().manual_seed(sum(self._tokens[name]))
        layers = len(self.cache.manifest().layers)
        self.states = torch.randn(layers, 2, count, 2, 4, generator=generator)
        self._at = 0
        return f"{name}-0a1b" if self.renames else None

    def step(self) -> list[Any]:
        if self.lingers and self.aborted:
            self._tokens.pop(self.aborted[-1], None)
        if not self._tokens:
            return []
        (tokens,) = self._tokens.values()
        start = self._at
        self._at = stop = min(start + int(self.asked["max_num_batched_tokens"]), len(tokens))
        self.steps += 1
        if self.steps not in self.silent:
            self._tell(start, stop)
        if stop < len(tokens):
            return [SimpleNamespace(outputs=[])]
        if self.mute:
            self._tokens.clear()
            return []
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[TOKEN])])]

    def has_unfinished_requests(self) -> bool:
        return bool(self._tokens)

    def abort_request(self, names: list[str]) -> None:
        """By the names that were given: others are ignored, as vLLM ignores its own."""
        self.aborted += names
        for name in names if not self.lingers else ():
            self._tokens.pop(name, None)

    def _end(self) -> None:
        self.ended = True

    def _tell(self, start: int, stop: int) -> None:
        table = torch.tensor([5, 2, 9, 11])
        positions = torch.arange(start, stop)
        cells = table[positions // 4] * 4 + positions % 4
        for layer, states in enumerate(self.states):
            HERE.scheduled(start, stop)
            self.cache.write(layer, list(states[:, start:stop]), cells)
            if HERE.at_work:
                HERE.saved(str(layer), table)
        HERE.stepped()


def modules(engine: Engine, version: str = "0.32.0") -> dict[str, ModuleType]:
    """What is imported of vLLM, by name."""
    names = ("vllm", "vllm.transformers_utils", "vllm.transformers_utils.config")
    made = {name: ModuleType(name) for name in names}
    config = SimpleNamespace(get_text_config=lambda: engine.text)
    vars(made["vllm"]).update(
        __version__=version,
        __path__=[],
        LLM=engine.LLM,
        SamplingParams=SimpleNamespace,
        TokensPrompt=dict,
    )
    vars(made[names[1]]).update(__path__=[])
    vars(made[names[2]]).update(get_config=lambda model, trust_remote_code: config)
    return made
