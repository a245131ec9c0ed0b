"""The CUDA prefill engine: the torch engine's computation on a GPU, which copies by itself.

The forward calls are those of `headrace.backends.torch`, and so is what becomes of the cache on
each route; how states come into the slot is told in `headrace.backends.device_carrier`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct
from msgspec.structs import replace

from headrace.backends.asked import check_asked
from headrace.backends.base import HostRange, PrefillSink
from headrace.backends.device_carrier import DeviceCarrier, LogitsMemory
from headrace.backends.options import read_options
from headrace.backends.pinning import Pins
from headrace.backends.takers import taker_of
from headrace.engine.cuda import open_device
from headrace.engine.device import Device
from headrace.engine.gpu_users import users
from headrace.engine.layers import manifest
from headrace.engine.loading import LoadedModel, load_model
from headrace.engine.prefill import run_prefill
from headrace.errors import Closed, DeviceError, Refused, Unquiet
from headrace.geometry import Manifest


class Options(Struct, frozen=True, forbid_unknown_fields=True):
    """What `open` takes.

    model: a directory with config.json and safetensors. attn: the attention implementation, by
    default the model's best. device: the number of the GPU. max_positions: the longest prompt, by
    default the model's longest.
    """

    model: str
    dtype: str = "float32"
    threads: Annotated[int, Meta(ge=1)] = 1
    attn: str | None = None
    device: Annotated[int, Meta(ge=0)] = 0
    max_positions: Annotated[int, Meta(ge=1)] | None = None


def open(config: Mapping[str, Any]) -> CudaEngine:
    """Load the engine from the fields of `Options` onto a GPU that torch can use.

    Raises:
        Refused: an option is unknown or wrong, or the model's cache is not supported.
        BackendUnavailable: there is no such GPU here.
    """
    options = read_options(config, Options, "cuda")
    device = open_device(options.device)
    try:
        model = load_model(
            Path(options.model),
            dtype=options.dtype,
            threads=options.threads,
            attention=options.attn,
            device=device.torch_device,
        )
        device.synchronize()  # weights are loaded on a stream of torch's own
        return CudaEngine(model, options.max_positions or model.max_positions, device)
    except BaseException:
        device.close()
        raise


def occupants(config: Mapping[str, Any]) -> list[str]:
    """One sentence for each other user of the GPU that these options name.

    Raises:
        Refused: an option is unknown or wrong.
        BackendUnavailable: there is no such GPU here.
    """
    return users(read_options(config, Options, "cuda").device)


class CudaEngine:
    """Prefills one prompt at a time on one device; implements `PrefillEngine` and `PinsSlabs`."""

    def __init__(
        self, model: LoadedModel, max_positions: int, device: Device, *, shared: bool = False
    ) -> None:
        """`shared`: another has the device too, and closes it.

        Raises:
            Refused: the model was not made for so many positions.
        """
        if max_positions > model.max_positions:
            raise Refused(
                f"max_positions is {max_positions}, the model was made for {model.max_positions}",
                field="max_positions",
            )
        self._model: LoadedModel | None = model
        facts = manifest(model.config, model.directory, "source", model.dtype, max_positions)
        self._manifest = replace(facts, prefix="recompute")
        self._device = device
        self._shared = shared
        self._side = device.stream("states")
        self._logits = LogitsMemory(facts.vocab_size)
        self._pins = Pins(device)
        self._pins.register(self._logits.range)
        self.facts = model.pairing_facts("DynamicCache")

    def manifest(self) -> Manifest:
        return self._manifest

    def prefill_stream(self, tokens: Sequence[int], sink: PrefillSink, start: int = 0) -> None:
        """Compute the prompt and put positions [start, n) of its cache and the logits into `sink`.

        All of the prompt is computed: what `start` saves is the moving of the first cells. When
        this returns or raises, the device writes no more into the slot.

        Raises:
            Cancelled: the attempt was withdrawn.
            LocalProtocolError: the tokens or `start` do not fit the plan or the model.
            Unquiet: the device failed, so that it is not known to write no more.
        """
        if self._model is None:
            raise Closed("the cuda engine was closed")
        check_asked(tokens, sink, start)
        try:
            carrier = DeviceCarrier(self._device, self._side, sink, self._logits)
        except DeviceError as broken:  # it failed since the last prefill, and stays so
            raise Unquiet(f"the device failed before this prefill: {broken}") from broken
        try:
            with self._device.on_compute():
                self._compute(self._model, tokens, sink, start, carrier)
            logits, ready_ns = carrier.logits()
            sink.final(logits, ready_ns=ready_ns)
        except BaseException as exc:
            try:
                carrier.drain()
            except DeviceError as broken:
                raise Unquiet(f"copies into it may be in flight: {broken}") from exc
            raise

    def register(self, slab: HostRange) -> None:
        self._pins.register(slab)

    def unregister(self, slab: HostRange) -> None:
        self._pins.unregister(slab)

    def close(self) -> None:
        if self._model is None:
            return
        self._model = None
        try:
            self._pins.close()
        finally:
            if not self._shared:
                self._device.close()

    def _compute(
        self,
        model: LoadedModel,
        tokens: Sequence[int],
        sink: PrefillSink,
        start: int,
        carrier: DeviceCarrier,
    ) -> None:
        """Queue all of it, and announce what lies in the slot meanwhile and then."""
        left = len(tokens)

        def forward(ids: torch.Tensor, cache: Any) -> torch.Tensor:
            nonlocal left
            row = model.forward_logits(ids, cache)
            left -= ids.shape[1]
            if not left:  # before the cells of a whole route, since this is the end of the prefill
                carrier.take_logits(row)
            return row

        taker = taker_of(sink, start, carrier)
        options = sink.options
        run_prefill(
            model,
            self._manifest.layers,
            tokens,
            options.prefill_chunk,
            taker,
            cuts=options.cuts,
            forward=forward,
        )
        taker.finish()
