"""ATOM decoders on fake cards, with what a probe would have found of them."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from headrace.backends.atom import AtomDecoder, Options, decoder_on
from headrace.engine.atom.record import Verified
from headrace.testing.fake_rebellions import FakeRebellions, compile_fake
from headrace.testing.fake_rebellions.memory import NumberFormat
from tests.e2e.families import directory_of


@dataclass(frozen=True)
class Site:
    """How a model is compiled and what card it is on. partition: None for one block for all."""

    family: str = "llama"
    partition: int | None = 8
    sent: str = "float32"
    declared: str = "float32"
    number_format: NumberFormat = "declared"
    sub_blocks: bool = False
    clears: bool = False
    leaks: bool = False
    needs_warm_up: Literal["raises", "loses"] | None = None
    fewer_blocks: int | None = None
    context: int = 64
    fake: FakeRebellions = field(init=False, compare=False)

    def __post_init__(self) -> None:
        fake = FakeRebellions(
            number_format=self.number_format,
            sub_blocks=self.sub_blocks,
            leaks=self.leaks,
            needs_warm_up=self.needs_warm_up,
        )
        object.__setattr__(self, "fake", fake)

    def open(self, *, read_back: bool = False) -> AtomDecoder:
        """The decoder, which counts values that its casts change."""
        warms_up = self.needs_warm_up is not None
        found = Verified(self.number_format, self.sub_blocks, self.clears, warms_up)
        with tempfile.TemporaryDirectory() as directory:
            compile_fake(
                directory_of(self.family),
                Path(directory),
                max_seq_len=self.context,
                attn_impl="eager" if self.partition is None else "flash_attn",
                partition_len=self.partition,
                dtype=self.declared,
                num_blocks=self.fewer_blocks,
            )
            options = Options(
                model=str(directory_of(self.family)),
                compiled=directory,
                dtype=self.sent,
                lossy=True,
                read_back=read_back,
            )
            return decoder_on(self.fake.sdk(), found, options)
