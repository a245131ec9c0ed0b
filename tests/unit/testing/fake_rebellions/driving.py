"""A fake card driven by hand: mirrors, tables and steps, as the vendor's calls take them."""

from __future__ import annotations

import atexit
import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.backends.base import Entry
from headrace.testing.fake_rebellions import FakeRebellions, compile_fake
from headrace.testing.fake_rebellions.compiled import CacheMeta
from tests.e2e import families

MAX_SEQ_LEN = 64
BLOCK = 8
CHUNK = 8


@functools.cache
def compiled(
    family: str, attn_impl: Any = "flash_attn", dtype: str = "float32", batch_size: int = 1
) -> str:
    """A directory of a family's tiny model, made once per test process."""
    holder = tempfile.TemporaryDirectory(prefix="headrace-compiled-")
    atexit.register(holder.cleanup)
    compile_fake(
        families.directory_of(family),
        Path(holder.name),
        max_seq_len=MAX_SEQ_LEN,
        attn_impl=attn_impl,
        partition_len=BLOCK if attn_impl == "flash_attn" else None,
        batch_size=batch_size,
        dtype=dtype,
        prefill_chunk_size=CHUNK,
    )
    return holder.name


@functools.cache
def handed_off(family: str, num_tokens: int, dtype: str = "float32") -> families.FakeSink:
    """A prompt that the family's source prefilled."""
    source, decoder = families.source_of(family, dtype), families.decoder_of(family, dtype)
    sink, entry = families.hand_off(
        source,
        decoder,
        families.make_prompt(num_tokens),
        families.options("whole", num_tokens),
    )
    decoder.free(entry)
    return sink


@functools.cache
def expected(
    family: str, num_tokens: int, steps: int, dtype: str = "float32"
) -> tuple[list[int], list[bytes]]:
    """The first token, then those of the cpu decoder, and its rows of logits."""
    source, decoder = families.source_of(family, dtype), families.decoder_of(family, dtype)
    prompt = families.make_prompt(num_tokens)
    sink, entry = families.hand_off(source, decoder, prompt, families.options("whole", num_tokens))
    assert sink.logits is not None
    tokens, rows = [families.greedy(sink.logits)], []
    for _ in range(steps):
        rows.append(bytes(step(decoder, entry, tokens[-1])))
        tokens.append(families.greedy(rows[-1]))
    decoder.free(entry)
    return tokens, rows


def step(decoder: Any, entry: Entry, token: int) -> memoryview:
    row: memoryview = decoder.decode_step([(entry, token)])[0]
    return row


@dataclass
class Driven:
    """A loaded fake: lane 0, whose blocks are 0, 1, 2, ..."""

    fake: FakeRebellions
    model: Any

    @property
    def config(self) -> Any:
        return self.model.rbln_config

    @property
    def runtime(self) -> Any:
        return self.model.prefill_decoder.runtime

    def meta(self, name: str) -> CacheMeta:
        (found,) = [meta for meta in self.config.cache_metas if meta.name == name]
        assert isinstance(found, CacheMeta)
        return found

    def mirror(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A mirror in the declared dtype, full of zeros."""
        dtype = dtype or self.config.dtype
        shape = self.meta(name).shape
        flat = self.fake.aligned(int(np.prod(shape)) * dtype.itemsize // 2)
        return flat.view(dtype).view(shape).zero_()

    def update(self, name: str, mirror: torch.Tensor, block: int = 0) -> None:
        self.runtime._update_kv_cache(mirror, block, 0, mirror.shape[2], name)

    def fetch(self, name: str, block: int = 0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A block as a mirror gets it, [heads, rows, head_dim]."""
        mirror = self.mirror(name, dtype)
        self.runtime._fetch_kv_cache(mirror, block, 0, mirror.shape[2], name)
        return mirror[block]

    def clear(self) -> None:
        """Zeros into all blocks."""
        for meta in self.config.cache_metas:
            for block in range(meta.shape[0]):
                self.update(meta.name, self.mirror(meta.name), block)

    def tables(self, *, prefill: bool = False) -> dict[str, torch.Tensor]:
        found = {}
        if self.config.use_global_attention:
            blocks = MAX_SEQ_LEN // self.config.kvcache_block_size
            found["block_tables"] = torch.arange(blocks, dtype=torch.int16)[None]
        if self.config.use_local_attention:
            found["local_block_tables"] = torch.zeros(1, 1, dtype=torch.int16)
        return {name: table[0] for name, table in found.items()} if prefill else found

    def prefill(self, tokens: list[int], start: int = 0, **given: Any) -> torch.Tensor:
        """Have it prefill by itself; returns the row of logits."""
        at = torch.arange(start, start + len(tokens), dtype=torch.int32)[None]
        ids = torch.tensor([tokens])
        given = given or self.tables(prefill=True)
        logits = self.model.prefill_decoder(
            input_ids=ids, cache_position=at, batch_idx=0, **given
        ).logits
        assert logits.shape == (1, 1, families.VOCAB)
        row: torch.Tensor = logits[0, 0]
        return row

    def masks(self, position: int) -> dict[str, torch.Tensor]:
        if not self.config.use_attention_mask:
            return {}
        mask = torch.zeros(1, MAX_SEQ_LEN, dtype=self.config.dtype)
        mask[:, : position + 1] = 1
        return {
            "attention_mask": mask,
            "position_ids": torch.tensor([[position]], dtype=torch.int32),
        }

    def decode(self, token: int, position: int, **changes: Any) -> torch.Tensor:
        """A step with all that is needed, but for `changes`, of which None leaves something out."""
        given: dict[str, Any] = {
            "input_ids": torch.tensor([[token]]),
            "cache_position": torch.tensor([[position]], dtype=torch.int32),
            **self.tables(),
            **self.masks(position),
            **changes,
        }
        given = {name: value for name, value in given.items() if value is not None}
        logits = self.model.decoders[1](**given).logits
        assert logits.shape == (1, 1, families.VOCAB)
        row: torch.Tensor = logits[0, 0]
        return row

    def import_prompt(self, sink: families.FakeSink, num_tokens: int) -> None:
        """All cells of a prompt into mirrors, and each block with one of them to the card."""
        cells = sink.cells()
        for copy in sink.plan.copies(sink.plan.whole()):
            meta = self.config.cache_metas[2 * copy.layer + copy.part]
            _, heads, rows, head_dim = meta.shape
            flat = torch.frombuffer(bytearray(cells[copy.layer, copy.part]), dtype=torch.uint8)
            states = flat.view(self.config.dtype).view(heads, -1, head_dim)
            mirror = self.mirror(meta.name)
            first = 0 if meta.is_full else max(0, num_tokens - rows)
            for at, position in enumerate(range(copy.start, copy.stop)):
                block, row = divmod(position - first, rows)
                mirror[block, :, row] = states[:, at]
            for block in range(-(-(num_tokens - first) // rows)):
                self.update(meta.name, mirror, block)

    def run(self, num_tokens: int, steps: int, first: int, **changes: Any) -> list[bytes]:
        """Rows of logits of as many greedy steps."""
        rows, token = [], first
        for at in range(num_tokens, num_tokens + steps):
            row = self.decode(token, at, **changes).to(torch.float32).numpy()
            rows.append(row.tobytes())
            token = int(row.argmax())
        return rows


def load(
    fake: FakeRebellions | None = None,
    family: str = "llama",
    attn_impl: Any = "flash_attn",
    dtype: str = "float32",
    batch_size: int = 1,
) -> Driven:
    fake = fake or FakeRebellions()
    return Driven(fake, fake.sdk().load(compiled(family, attn_impl, dtype, batch_size), 0))


def imported(num_tokens: int, family: str = "llama", **options: Any) -> tuple[Driven, int]:
    """A card with a prompt on it, and the first token."""
    driven = load(family=family, **options)
    sink = handed_off(family, num_tokens, options.get("dtype", "float32"))
    driven.import_prompt(sink, num_tokens)
    assert sink.logits is not None
    return driven, families.greedy(sink.logits)
