"""What an owner reports of a request: where its tail begins, and why it took its route."""

from __future__ import annotations

from typing import get_args

import pytest

from headrace import messages as wire
from headrace.messages.reports import ChoiceKind, Ended, Measured, RouteChoice
from tests.unit.messages.examples import raw, refused


@pytest.mark.parametrize(
    ("storage_ns", "begun_ns", "tail_ns", "from_last_group_ns"),
    [(0, 100, 60, 75), (50, 100, 60, 75), (90, 100, 60, 70), (130, 130, 30, 30)],
)
def test_a_tail_begins_when_there_is_something_to_import_and_somewhere_to_put_it(
    storage_ns: int, begun_ns: int, tail_ns: int, from_last_group_ns: int
) -> None:
    zeros = dict.fromkeys(Measured.__struct_fields__, 0)
    told = {"source_final_ns": 100, "last_group_ns": 85, "published_ns": 160}
    measured = Measured(**zeros | told | {"storage_ns": storage_ns})
    assert measured.tail_begun_ns == begun_ns
    assert measured.tail_ns == tail_ns
    assert measured.tail_from_last_group_ns == from_last_group_ns


@pytest.mark.parametrize("kind", get_args(ChoiceKind))
def test_a_choice_has_a_reason_of_a_known_kind(kind: ChoiceKind) -> None:
    choice = RouteChoice("whole", 1, 0, "because", kind)
    ended = Ended(1, "finished", "", "", None, "", (), "", (), choice)
    assert not refused(wire.decode_from_owner, raw(ended))
    array = raw(ended)
    array[Ended.__struct_fields__.index("choice") + 1][-1] = "a whim"
    assert refused(wire.decode_from_owner, array)
