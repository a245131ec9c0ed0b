"""A kernel library of plain torch arithmetic, under the names that a family asks for.

Its kernels have the axes, texts and calls of the installed ones and no more: they change caches in
place, scatter padding to slot 0, and take a cache that is split over `chips`. They compute in
float32 and round to bf16 where a kernel's result does. They stand in for nothing that is measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from headrace.engine.rngd import llama
from headrace.engine.rngd.family import FULL, SLIDING, Family, Geometry
from headrace.engine.rngd.sdk import Sdk
from headrace.engine.rngd.signature import read_signature

BF16 = torch.bfloat16
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 5,
    "intermediate_size": 48,
    "vocab_size": 60,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
}
PADDED_VOCAB = 64
WINDOW = 16
KINDS = (SLIDING, SLIDING, FULL, SLIDING, FULL)

HYBRID = replace(
    llama.FAMILY,
    model_type="small_hybrid",
    module="hybrid",
    mid={(a, b): f"mid_{a}_{b}" for a in (FULL, SLIDING) for b in (FULL, SLIDING)},
    attention={FULL: "attend_full", SLIDING: "attend_sliding"},
    geometry=lambda config: {
        FULL: llama.geometry(config)[FULL],
        SLIDING: Geometry(2, 8, window=WINDOW),
    },
    kinds=lambda config: KINDS,
)
"""The llama's layers with a window on some, so that there are two cache groups."""


@dataclass
class Kernel:
    """What a factory of the library returns."""

    dsl: str
    run: Callable[..., Sequence[torch.Tensor]]


def open_llama() -> Sdk:
    """A factory as the engine's option `sdk` names one."""
    return Library(llama.FAMILY).sdk()


@dataclass
class Library:
    """The factories of one family. made: the sizes that each was asked for, in order.

    called: what is told of each call, by the kernel's name.
    """

    family: Family
    chips: int = 1
    made: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    called: list[str] = field(default_factory=list)

    def sdk(self) -> Sdk:
        """The library as an engine is handed it."""
        names = [self.family.first, self.family.last]
        names += [*self.family.mid.values(), *self.family.attention.values()]
        module = SimpleNamespace(**{name: self._factory(name) for name in names})
        return Sdk(
            "small kernels",
            SimpleNamespace(TclModule=lambda kernel: kernel.run),
            lambda name: {self.family.module: module}[name],
            None,
            {"small-kernels": "1"},
        )

    def _factory(self, name: str) -> Callable[..., Kernel]:
        def make(*, hf_config_overrides: Mapping[str, Any], **sizes: int) -> Kernel:
            self.made.append((name, sizes))
            maker = _Maker(self, name, {**hf_config_overrides, **sizes})
            if name == self.family.first:
                return maker.token_wise(first=True)
            if name == self.family.last:
                return maker.last()
            if name in self.family.mid.values():
                return maker.token_wise(first=False)
            return maker.attention()

        return make


class _Maker:
    def __init__(self, library: Library, name: str, sizes: Mapping[str, Any]) -> None:
        self._library, self._name, self._chips = library, name, library.chips
        heads = sizes["num_attention_heads"]
        self._axes = {
            "D": sizes["hidden_size"],
            "Q": sizes["hidden_size"],
            "H": sizes["num_key_value_heads"],
            "E": sizes["hidden_size"] // heads,
            "K": sizes["num_key_value_heads"] * sizes["hidden_size"] // heads,
            "C": sizes["hidden_size"] // heads // 2,
            "F": sizes["intermediate_size"],
            "V": sizes["vocab_size"],
            "R": sizes["max_position_embeddings"],
            "T": sizes.get("num_tokens", sizes.get("input_ids_size")),
            "S": sizes.get("num_kv_cache_blocks", 1),
            "A": sizes.get("attention_size", 1),
            "X": 2,
            "U": 1,
        }

    def _kernel(
        self, arguments: Mapping[str, str], results: str, run: Callable[..., Sequence[torch.Tensor]]
    ) -> Kernel:
        axes = ", ".join(f"{axis}={size}" for axis, size in self._axes.items())
        listed = ",\n    ".join(f"{name}: {kind}" for name, kind in arguments.items())
        dsl = f"\ndef {self._name}<{axes}>(\n    {listed}\n) -> {results}:\n    body\n"
        taken = read_signature(dsl).arguments

        def call(*given: torch.Tensor) -> Sequence[torch.Tensor]:
            self._library.called.append(self._name)
            for tensor, argument in zip(taken, given, strict=True):
                told = tuple(argument.shape), str(argument.dtype)
                assert told == (tensor.squeezed, f"torch.{tensor.dtype}"), tensor.name
            formed = [each.view(tensor.stored) for tensor, each in zip(taken, given, strict=True)]
            return run(**dict(zip(arguments, formed, strict=True)))

        return Kernel(dsl, call)

    def _cache(self) -> str:
        if self._chips == 1:
            return "[S, U, H, E]/bf16"
        heads = self._axes["H"]
        part = f"H @ {heads}", heads // self._chips
        split = f"[{part[0]} / {part[1]}] | [S, U, {part[0]} % {part[1]}, E]"
        return f"dram({split})/bf16 @ original=[S, U, H, E]"

    def _layer(self, ended: bool) -> dict[str, str]:
        square = "[D, Q]/bf16"
        if ended:
            return {
                "weighted_v": "[T, Q]/bf16",
                "hidden_states": "[T, D]/bf16",
                "attn_o_proj_weight": square,
                "post_attention_norm_weight": "[D]/bf16",
                "mlp_gate_proj_weight": "[F, D]/bf16",
                "mlp_up_proj_weight": "[F, D]/bf16",
                "mlp_down_proj_weight": "[D, F]/bf16",
            }
        return {
            "attn_q_proj_weight": "[Q, D]/bf16",
            "attn_k_proj_weight": "[K, D]/bf16",
            "attn_v_proj_weight": "[K, D]/bf16",
            "rope_table": "[R, C, X, X]/bf16",
            "position_ids": "[T]/i32",
            "kv_scatter_index": "[U, T]/i32",
            "k_cache": self._cache(),
            "v_cache": self._cache(),
            "input_norm_weight": "[D]/bf16",
        }

    def token_wise(self, *, first: bool) -> Kernel:
        before = {"embedding_table": "[V, D]/bf16", "input_ids": "[T]/i32"}
        arguments = {**(before if first else self._layer(True)), **self._layer(False)}
        return self._kernel(arguments, "[T, Q]/bf16, [T, D]/bf16", self._token_wise)

    def attention(self) -> Kernel:
        arguments = {
            "query": "[T, Q]/bf16",
            "kv_gather_index": "[U, A]/i32",
            "k_cache": self._cache(),
            "v_cache": self._cache(),
            "attention_mask": "[U, T, A]/bool",
        }
        return self._kernel(arguments, "[T, Q]/bf16", self._attention)

    def last(self) -> Kernel:
        arguments = {
            **self._layer(True),
            "final_norm_weight": "[D]/bf16",
            "lm_head_weight": (
                f"dram([Broadcast] | [V @ {PADDED_VOCAB}, D])/bf16 @ original=[V, D]"
            ),
        }
        padded = f"dram([Broadcast] | [T, V @ {PADDED_VOCAB}])/bf16 @ original=[T, V]"
        return self._kernel(arguments, padded, self._last)

    def _token_wise(self, **given: torch.Tensor) -> Sequence[torch.Tensor]:
        if "input_ids" in given:
            hidden = given["embedding_table"][given["input_ids"].long()]
        else:
            hidden = _ended(given)
        normed = _norm(hidden, given["input_norm_weight"])
        turn = given["rope_table"][given["position_ids"].long()].float()
        slots = given["kv_scatter_index"][0].long()
        keys = _turned(self._by_head(normed, given["attn_k_proj_weight"]), turn)
        values = self._by_head(normed, given["attn_v_proj_weight"])
        for name, states in (("k_cache", keys), ("v_cache", values)):
            parts = states[:, None].to(BF16).chunk(self._chips, 2)
            for chip, part in zip(self._of_chips(given[name]), parts, strict=True):
                chip[slots] = part
        query = _turned(self._by_head(normed, given["attn_q_proj_weight"]), turn)
        return [query.flatten(1).to(BF16), hidden.to(BF16)]

    def _attention(self, **given: torch.Tensor) -> Sequence[torch.Tensor]:
        slots = given["kv_gather_index"][0].long()
        keys, values = (
            torch.cat(list(self._of_chips(given[name])), 2)[slots, 0].float()
            for name in ("k_cache", "v_cache")
        )
        query = _split(given["query"].float(), self._axes["E"])
        keys, values = (
            each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (keys, values)
        )
        scores = torch.einsum("the,ahe->hta", query, keys) / self._axes["E"] ** 0.5
        scores = scores.masked_fill(~given["attention_mask"], -torch.inf)
        mixed = torch.einsum("hta,ahe->the", scores.softmax(-1), values)
        return [mixed.flatten(1).to(BF16)]

    def _last(self, **given: torch.Tensor) -> Sequence[torch.Tensor]:
        normed = _norm(_ended(given), given["final_norm_weight"])
        return [(normed @ given["lm_head_weight"][0].float().T).to(BF16)[None]]

    def _of_chips(self, cache: torch.Tensor) -> Sequence[torch.Tensor]:
        return [cache] if self._chips == 1 else list(cache)

    def _by_head(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _split(states @ weight.float().T, self._axes["E"])


def _ended(given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    hidden = given["hidden_states"].float()
    hidden = hidden + given["weighted_v"].float() @ given["attn_o_proj_weight"].float().T
    normed = _norm(hidden, given["post_attention_norm_weight"])
    gate = torch.nn.functional.silu(normed @ given["mlp_gate_proj_weight"].float().T)
    up = normed @ given["mlp_up_proj_weight"].float().T
    return hidden + (gate * up) @ given["mlp_down_proj_weight"].float().T


def _norm(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = states.float()
    return wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.float()


def _split(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    return rows.reshape(len(rows), -1, head_dim)


def _turned(heads: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, head_dim], element i turned with element i + head_dim / 2."""
    halves = heads.reshape(*heads.shape[:2], 2, -1)
    return torch.einsum("tior,thri->thoi", turn, halves).flatten(2)


def write_checkpoint(
    directory: Path, *, seed: int = 0, poison: int | None = None, **more: Any
) -> Path:
    """A random llama of `CONFIG`; `poison`: a token whose embedding is no number."""
    config = {**CONFIG, **more}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    dims = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    hidden, inner, vocab = dims
    narrow = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.3).to(BF16)

    tensors = {
        "model.embed_tokens.weight": random(vocab, hidden) * 3,
        "model.norm.weight": random(hidden) + 1,
        "lm_head.weight": random(vocab, hidden),
    }
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(config["num_hidden_layers"]):
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = random(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = random(hidden) + 1
    if poison is not None:
        tensors["model.embed_tokens.weight"][poison] = torch.inf
    save_file(tensors, directory / "model.safetensors")
    return directory
