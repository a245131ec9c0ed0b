"""What a decoder's lanes, slots and weights take of this host's memory, from the model's config.

Reading a config needs torch and transformers, which a server process has no other use for: so
`measured` asks a child.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from headrace.engine.checkpoint import tensor_entries
from headrace.errors import HeadraceError, Refused
from headrace.geometry import ITEMSIZE, Manifest, check_manifest
from headrace.plan import slot_layout
from headrace.runtime import elsewhere
from headrace.runtime.pairs import ATOM, WITH_A_MODEL, is_emulated
from headrace.server.config import DecoderTable
from headrace.server.owner_configs import dtype_of

MEASURE: Final = "headrace.server.sizes:measure"
ON_THIS_HOST: Final = ("cpu", ATOM)
"""Decoders whose lanes are in host memory: atom keeps a mirror of the card's."""

READERS: Final = ("torch", "transformers")
"""What a model's config is read with; a server whose owners run elsewhere may lack them."""


class Sizes(NamedTuple):
    """Bytes of one decoder with its sources.

    lane, slot: of one. weights: of all processes that hold the model on this host, at most.
    """

    lane: int
    slot: int
    lanes: int
    slots: int
    weights: int

    @property
    def reserved(self) -> int:
        """What lanes and slots take from the start on."""
        return self.lanes + self.slots


def measured(
    tables: Sequence[tuple[DecoderTable, Path]], lanes: Sequence[int]
) -> list[Sizes | None]:
    """The sizes of each decoder; None where they are not its model's, or nothing here reads it.

    tables: each with its model's directory. lanes: how many each has.

    Raises:
        Refused: a model has a cache that is not supported, or a dtype is none.
    """
    wanted = [
        {
            "place": f"decoders[{index}]",
            "model": str(directory),
            "dtype": dtype_of(table),
            "context": table.context,
        }
        for index, (table, directory) in enumerate(tables)
        if table.decoder in WITH_A_MODEL
    ]
    if not wanted or any(find_spec(name) is None for name in READERS):
        return [None] * len(tables)
    said = iter(elsewhere.call(sys.executable, MEASURE, {"decoders": wanted}, flag="python"))
    return [
        _sizes(table, count, *next(said)) if table.decoder in WITH_A_MODEL else None
        for (table, _), count in zip(tables, lanes, strict=True)
    ]


def measure(asked: Mapping[str, Any], told: Callable[[Any], None]) -> list[tuple[int, int, int]]:
    """The child's side: bytes of a lane, of a slot and of one copy of the weights, of each.

    Raises:
        Refused: see `measured`. HeadraceError: what reads a config cannot be loaded.
    """
    del told
    found = []
    for each in asked["decoders"]:
        try:
            found.append(_measured(Path(each["model"]), each["dtype"], each["context"]))
        except ImportError as exc:  # it is there and cannot be loaded
            why = str(exc).strip().rpartition("\n")[2]  # numpy's is a page, whose last line tells
            raise HeadraceError(f"a model's config cannot be read: {why}") from exc
        except Refused as exc:
            raise Refused(f"{each['place']}: {exc}", field=exc.field) from exc
    return found


def _measured(directory: Path, dtype: str, context: int) -> tuple[int, int, int]:
    from headrace.engine.lanes import lane_nbytes
    from headrace.engine.layers import LAYOUTS, geometry
    from headrace.engine.loading import load_config
    from headrace.engine.tensors import DTYPES

    if dtype not in DTYPES:
        known = ", ".join(sorted(DTYPES))
        raise Refused(f"dtype {dtype!r} is unknown; use one of {known}", field="dtype")
    config = load_config(directory)
    manifest = Manifest(
        role="decoder",
        model="sizes",
        layers=geometry(config, "decoder", dtype, context),
        layouts=LAYOUTS["decoder"],
        vocab_size=getattr(config, "vocab_size", None) or 0,  # 0 is refused by name
        logits_dtype="float32",
        max_positions=context,
    )
    check_manifest(manifest, "decoder")
    elements = sum(math.prod(entry.shape) for entry in tensor_entries(directory))
    lane = lane_nbytes(manifest.layers, context)
    return lane, slot_layout(manifest, context).nbytes, elements * ITEMSIZE[dtype]


def _sizes(table: DecoderTable, lanes: int, lane: int, slot: int, weights: int) -> Sizes:
    here = [table.decoder in ON_THIS_HOST] + [
        each.source == "torch"
        or is_emulated(each.source, {"emulate": each.emulate, **each.options})
        for each in table.sources
    ]
    return Sizes(
        lane=lane,
        slot=slot,
        lanes=lane * lanes if table.decoder in ON_THIS_HOST else 0,
        slots=slot * sum(each.slots for each in table.sources),
        weights=weights * sum(here),
    )
