"""headrace's connector as it is, with a look at the blocks of each load before it is reported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from headrace.backends.base import Decoder, Entry, Reservation
from headrace.backends.paged import PagedDecoder
from headrace.vllm.connector import HeadraceConnector
from tests.vllm.seen import SEEN

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


class _Looking:
    """A `PagedDecoder` that is looked at when it publishes."""

    def __init__(self, paged: PagedDecoder) -> None:
        self._paged = paged

    def __getattr__(self, name: str) -> Any:
        return getattr(self._paged, name)

    def publish(self, reservation: Reservation) -> Entry:
        entry = self._paged.publish(reservation)
        load = SEEN.loads[reservation.lane - 1]  # labels count the loads that were told
        if SEEN.keep_rows:
            SEEN.published[load.request_id] = SEEN.loaded_rows(load)
        return entry


class DigestingConnector(HeadraceConnector):
    """See the module."""

    def _driven(self, paged: PagedDecoder) -> Decoder:
        SEEN.cache = paged._open_cache()
        return cast(Decoder, _Looking(paged))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        SEEN.loads += self._step().orders.loads
        super().start_load_kv(forward_context, **kwargs)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        SEEN.blocks[request.request_id] = blocks.get_block_ids()
        super().update_state_after_alloc(request, blocks, num_external_tokens)
