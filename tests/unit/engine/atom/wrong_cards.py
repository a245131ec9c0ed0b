"""Cards that keep a cache otherwise than a decoder writes it, and what a probe says of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.engine.atom import probe as probing
from headrace.engine.atom import record
from headrace.engine.atom.record import Record, Verified
from headrace.errors import BackendUnavailable
from headrace.testing.atom_records import reference_of
from headrace.testing.fake_rebellions import FakeRebellions, compile_fake
from headrace.testing.fake_rebellions.cache import SlidingRows
from headrace.testing.fake_rebellions.memory import Memory
from tests.e2e.families import directory_of

CONTEXT, PARTITION = 64, 16

Compile = Callable[..., Path]


def compiling(root: Path) -> Compile:
    """What a family's tiny model is compiled into, once for each way."""
    done = dict[tuple[str, str, bool], Path]()

    def compile_once(family: str = "llama", dtype: str = "float32", *, flash: bool = True) -> Path:
        key = family, dtype, flash
        if key not in done:
            done[key] = root / "-".join(map(str, key))
            compile_fake(
                directory_of(family),
                done[key],
                max_seq_len=CONTEXT,
                dtype=dtype,
                attn_impl="flash_attn" if flash else "eager",
                partition_len=PARTITION if flash else None,
            )
        return done[key]

    return compile_once


def probe(directory: Path, fake: FakeRebellions | None = None, **more: Any) -> Record:
    given = {"reference": reference_of(directory), "say": lambda text: None, **more}
    sdk = (fake or FakeRebellions()).sdk()
    return probing.probe(sdk, 0, directory, given.pop("reference"), **given)[0]


def found(made: Record) -> Verified:
    return record.usable(made, Path("x"), "hint")


def refusal(made: Record) -> str:
    with pytest.raises(BackendUnavailable) as told:
        found(made)
    assert told.value.stage == "layout_unverified"
    return told.value.detail


@dataclass(kw_only=True, eq=False)
class Wrong(FakeRebellions):
    """A fake whose memory does something that no knob has."""

    memory: type[Memory] = Memory

    def load(self, directory: str, device: int) -> Any:
        model = super().load(directory, device)
        self.card.memory.__class__ = self.memory
        return model


class SpillingUpdate(Memory):
    """An update puts its first row into the block after it, too."""

    def update(self, name: str, mirror: torch.Tensor, block: int, rows: slice) -> int:
        other = (block + 1) % mirror.shape[0]
        if other > block:
            self._kept[name][other, :, :1] = mirror[block, :, :1].view(self._kept[name].dtype)
        return super().update(name, mirror, block, rows)


class SpillingFetch(Memory):
    """A fetch writes into the mirror's next block, too."""

    def fetch(self, name: str, mirror: torch.Tensor, block: int, rows: slice) -> int:
        mirror[(block + 1) % mirror.shape[0]] = 0
        return super().fetch(name, mirror, block, rows)


class OneForAll(Memory):
    """The name is ignored by updates and fetches."""

    def update(self, name: str, mirror: torch.Tensor, block: int, rows: slice) -> int:
        return super().update("past_key_values_0", mirror, block, rows)

    def fetch(self, name: str, mirror: torch.Tensor, block: int, rows: slice) -> int:
        return super().fetch("past_key_values_0", mirror, block, rows)


class Exchanged(Memory):
    """Keys go by the name of values, both ways."""

    def update(self, name: str, mirror: torch.Tensor, block: int, rows: slice) -> int:
        return super().update(exchanged(name), mirror, block, rows)

    def fetch(self, name: str, mirror: torch.Tensor, block: int, rows: slice) -> int:
        return super().fetch(exchanged(name), mirror, block, rows)


def exchanged(name: str) -> str:
    stem, _, number = name.rpartition("_")
    return f"{stem}_{int(number) ^ 1}"


class Placed(Memory):
    """For the calls to and from the host alone, what goes by a name, a block and a row is elsewhere
    than the graphs have it; subclasses say where.
    """

    def at(self, name: str) -> str:
        return name

    def block(self, name: str, block: int) -> int:
        return block

    def rows(self, rows: int) -> list[int]:
        return list(range(rows))

    def update(self, name: str, mirror: torch.Tensor, block: int, rows: slice) -> int:
        cells = self._as_host(name, mirror)[block, :, rows]
        kept = self._kept[self.at(name)][self.block(name, block)]
        kept[:, self.rows(kept.shape[1])[rows]] = cells
        return 0

    def fetch(self, name: str, mirror: torch.Tensor, block: int, rows: slice) -> int:
        cells = self._as_host(name, mirror)[block, :, rows]
        kept = self._kept[self.at(name)][self.block(name, block)]
        cells.copy_(kept[:, self.rows(kept.shape[1])[rows]])
        return 0


class ExchangedInALayer(Placed):
    """Keys go by the name of values in a layer that long prompts are not compared in."""

    def at(self, name: str) -> str:
        return exchanged(name) if name in ("past_key_values_2", "past_key_values_3") else name


class LayersExchanged(Placed):
    def at(self, name: str) -> str:
        layers = {"past_key_values_2": "past_key_values_6", "past_key_values_6": name}
        return layers.get(name, "past_key_values_2" if name == "past_key_values_6" else name)


class BlocksExchanged(Placed):
    """Behind the second block."""

    def block(self, name: str, block: int) -> int:
        return {2: 3, 3: 2}.get(block, block)


class BlocksExchangedInALayer(Placed):
    def block(self, name: str, block: int) -> int:
        return {2: 3, 3: 2}.get(block, block) if name == "past_key_values_3" else block


class RowsTurned(Placed):
    """Behind those of the short prompt, the rows of a block are in the opposite order."""

    def rows(self, rows: int) -> list[int]:
        return [*range(min(24, rows)), *reversed(range(min(24, rows), rows))]


class TwoRowsExchanged(Placed):
    """Of all rows of a block, two."""

    def rows(self, rows: int) -> list[int]:
        order = list(range(rows))
        order[rows // 2], order[rows // 2 + 1] = order[rows // 2 + 1], order[rows // 2]
        return order


class Tiled(Placed):
    """Rows are in tiles of 32, whose order is turned from the second one on."""

    def rows(self, rows: int) -> list[int]:
        tiles = [list(range(at, at + 32)) for at in range(0, rows, 32)]
        return [row for tile in (tiles[0], *reversed(tiles[1:])) for row in tile]


class PartsInTheFirstBlock(Placed):
    """A part of a block lands in the first one."""

    def update(self, name: str, mirror: torch.Tensor, block: int, rows: slice) -> int:
        cells = self._as_host(name, mirror)[block, :, rows]
        whole = cells.shape[1] == mirror.shape[2]
        self._kept[name][block if whole else 0, :, rows] = cells
        return 0


class Backwards(Memory):
    """The rows of a block come and go in the opposite order."""

    def update(self, name: str, mirror: torch.Tensor, block: int, rows: slice) -> int:
        return super().update(name, mirror.flip(2), block, rows)

    def fetch(self, name: str, mirror: torch.Tensor, block: int, rows: slice) -> int:
        turned = torch.empty_like(mirror)
        nbytes = super().fetch(name, turned, block, rows)
        mirror[block] = turned[block].flip(1)
        return nbytes


class NotMoved(SlidingRows):
    """A step puts its row at the end of a full window, over the last one."""

    def _slide(self, name: str, states: torch.Tensor) -> torch.Tensor:
        if states.shape[1] > 1 or self.length < self._window:
            return super()._slide(name, states)
        past = self._read(name, self.length - self._window + 1, self.length)
        self._memory.scatter(name, [self._block], [self._window - 1], states)
        return torch.cat([past, states], dim=1)


class LateRing(SlidingRows):
    """A window by position until it was filled twice, and a ring from there on."""

    def _row(self, position: int, num_tokens: int) -> int:
        if num_tokens >= 2 * self._window:
            return position % self._window
        return super()._row(position, num_tokens)


@dataclass(kw_only=True, eq=False)
class Phased(FakeRebellions):
    """A fake whose compiled model says which graphs it has."""

    phases: tuple[str, ...] = ()

    def load(self, directory: str, device: int) -> Any:
        model = super().load(directory, device)
        model.rbln_config.phases = list(self.phases)
        return model
