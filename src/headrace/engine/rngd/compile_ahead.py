"""Compile what a model needs before it is served: `headrace rngd compile`. No card is needed.

A kernel takes minutes, and a model has one for each role and shape. What is compiled stays, so this
can be ended and gone on with, and a source that starts later finds it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from headrace.engine.rngd.buckets import TOKEN_BUCKETS
from headrace.engine.rngd.compiled import CompiledKernels
from headrace.engine.rngd.executor import Finished, Program, Ticket
from headrace.engine.rngd.furiosa import sdk_named, set_fusion_once
from headrace.engine.rngd.kernels import Kernels
from headrace.engine.rngd.model import Model, read_model
from headrace.engine.rngd.probes import PES_PER_CARD
from headrace.engine.rngd.sdk import Sdk
from headrace.engine.rngd.signature import Signature, Tensor, read_signature
from headrace.errors import HeadraceError, LocalProtocolError


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 all is compiled, 2 it cannot be."""
    parser = argparse.ArgumentParser(prog="headrace.engine.rngd.compile_ahead")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--max-positions", type=int)
    parser.add_argument("--token-buckets", type=int, nargs="+", default=list(TOKEN_BUCKETS))
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--sdk", help="module:factory of a fake, for tests")
    asked = parser.parse_args(arguments)
    try:
        model = read_model(
            asked.model, max_positions=asked.max_positions, token_buckets=asked.token_buckets
        )
        model.check_for_card()
        compile_ahead(sdk_named(asked.sdk), model, cache=asked.cache, say=_say)
    except HeadraceError as exc:
        _say(f"headrace: {exc}")
        return 2
    return 0


def compile_ahead(
    sdk: Sdk, model: Model, *, cache: Path | None, say: Callable[[str], None]
) -> Mapping[str, int]:
    """Compile every kernel of a model for a card; returns how many were, and were found.

    Raises:
        BackendUnavailable: one cannot be compiled here; those before it are kept.
    """
    began = time.monotonic()
    set_fusion_once(sdk.torch, PES_PER_CARD * model.family.chips)
    total = _Texts()
    _load_all(sdk, model, total)
    compiled = _Compiled(
        CompiledKernels(sdk, say, cache), model.family.chips, total.num_loaded, say
    )
    _load_all(sdk, model, compiled)
    counts = compiled.cache.statistics()
    say(
        f"{total.num_loaded} kernels: {counts['kernels_compiled']} compiled, "
        f"{counts['kernels_found']} were there, {time.monotonic() - began:.0f} s"
    )
    return counts


def _load_all(sdk: Sdk, model: Model, loader: _Texts | _Compiled) -> None:
    text = model.family.text(model.config)
    kernels = Kernels(sdk, loader, model.family, text, model.max_positions)
    for shape in model.buckets.shapes():
        for _ in kernels.of_chunk(shape):
            pass


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _NoMemory:
    """An executor that only loads."""

    emulated = False

    def place(self, tensor: Tensor, host: torch.Tensor) -> Any:
        raise LocalProtocolError("kernels are only compiled here")

    def zeros(self, tensor: Tensor) -> Any:
        raise LocalProtocolError("kernels are only compiled here")

    def read(
        self, tensor: Tensor, placed: Any, first: int, stop: int, target: torch.Tensor
    ) -> Ticket:
        return Finished()

    def wait(self) -> None:
        pass

    def statistics(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        pass


class _Texts(_NoMemory):
    """Counts kernels."""

    def __init__(self) -> None:
        self.num_loaded = 0

    def load(self, kernel: Any) -> Program:
        self.num_loaded += 1
        return _Only(read_signature(kernel.dsl))


class _Compiled(_NoMemory):
    """Compiles them, or finds them."""

    def __init__(
        self, cache: CompiledKernels, chips: int, total: int, say: Callable[[str], None]
    ) -> None:
        self.cache, self._chips, self._total, self._say = cache, chips, total, say
        self._num_loaded = 0

    def load(self, kernel: Any) -> Program:
        self._num_loaded += 1
        self._say(f"kernel {self._num_loaded} of {self._total}: {kernel.name}")
        fusion = PES_PER_CARD * self._chips
        return _Only(self.cache.load(kernel, fusion=fusion, chips=self._chips)[1])


class _Only:
    """A kernel that is not run."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature

    def __call__(self, arguments: Sequence[Any]) -> Sequence[Any]:
        raise LocalProtocolError(f"{self.signature.name} is only compiled here")


if __name__ == "__main__":
    sys.exit(main())
