"""What is in service of a decoder, by what its owner said last."""

from __future__ import annotations

from msgspec.structs import replace

from headrace.messages import SourceHeld
from headrace.server.standing import Standing
from tests.unit.server.decoder_stand import report, source, up

AWAY = source("waiting to restart", "it died")
ASIDE = source("set aside", "it died 5 times")
GONE = source("gone")
OWN = SourceHeld(9, "owner", "in service", "", 0, 0)


def standing(*sources: SourceHeld, local: bool = False, quarantined: int = 0) -> Standing:
    return Standing(
        up(lanes=3, num_slots=4, num_sources=2), report(*sources, quarantined=quarantined), local
    )


def facts(of: Standing) -> tuple[int, int, bool, bool]:
    return of.sources, of.slots, of.alone, of.forsaken


def test_nothing_is_in_service_before_an_owner_is_up() -> None:
    for local in (False, True):
        assert facts(Standing(None, None, local)) == (0, 0, False, False)
        assert facts(Standing(None, report(ASIDE), local)) == (0, 0, False, False)
        assert Standing(None, None, local).lanes == 0


def test_all_is_in_service_until_an_owner_was_asked() -> None:
    begun = Standing(up(lanes=3, num_slots=4, num_sources=2), None, False)
    assert (begun.lanes, *facts(begun)) == (3, 2, 4, False, False)


def test_each_source_brings_its_slots() -> None:
    assert facts(standing(source(), source())) == (2, 4, False, False)
    assert facts(standing(source(), AWAY)) == (1, 2, False, False)
    assert facts(standing(source(), ASIDE)) == (1, 2, False, False)
    assert facts(standing(AWAY, ASIDE)) == (0, 0, False, False)


def test_with_all_gone_for_good_the_owner_is_alone_or_nobody_is_left() -> None:
    assert facts(standing(GONE, ASIDE)) == (0, 0, False, True)
    assert facts(standing(GONE, ASIDE, local=True)) == (0, 1, True, False)


def test_an_owners_own_engine_is_no_source() -> None:
    assert facts(standing(source(), AWAY, OWN, local=True)) == (1, 2, False, False)
    assert facts(standing(ASIDE, ASIDE, OWN, local=True)) == (0, 1, True, False)


def test_sources_that_had_no_room_in_the_report_are_not_gone() -> None:
    cut = replace(report(), sources=(), truncated=True)
    assert facts(Standing(up(num_sources=2), cut, False)) == (0, 0, False, False)


def test_lanes_out_of_service_do_not_count() -> None:
    assert [standing(quarantined=count).lanes for count in range(5)] == [3, 2, 1, 0, 0]
