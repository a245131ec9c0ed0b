"""The decoders that keep entries, by the suite that headrace ships."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from headrace.backends.base import Decoder
from headrace.backends.storages import tails_nbytes
from headrace.engine.lanes import lane_nbytes
from headrace.engine.layers import manifest
from headrace.engine.loading import load_config
from headrace.testing.conformance_keeping import KeepingConformance
from tests.e2e.families import directory_of


class TestCpuKeepsLlama(KeepingConformance):
    family: ClassVar[str] = "llama"
    dtype: ClassVar[str] = "float32"
    entries: ClassVar[int] = 2
    more: ClassVar[dict[str, Any]] = {}
    lengths: ClassVar[Sequence[int]] = (1, 40)

    def options(self, lanes: int) -> dict[str, Any]:
        directory = directory_of(self.family)
        layers = manifest(
            load_config(directory), directory, "decoder", self.dtype, self.context
        ).layers
        entry = lane_nbytes(layers, self.context) + tails_nbytes(layers, self.context)
        return {
            "model": str(directory),
            "dtype": self.dtype,
            "lanes": lanes,
            "context": self.context,
            "keep_nbytes": self.entries * entry,
            **self.more,
        }

    def make_decoder(self, lanes: int) -> Decoder:
        cpu_backend = pytest.importorskip("headrace.backends.cpu")
        decoder: Decoder = cpu_backend.open(self.options(lanes))
        return decoder


class TestCpuKeepsHybrid(TestCpuKeepsLlama):
    family: ClassVar[str] = "gemma3"
    lengths: ClassVar[Sequence[int]] = (1, 15, 16, 17, 40)


class TestCpuKeepsShared(TestCpuKeepsLlama):
    family: ClassVar[str] = "gemma4_shared"
    dtype: ClassVar[str] = "bfloat16"
    lengths: ClassVar[Sequence[int]] = (17, 40)


class TestCpuKeepsWindowsOnly(TestCpuKeepsLlama):
    family: ClassVar[str] = "mistral"
    lengths: ClassVar[Sequence[int]] = (15, 17, 40)


class TestCpuKeepsOneLane(TestCpuKeepsLlama):
    family: ClassVar[str] = "gemma3"
    lanes: ClassVar[int] = 1
    lengths: ClassVar[Sequence[int]] = (1, 40)


class TestCpuKeepsBatched(TestCpuKeepsLlama):
    family: ClassVar[str] = "gemma3"
    lengths: ClassVar[Sequence[int]] = (1, 40)
    more: ClassVar[dict[str, Any]] = {"decode_batch": 3}


class TestCudaOnFakeKeepsLlama(TestCpuKeepsLlama):
    """The CUDA decoder on a device model; all host memory is pinned, so that every copy lags."""

    decoded: ClassVar[int] = 2
    more: ClassVar[dict[str, Any]] = {"all_pinned": True, "polls_per_step": 2}

    def make_decoder(self, lanes: int) -> Decoder:
        fake_device = pytest.importorskip("headrace.testing.fake_device")
        decoder: Decoder = fake_device.open_decoder(self.options(lanes))
        return decoder


class TestCudaOnFakeKeepsHybrid(TestCudaOnFakeKeepsLlama):
    family: ClassVar[str] = "gemma3"
    decoded: ClassVar[int] = 20
    lengths: ClassVar[Sequence[int]] = (40,)
