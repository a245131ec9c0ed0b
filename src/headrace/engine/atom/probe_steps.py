"""The steps of a probe of a card, in their order.

A step that a later one needs is taken first, and what must be seen of a card that has not computed
yet before all others. Each returns bare values; what it raises is written down instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from headrace.engine.atom import probe_computes, probe_transfers
from headrace.engine.atom.probe_bench import Bench
from headrace.engine.records import Facts


class Step(NamedTuple):
    """name: as the record has it."""

    name: str
    take: Callable[[Bench], Facts]


LOADS: Final = Step("calls", probe_transfers.calls)
"""After it the compiled model is there, if it can be."""

STEPS: Final = (
    Step("sizes", probe_transfers.sizes),
    Step("warm_up", probe_transfers.warm_up),
    Step("round_trip", probe_transfers.round_trip),
    Step("number_format", probe_computes.number_format),
    Step("sub_blocks", probe_transfers.sub_blocks),
    Step("decode_places", probe_transfers.decode_places),
    Step("row_order", probe_computes.row_order),
    Step("logits", probe_computes.logits),
    Step("import_decodes", probe_computes.import_decodes),
    Step("reuse", probe_computes.reuse),
    Step("costs", probe_transfers.costs),
)
