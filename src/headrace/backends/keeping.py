"""What a decoder over a `LaneTable` does to keep entries, and the engine that goes on from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.backends.base import Entry, Kept, PrefillSink, Reservation
from headrace.backends.lane_table import LaneTable
from headrace.backends.storages import tails_nbytes
from headrace.backends.torch import TorchEngine
from headrace.engine.lanes import lane_nbytes
from headrace.engine.loading import LoadedModel
from headrace.engine.prefill import Seed
from headrace.errors import Refused
from headrace.geometry import Layer, PrefixUse


def extra_storages(
    layers: Sequence[Layer], context: int, keep_nbytes: int, *, key: str = "keep_nbytes"
) -> int:
    """How many memories beside those of the lanes `keep_nbytes` pays for.

    key: what a refusal calls it.

    Raises:
        Refused: it does not pay for one entry.
    """
    least = lane_nbytes(layers, context) + tails_nbytes(layers, context)
    if 0 < keep_nbytes < least:
        raise Refused(
            f"{key} is {keep_nbytes}, one entry of {context} positions takes {least}; "
            "give at least that, or 0 to keep none",
            field="keep_nbytes",
        )
    return keep_nbytes // lane_nbytes(layers, context)


class KeepsInLanes:
    """The methods of `KeepsEntries`, for a decoder whose lanes are a `LaneTable`."""

    keeps_nbytes: int
    _lanes: LaneTable

    @property
    def kept_nbytes(self) -> int:
        """Bytes of lane memories that no lane uses and something is kept in, and of all tails."""
        return self._lanes.kept_nbytes

    def keep(self, entry: Entry) -> Kept:
        """Keep a published entry's prompt; called before its first decode step.

        Raises:
            LocalProtocolError: the entry is stale, or was decoded.
            Refused: there is no memory for its sliding layers' rows; then nothing is kept.
            DeviceError: a copy failed.
        """
        return self._lanes.keep(entry)

    def can_reuse(self, kept: Kept, positions: int) -> bool:
        """Whether positions [0, `positions`) of it are enough to go on from.

        Raises:
            LocalProtocolError: it is not kept.
        """
        return self._lanes.can_reuse(kept, positions)

    def reserve_from(self, kept: Kept, positions: int, num_tokens: int) -> Reservation:
        """As `reserve`, with the live cells of positions [0, `positions`) of `kept` in place.

        Raises:
            WouldBlock: no lane is free.
            LocalProtocolError: the prompt can never fit, `kept` cannot be reused so, or nothing was
                evicted though the lane needs memory.
            ReserveFailed: a copy failed; the lane stays taken until its reservation is freed.
        """
        return self._lanes.reserve_from(kept, positions, num_tokens)

    def storage_of(self, held: Reservation | Entry) -> int:
        """The number of the lane memory that a reservation or an entry uses.

        Raises:
            LocalProtocolError: it is stale.
        """
        return self._lanes.storage_of(held)

    def evict(self, kept: Kept) -> None:
        """Keep it no longer. Raises: LocalProtocolError if it is not kept."""
        self._lanes.evict(kept)


class ContinuingEngine(TorchEngine):
    """An engine in a decoder's process that computes on top of what the decoder keeps.

    seed_of: the decoder's word for what is kept of an entry's first positions. What is told by
    `continue_from` is for the next attempt only, however that ends; without it a prompt is computed
    from 0, with the same bits.
    """

    prefix: PrefixUse = "own_cache"

    def __init__(
        self, model: LoadedModel, max_positions: int, seed_of: Callable[[Kept, int], Seed]
    ) -> None:
        super().__init__(model, max_positions)
        self._seed_of = seed_of
        self._kept: Kept | None = None

    def continue_from(self, kept: Kept) -> None:
        """The next `prefill_stream` starts at a position that `kept` can be reused up to."""
        self._kept = kept

    def prefill_stream(self, tokens: Sequence[int], sink: PrefillSink, start: int = 0) -> None:
        """As of any torch engine; nothing kept is read after it returns.

        Raises:
            Cancelled: the attempt was withdrawn.
            LocalProtocolError: the tokens or `start` do not fit the plan or the model, or what is
                to be gone on from is not kept, or not up to `start`.
        """
        try:
            super().prefill_stream(tokens, sink, start)
        finally:
            self._kept = None

    def _seed(self, tokens: Sequence[int], sink: PrefillSink, start: int) -> Seed | None:
        return None if self._kept is None else self._seed_of(self._kept, start)
