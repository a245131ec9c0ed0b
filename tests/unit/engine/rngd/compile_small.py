"""Run by the interpreter of the vendor's environment: compile one small kernel into a directory.

First without a cross compiler, then with the one on PATH, if there is one, then once more. Prints
one JSON object: what each attempt gave.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from headrace.engine.rngd import llama
from headrace.engine.rngd.card import shard_axes
from headrace.engine.rngd.compiled import CompiledKernels
from headrace.engine.rngd.furiosa import open_sdk, set_fusion_once
from headrace.engine.rngd.probes import COMPILER
from headrace.engine.rngd.sdk import Sdk
from headrace.engine.rngd.signature import Tensor
from headrace.engine.rngd.tiny import TINY_LLAMA
from headrace.errors import BackendUnavailable


def layout_of(sdk: Sdk, tensor: Tensor) -> Any:
    """Of memory as the card's executor asks for it; it is the host's here."""
    made = sdk.torch.empty_sharded(
        list(tensor.padded),
        shard_axes=shard_axes(tensor, 1),
        dtype=getattr(torch, tensor.dtype),
        device="cpu",
    )
    told = import_module("furiosa.torch._C.tensor")
    return told._get_furiosa_dram_shape(made)


def main(directory: Path) -> None:
    sdk = open_sdk()
    set_fusion_once(sdk.torch, 8)
    factory = getattr(sdk.kernels("llama"), llama.FAMILY.attention["full_attention"])
    overrides = llama.overrides(TINY_LLAMA, 64)
    kernel = factory(1, 16, 16, 65, hf_config_overrides=overrides)
    path, made = os.environ["PATH"], []
    with_compiler = shutil.which(COMPILER) is not None
    for where in ("/nonexistent", *([path, path] if with_compiler else [])):
        os.environ["PATH"] = where
        cache = CompiledKernels(sdk, directory=directory)
        try:
            runnable, signature = cache.load(kernel, fusion=8, chips=1)
        except BackendUnavailable as exc:
            made.append({"stage": exc.stage, **cache.statistics()})
        else:
            shapes = [list(each.host_sizes) for each in runnable.input_dram_shapes]
            fits = [
                layout_of(sdk, each) == shape
                for each, shape in zip(signature.arguments, runnable.input_dram_shapes, strict=True)
            ]
            made.append({"shapes": shapes, "fits": all(fits), **cache.statistics()})
    print(json.dumps(made))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
