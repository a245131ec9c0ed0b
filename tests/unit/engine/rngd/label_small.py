"""Run by the interpreter of the vendor's environment: the kernels of the models in directories.

Prints one JSON list of [directory, kernel, mixed, found], where `mixed` is whether some of its
arguments are placed and some are not. Asked for `taken`, found is whether the vendor's compiler
takes it as the engine gives it. Asked for `equal`, found is whether the labelled text of a mixed
kernel gives the same bits on the vendor's CPU executor; that is of one chip in this process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from headrace.engine.rngd.compiled import CompiledKernels
from headrace.engine.rngd.emulated import EmulatedExecutor
from headrace.engine.rngd.executor import Program
from headrace.engine.rngd.furiosa import open_sdk
from headrace.engine.rngd.kernels import Kernels
from headrace.engine.rngd.labels import is_mixed, labelled
from headrace.engine.rngd.model import Model, read_model
from headrace.engine.rngd.sdk import Sdk
from headrace.engine.rngd.signature import Signature, Tensor, read_signature


class Looking(EmulatedExecutor):
    """Loads kernels, and keeps them."""

    def __init__(self, sdk: Sdk) -> None:
        super().__init__(sdk)
        self.loaded: list[tuple[Any, Program]] = []

    def load(self, kernel: Any) -> Program:
        program = super().load(kernel)
        self.loaded.append((kernel, program))
        return program


def look(sdk: Sdk, model: Model, asked: str) -> list[list[Any]]:
    executor = Looking(sdk)
    text = model.family.text(model.config)
    kernels = Kernels(sdk, executor, model.family, text, model.max_positions)
    for _ in kernels.of_chunk(model.buckets.shapes()[0]):
        pass
    lines = []
    for kernel, program in executor.loaded:
        names = {each.name for each in program.signature.arguments}
        mixed, found = is_mixed(kernel.dsl), None
        if asked == "taken":
            found = taken(sdk, kernel)
        elif mixed and names & {"query", "lm_head_weight"}:  # and so writes no cache
            found = same(sdk, executor, kernel, program)
        lines.append([model.directory.name, program.signature.name, mixed, found])
    return lines


def taken(sdk: Sdk, kernel: Any) -> bool:
    """Whether it can be imported, which is the compiler's first step and takes no time."""
    vendor, chips = sdk.torch, sdk.torch.get_fusion().num_chips
    mixed, cache = is_mixed(kernel.dsl), CompiledKernels(sdk)
    signature = read_signature(kernel.dsl)
    examples = tuple(cache._example(each, chips, mixed) for each in signature.arguments)
    module = vendor.TclModule(labelled(kernel.dsl) if mixed else kernel)
    exported = torch.export.export(module, examples, strict=False)
    try:
        vendor.compiler.import_dfg(exported)
    except Exception:  # whatever the vendor says, the answer is no
        return False
    return True


def same(sdk: Sdk, executor: EmulatedExecutor, kernel: Any, program: Program) -> bool:
    signature: Signature = program.signature
    draw = torch.Generator().manual_seed(3)
    hosts = [numbers(each, draw) for each in signature.arguments]
    pairs = zip(signature.arguments, hosts, strict=True)
    placed = [executor.place(each, host) for each, host in pairs]
    (given,), (result,) = program(placed), signature.results
    wanted = torch.zeros(result.shape, dtype=torch.bfloat16)
    executor.read(result, given, 0, result.shape[0], wanted)
    (got,) = sdk.torch.TclModule(labelled(kernel.dsl))(*hosts)
    # The CPU executor tells a padded shape of memory that has no padding.
    bare = torch.empty(0, dtype=got.dtype).set_(got.untyped_storage())
    return torch.equal(bare[: wanted.numel()].reshape(wanted.shape), wanted)


def numbers(tensor: Tensor, draw: torch.Generator) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    if dtype == torch.bool:
        return torch.ones(tensor.shape, dtype=dtype)
    if dtype == torch.int32:
        return torch.arange(tensor.shape[-1], dtype=dtype).expand(tensor.shape).contiguous()
    return (torch.randn(tensor.shape, generator=draw) * 0.3).to(dtype)


def main(asked: str, *directories: str) -> None:
    torch.set_num_threads(1)
    sdk = open_sdk()
    models = [
        read_model(Path(each), max_positions=128, token_buckets=(16, 32)) for each in directories
    ]
    if asked == "taken":
        sdk.torch.set_fusion(8 * models[0].family.chips)
    print(json.dumps([line for model in models for line in look(sdk, model, asked)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
