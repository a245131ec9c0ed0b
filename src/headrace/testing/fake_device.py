"""A model of a device for tests, and the decoder and the source of a GPU on it.

The two factories can be named on a command line, as `headrace.testing.fake_device:open_decoder` and
`headrace.testing.fake_device:open_source`. They run the code that a GPU would run, unchanged, on
the CPU's arithmetic. What they measure says nothing about a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from headrace.backends.base import CopyTuning, Decoder, PrefillEngine
from headrace.backends.cuda import DEFAULT_CONTEXT, CudaDecoder
from headrace.backends.cuda_source import CudaEngine
from headrace.backends.options import read_options
from headrace.engine.loading import LoadedModel, load_model
from headrace.testing.fake.core import Fault
from headrace.testing.fake.device import FakeDevice
from headrace.testing.fake.queues import HostWaits

__all__ = ["FakeDevice", "Fault", "HostWaits", "open_decoder", "open_source"]

COPIES = CopyTuning(1 << 20, 1 << 20, 4 << 20, 1 << 20)
"""What an owner feeds the model with; nothing was measured."""


class FakeOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """What both factories take: a model's options, and those of the device model.

    seed: of the order in which streams get on. polls_per_step: how late everything is.
    failing_pin: the registration, from 1, that fails with all after it; 0 for none. pins_read_only:
    whether memory can be registered for reading only. all_pinned: no host memory is pageable.
    """

    model: str
    dtype: str = "float32"
    threads: Annotated[int, Meta(ge=1)] = 1
    attn: str | None = None
    seed: int = 0
    polls_per_step: Annotated[int, Meta(ge=1)] = 1
    failing_pin: Annotated[int, Meta(ge=0)] = 0
    pins_read_only: bool = True
    all_pinned: bool = False


class DecoderOptions(FakeOptions, frozen=True, forbid_unknown_fields=True):
    """Also the decoder's own, as `backends.cuda` has them."""

    lanes: Annotated[int, Meta(ge=1)] = 1
    context: Annotated[int, Meta(ge=1)] | None = None
    decode_batch: Annotated[int, Meta(ge=1)] = 1
    keep_nbytes: Annotated[int, Meta(ge=0)] = 0


class SourceOptions(FakeOptions, frozen=True, forbid_unknown_fields=True):
    """Also the longest prompt."""

    max_positions: Annotated[int, Meta(ge=1)] | None = None


def open_decoder(config: Mapping[str, Any]) -> Decoder:
    """The CUDA decoder on a device model. Raises: Refused."""
    options = read_options(config, DecoderOptions, "cuda on a fake device")
    model = _model(options)
    context = options.context or min(DEFAULT_CONTEXT, model.max_positions)
    return CudaDecoder(
        model,
        options.lanes,
        context,
        _device(options),
        options.decode_batch,
        copies=COPIES,
        keep_nbytes=options.keep_nbytes,
    )


def open_source(config: Mapping[str, Any]) -> PrefillEngine:
    """The CUDA source on a device model. Raises: Refused."""
    options = read_options(config, SourceOptions, "cuda on a fake device")
    model = _model(options)
    max_positions = options.max_positions or model.max_positions
    return CudaEngine(model, max_positions, _device(options))


def _model(options: FakeOptions) -> LoadedModel:
    return load_model(
        Path(options.model),
        dtype=options.dtype,
        threads=options.threads,
        attention=options.attn,
    )


def _device(options: FakeOptions) -> FakeDevice:
    first = options.failing_pin
    return FakeDevice(
        seed=options.seed,
        polls_per_step=options.polls_per_step,
        pin_fails=lambda ordinal, nbytes: 0 < first <= ordinal,
        pins_read_only=options.pins_read_only,
        all_pinned=options.all_pinned,
    )
