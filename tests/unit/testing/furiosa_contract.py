"""Run by the interpreter of the vendor's environment: the fake beside the installed packages.

Prints one JSON object: `signatures`, `calls` and `shares`, each by name as (fake, installed), but
for `shares`, which are rms differences of the fake's numbers as shares of the installed ones' rms.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

import torch

from headrace.engine.rngd import llama
from headrace.engine.rngd.buckets import Buckets
from headrace.engine.rngd.emulated import EmulatedExecutor
from headrace.engine.rngd.furiosa import open_sdk
from headrace.engine.rngd.program import LayerProgram
from headrace.engine.rngd.sdk import Sdk
from headrace.engine.rngd.signature import Tensor, read_signature
from headrace.engine.rngd.tiny import TINY_LLAMA, RandomWeights
from headrace.testing.fake_furiosa import open as open_fake

TOKENS = [7 + 31 * at % 500 for at in range(40)]
PIECES = [(0, 16), (16, 40)]
SIZES: dict[str, dict[str, int]] = {
    llama.FAMILY.first: {"num_tokens": 16, "num_kv_cache_blocks": 65},
    llama.FAMILY.mid["full_attention", "full_attention"]: {
        "num_tokens": 16,
        "num_kv_cache_blocks": 65,
    },
    llama.FAMILY.attention["full_attention"]: {
        "batch_size": 1,
        "attention_size": 64,
        "input_ids_size": 16,
        "num_kv_cache_blocks": 65,
    },
    llama.FAMILY.last: {"num_tokens": 16},
}


def signatures(sdk: Sdk) -> dict[str, list[list[list[Any]]]]:
    """Arguments and results of each kernel."""
    overrides = llama.overrides(TINY_LLAMA, 64)
    module, made = sdk.kernels("llama"), {}
    for name, sizes in SIZES.items():
        kernel = getattr(module, name)(**sizes, hf_config_overrides=overrides)
        signature = read_signature(kernel.dsl)
        made[name] = [
            [_told(each) for each in part] for part in (signature.arguments, signature.results)
        ]
    return made


def _told(tensor: Tensor) -> list[Any]:
    return [tensor.name, tensor.shape, tensor.padded, tensor.dtype, tensor.split, tensor.placed]


def calls(torch_furiosa: Any) -> dict[str, list[str]]:
    """Names of parameters, without `self`, of what can be asked for them."""
    made = torch_furiosa
    asked: dict[str, Callable[..., Any]] = {
        "TclModule": made.TclModule,
        "CompileModule.from_module": made.CompileModule.from_module,
        "Runnable": made.Runnable,
        "ir.Runnable.deserialize": made.ir.Runnable.deserialize,
        "ir.FlatDramShape": made.ir.FlatDramShape,
        "set_fusion": made.set_fusion,
        "get_fusion": made.get_fusion,
        "set_stream": made.set_stream,
        "current_stream": made.current_stream,
        "Stream": made.Stream,
        "Event": made.Event,
        "empty_sharded": made.empty_sharded,
        "config.cache_context": made.config.cache_context,
    }
    return {name: list(inspect.signature(call).parameters) for name, call in asked.items()}


def methods(event: Any, stream: Any) -> dict[str, list[str]]:
    asked = {
        "Event.record": event.record,
        "Event.query": event.query,
        "Event.synchronize": event.synchronize,
        "Event.wait": event.wait,
        "Stream.synchronize": stream.synchronize,
    }
    return {
        name: [each for each in inspect.signature(call).parameters if each != "self"]
        for name, call in asked.items()
    }


def prefill(sdk: Sdk) -> dict[str, torch.Tensor]:
    """K and V by layer and the last logits of the tiny model, in two chunks."""
    program = LayerProgram(
        sdk,
        EmulatedExecutor(sdk),
        llama.FAMILY,
        TINY_LLAMA,
        RandomWeights(),
        Buckets((16, 32), 64),
    )
    given = program.run(TOKENS, PIECES, begin=_two, final=_one, end=_two)
    heads = TINY_LLAMA["num_key_value_heads"]
    made = {}
    for layer in range(TINY_LLAMA["num_hidden_layers"]):
        for part, name in enumerate("kv"):
            rows = torch.zeros(len(TOKENS), heads, 64, dtype=torch.bfloat16)
            program.read(layer, part, 0, len(TOKENS), rows)
            made[f"{name}{layer}"] = rows
    row = torch.zeros(1, program.last_width, dtype=torch.bfloat16)
    program.read_last(given, row)
    made["logits"] = program.logits(row)
    return made


def share(got: torch.Tensor, wanted: torch.Tensor) -> float:
    off = (got.float() - wanted.float()).square().mean().sqrt()
    return float(off / wanted.float().square().mean().sqrt())


def _one(layer: int) -> None:
    pass


def _two(start: int, stop: int) -> None:
    pass


def main() -> None:
    torch.set_num_threads(1)
    fake, real = open_fake(), open_sdk()
    event, stream = fake.torch.Event("furiosa:0"), fake.torch.Stream("furiosa:0")
    told = [
        {**calls(fake.torch), **methods(event, stream)},
        {**calls(real.torch), **methods(real.torch.Event, real.torch.Stream)},
    ]
    here, there = prefill(fake), prefill(real)
    print(
        json.dumps(
            {
                "signatures": [signatures(fake), signatures(real)],
                "calls": told,
                "shares": {name: share(here[name], there[name]) for name in there},
            }
        )
    )


if __name__ == "__main__":
    main()
