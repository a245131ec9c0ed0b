"""The decoders that headrace ships, by the suite that it ships."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest

from headrace.backends.base import Decoder
from headrace.backends.null import NullDecoder, decoder_like
from headrace.backends.replay import open as open_replay
from headrace.testing.conformance_decoder import DecoderConformance
from tests.e2e.families import directory_of


class TestNull(DecoderConformance):
    dtype: ClassVar[str] = "float16"

    def make_decoder(self, lanes: int) -> Decoder:
        source = open_replay(
            {
                "layers": 5,
                "heads": 2,
                "head_dim": 8,
                "window": 16,
                "full_every": 3,
                "dtype": self.dtype,
            }
        )
        return NullDecoder(decoder_like(source.manifest()), context=self.context, lanes=lanes)


class TestNullOneLane(TestNull):
    lanes: ClassVar[int] = 1
    dtype: ClassVar[str] = "bfloat16"


class TestCpuLlama(DecoderConformance):
    family: ClassVar[str] = "llama"
    dtype: ClassVar[str] = "float32"

    def make_decoder(self, lanes: int) -> Decoder:
        cpu_backend = pytest.importorskip("headrace.backends.cpu")
        options = {
            "model": str(directory_of(self.family)),
            "dtype": self.dtype,
            "lanes": lanes,
            "context": self.context,
        }
        decoder: Decoder = cpu_backend.open(options)
        return decoder


class TestCpuHybrid(TestCpuLlama):
    family: ClassVar[str] = "gemma3"


class TestCpuBfloat16(TestCpuLlama):
    family: ClassVar[str] = "gemma3"
    dtype: ClassVar[str] = "bfloat16"
    lengths: ClassVar[Sequence[int]] = (1, 40)


class TestCpuOneLane(TestCpuLlama):
    lanes: ClassVar[int] = 1
    lengths: ClassVar[Sequence[int]] = (1, 40)


class TestCudaOnFakeLlama(DecoderConformance):
    """The CUDA decoder on a device model; all host memory is pinned, so that every copy lags."""

    family: ClassVar[str] = "llama"
    dtype: ClassVar[str] = "float32"
    lengths: ClassVar[Sequence[int]] = (1, 16, 40)
    fake: ClassVar[Mapping[str, Any]] = {"all_pinned": True, "polls_per_step": 2}

    def make_decoder(self, lanes: int) -> Decoder:
        fake_device = pytest.importorskip("headrace.testing.fake_device")
        options = {
            "model": str(directory_of(self.family)),
            "dtype": self.dtype,
            "lanes": lanes,
            "context": self.context,
            **self.fake,
        }
        decoder: Decoder = fake_device.open_decoder(options)
        return decoder


class TestCudaOnFakeHybrid(TestCudaOnFakeLlama):
    family: ClassVar[str] = "gemma3"
    lengths: ClassVar[Sequence[int]] = (1, 15, 16, 17, 40)


@pytest.mark.full_matrix
class TestCudaOnFakePageable(TestCudaOnFakeLlama):
    family: ClassVar[str] = "gemma3"
    lengths: ClassVar[Sequence[int]] = (17, 40)
    fake: ClassVar[Mapping[str, Any]] = {"seed": 7}


class TestCudaOnFakeBfloat16(TestCudaOnFakeLlama):
    family: ClassVar[str] = "gemma3"
    dtype: ClassVar[str] = "bfloat16"
    lengths: ClassVar[Sequence[int]] = (1, 40)


@pytest.mark.full_matrix
class TestCudaOnFakeOneLane(TestCudaOnFakeLlama):
    lanes: ClassVar[int] = 1
    lengths: ClassVar[Sequence[int]] = (1, 40)


class TestCpuBatch(TestCpuLlama):
    """As many rows as lanes."""

    decode_batch: ClassVar[int] = 3

    def make_decoder(self, lanes: int) -> Decoder:
        cpu_backend = pytest.importorskip("headrace.backends.cpu")
        options = {
            "model": str(directory_of(self.family)),
            "dtype": self.dtype,
            "lanes": lanes,
            "context": self.context,
            "decode_batch": self.decode_batch,
        }
        decoder: Decoder = cpu_backend.open(options)
        return decoder


class TestCpuBatchHybrid(TestCpuBatch):
    """Fewer rows than lanes, and layers that share others' keys and values."""

    family: ClassVar[str] = "gemma4_shared"
    decode_batch: ClassVar[int] = 2
    lengths: ClassVar[Sequence[int]] = (1, 17, 40)


class TestCpuBatchExperts(TestCpuBatch):
    family: ClassVar[str] = "qwen3_moe"
    decode_batch: ClassVar[int] = 8
    lengths: ClassVar[Sequence[int]] = (1, 40)


@pytest.mark.full_matrix
class TestCudaOnFakeBatched(TestCudaOnFakeLlama):
    family: ClassVar[str] = "gemma3"
    lengths: ClassVar[Sequence[int]] = (16, 40)
    fake: ClassVar[Mapping[str, Any]] = {"all_pinned": True, "decode_batch": 3, "seed": 2}


class TestAtomOnFakeLlama(DecoderConformance):
    """The ATOM decoder on a fake card; the prompts have several blocks each, the last in part."""

    lanes: ClassVar[int] = 1
    lengths: ClassVar[Sequence[int]] = (1, 16, 21)
    site: ClassVar[Mapping[str, Any]] = {}

    def make_decoder(self, lanes: int) -> Decoder:
        atom_on_fake = pytest.importorskip("tests.conformance.atom_on_fake")
        decoder: Decoder = atom_on_fake.Site(context=self.context, **self.site).open()
        return decoder


class TestAtomOnFakeHybrid(TestAtomOnFakeLlama):
    lengths: ClassVar[Sequence[int]] = (1, 15, 16, 17, 40)
    site: ClassVar[Mapping[str, Any]] = {"family": "gemma3", "clears": True, "leaks": True}


class TestAtomOnFakeGemma4(TestAtomOnFakeLlama):
    """Heads and widths differ from layer to layer, and the card moves parts of blocks."""

    site: ClassVar[Mapping[str, Any]] = {"family": "gemma4", "sub_blocks": True}


class TestAtomOnFakeEager(TestAtomOnFakeLlama):
    """One block for all positions, declared wider than what is sent."""

    lengths: ClassVar[Sequence[int]] = (1, 17)
    site: ClassVar[Mapping[str, Any]] = {
        "family": "gemma3",
        "partition": None,
        "sent": "bfloat16",
        "needs_warm_up": "loses",
    }


class TestAtomOnFakePrivate(TestAtomOnFakeLlama):
    """The private format has all values of bfloat16 that a prompt has here, so bytes come back."""

    lengths: ClassVar[Sequence[int]] = (1, 21)
    site: ClassVar[Mapping[str, Any]] = {
        "family": "gemma3",
        "sent": "bfloat16",
        "number_format": "custom_float16",
    }


class TestAtomOnFakeConverted(TestAtomOnFakePrivate):
    site: ClassVar[Mapping[str, Any]] = {
        "sent": "bfloat16",
        "number_format": "converted",
        "sub_blocks": True,
    }
