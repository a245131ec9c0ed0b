"""What a decoder's lanes, slots and weights take of this host's memory, from the model's config.

Reading a config needs torch and transformers, which a server process has no other use for: so
`measured` asks a child, which looks at the engines' options too.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from headrace.engine.checkpoint import tensor_entries
from headrace.errors import BackendUnavailable, HeadraceError, Refused
from headrace.geometry import ITEMSIZE, Manifest, check_manifest
from headrace.plan import slot_layout
from headrace.runtime import elsewhere
from headrace.runtime.pairs import ATOM, NULL, REPLAY, WITH_A_MODEL, is_emulated
from headrace.server.config import DecoderTable
from headrace.server.option_checks import check_engine, replayed_manifest
from headrace.server.owner_configs import OwnerStart, dtype_of, kept_key, kept_nbytes

MEASURE: Final = "headrace.server.sizes:measure"
ON_THIS_HOST: Final = ("cpu", ATOM, NULL)
"""Decoders whose lanes are in host memory: atom keeps a mirror of the card's."""

READERS: Final = ("torch", "transformers")
"""What a model's config is read with; a server whose owners run elsewhere may lack them."""


class Sizes(NamedTuple):
    """Bytes of one decoder with its sources.

    lane, slot: of one. weights: of all processes that hold the model on this host, at most. kept:
    for prompts that are kept, on this host.
    """

    lane: int
    slot: int
    lanes: int
    slots: int
    weights: int
    kept: int = 0

    @property
    def reserved(self) -> int:
        """What lanes, slots and kept prompts take from the start on."""
        return self.lanes + self.slots + self.kept


def measured(
    tables: Sequence[tuple[DecoderTable, Path, OwnerStart]], lanes: Sequence[int]
) -> list[Sizes | None]:
    """The sizes of each decoder; None where its options decide them, or nothing here reads a model.

    tables: each with its model's directory and what its owner is started with. lanes: how many
    each has.

    Raises:
        Refused: a model has a cache that is not supported, a dtype is none, or an engine is not
            there or does not take its options.
    """
    if not can_measure():
        return [None] * len(tables)
    asked = [_asked(index, *each) for index, each in enumerate(tables)]
    said = elsewhere.call(sys.executable, MEASURE, {"decoders": asked}, flag="python")
    return [
        None if each is None else _sizes(table, count, *each)
        for (table, *_), count, each in zip(tables, lanes, said, strict=True)
    ]


def can_measure() -> bool:
    """Whether this interpreter has what reads a model's config."""
    return all(find_spec(name) is not None for name in READERS)


def _asked(index: int, table: DecoderTable, directory: Path, start: OwnerStart) -> dict[str, Any]:
    config, place = start.config, f"decoders[{index}]"
    return {
        "place": place,
        "kept_key": kept_key(table, place),
        "model": str(directory),
        "dtype": dtype_of(table),
        "context": table.context,
        "decoder": table.decoder,
        "own": start.interpreter is None,
        "options": config.decoder_options,
        "sources": [
            {"source": each.source, "options": each.options, "own": each.python is None}
            for each in config.sources
        ],
    }


def measure(
    asked: Mapping[str, Any], told: Callable[[Any], None]
) -> list[tuple[int, int, int] | None]:
    """The child's side: bytes of a lane, of a slot and of one copy of the weights, of each.

    Raises:
        Refused: see `measured`. HeadraceError: what reads a config cannot be loaded.
    """
    del told
    found = []
    for each in asked["decoders"]:
        try:
            found.append(_checked(each))
        except ImportError as exc:  # it is there and cannot be loaded
            why = str(exc).strip().rpartition("\n")[2]  # numpy's is a page, whose last line tells
            raise HeadraceError(f"a model's config cannot be read: {why}") from exc
        except (Refused, BackendUnavailable) as exc:
            placed = str(exc).startswith(each["place"])
            text = str(exc) if placed else f"{each['place']}: {exc}"
            raise Refused(text, field=getattr(exc, "field", "")) from exc
    return found


def _checked(asked: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """The sizes of one decoder, whose engines take their options."""
    place, name = asked["place"], asked["decoder"]
    source = asked["sources"][0]
    found = None
    if name in WITH_A_MODEL or (name == NULL and source["source"] != REPLAY):
        found = _measured(asked)
    check_engine("decoder", name, asked["options"], place, own=asked["own"])
    for index, each in enumerate(asked["sources"]):
        its = f"{place}.sources[{index}]"
        check_engine("source", each["source"], each["options"], its, own=each["own"])
    if name == NULL and found is None:
        layout = slot_layout(replayed_manifest(source["options"]), asked["context"])
        found = layout.nbytes - layout.kv_offset, layout.nbytes, 0
    return found


def _measured(asked: Mapping[str, Any]) -> tuple[int, int, int]:
    from headrace.backends.keeping import extra_storages
    from headrace.engine.lanes import lane_nbytes
    from headrace.engine.layers import LAYOUTS, geometry
    from headrace.engine.loading import load_config
    from headrace.engine.tensors import DTYPES

    directory, dtype, context = Path(asked["model"]), asked["dtype"], asked["context"]
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
    kept = asked["options"].get("keep_nbytes", 0)
    if type(kept) is int:  # else the engine refuses it
        extra_storages(manifest.layers, context, kept, key=asked["kept_key"])
    elements = sum(math.prod(entry.shape) for entry in tensor_entries(directory))
    lane = lane_nbytes(manifest.layers, context)
    return lane, slot_layout(manifest, context).nbytes, elements * ITEMSIZE[dtype]


def _sizes(table: DecoderTable, lanes: int, lane: int, slot: int, weights: int) -> Sizes:
    computes_here = table.decoder in ON_THIS_HOST and table.decoder != NULL
    here = [computes_here] + [
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
        kept=kept_nbytes(table) if table.decoder in ON_THIS_HOST else 0,
    )
