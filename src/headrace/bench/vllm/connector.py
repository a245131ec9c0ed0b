"""The connector as it is, with an emulated link before vLLM's blocks and its measurements kept.

vLLM makes it by itself, so that it and who measures meet here: `HERE` is of this process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

from headrace.backends.paged import PagedDecoder
from headrace.bench.vllm.paged_link import PagedLink
from headrace.runtime.requests import Request

# By name, as vLLM loads it: what is measured stands beside this package, not below it.
_Connector: Any = import_module("headrace.vllm.connector").HeadraceConnector


@dataclass
class Here:
    """What the connector in this process leaves. ended: requests that ended, in their order."""

    link: PagedLink | None = None
    ended: list[Request] = field(default_factory=list)


HERE: Final = Here()


class BenchConnector(_Connector):  # type: ignore[misc]
    """`HeadraceConnector` with a link, and with what its requests measured."""

    def _driven(self, paged: PagedDecoder) -> PagedLink:
        HERE.link = PagedLink(paged)
        return HERE.link

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        HERE.ended += self._reports.ended
        return results
