# Lanes, slots, parking.


def test_waiting_requests_are_served_in_order() -> None:
    shell = Shell(slots=(1,))
    requests = [shell.submit() for _ in range(4)]
    for request in requests:
        shell.serve(request)
        shell.retire(request)
    assert [g.attempt.request for g in shell.all(StartPrefill)] == requests
    assert [r.attempt.request for r in shell.all(Reserve)] == requests


def test_one_slot_is_used_again_at_the_next_generation() -> None:
    shell = Shell(slots=(1,))
    for generation in range(3):
        request = shell.submit()
        assert shell.grant_of(request).generation == generation
        shell.serve(request)
        shell.retire(request)


def test_a_source_runs_one_attempt_at_a_time() -> None:
    shell = Shell(lanes=2, slots=(2,))
    first, second = shell.submit(), shell.submit()
    assert state(shell, second) is S.RESERVED
    shell.progress(first)
    shell.final(first)
    assert state(shell, second) is S.RESERVED
    shell.released(first)
    assert state(shell, second) is S.STREAMING
    assert shell.grant_of(second).slot == 1


def test_two_sources_run_side_by_side_in_their_own_slots() -> None:
    shell = Shell(lanes=2, slots=(1, 1))
    first, second = shell.submit(), shell.submit()
    assert [shell.grant_of(r).source for r in (first, second)] == [0, 1]
    for request in (second, first):
        shell.serve(request)
    assert [cause_of(shell, r) for r in (first, second)] == [None] * 2


def test_a_request_is_parked_while_the_lane_decodes_and_imports_only_after_it() -> None:
    shell = Shell()
    first, second = shell.submit(), shell.submit()
    shell.serve(first)
    assert state(shell, second) is S.PARKED
    shell.prefill(second)
    assert not shell.owner.has_pieces
    assert slots(shell) == {"free": 1, "ready": 1}
    shell.retire(first)
    assert state(shell, second) is S.SEALED
    shell.land()
    shell.publish(second)
    assert cause_of(shell, second) is None


def test_a_hand_off_parked_in_mid_prefill_streams_on_once_the_lane_is_free() -> None:
    shell = Shell()
    first, second = shell.submit(), shell.submit()
    shell.serve(first)
    shell.progress(second, Span(0, 2, 0, 4))
    shell.retire(first)
    assert state(shell, second) is S.STREAMING
    assert [c.piece for c in shell.begin()] == [Span(0, 2, 0, 4)]


def test_nobody_is_parked_while_a_hand_off_with_storage_lacks_a_slot() -> None:
    shell = Shell(lanes=2, slots=(3,), depth=9)
    first, second, third = (shell.submit() for _ in range(3))
    assert [state(shell, r) for r in (first, second, third)] == [
        S.STREAMING,
        S.RESERVED,
        S.WAITING,
    ]
    shell.progress(first)
    shell.final(first)
    shell.released(first)
    assert [state(shell, r) for r in (second, third)] == [S.STREAMING, S.WAITING]
    shell.prefill(second)
    assert state(shell, third) is S.PARKED


@pytest.mark.parametrize(
    ("num_slots", "depth", "parked"), [(1, 4, 0), (2, 4, 1), (3, 4, 2), (4, 2, 2), (4, 0, 0)]
)
def test_at_most_min_of_depth_and_slots_less_one_are_parked(
    num_slots: int, depth: int, parked: int
) -> None:
    shell = Shell(slots=(num_slots,), depth=depth)
    active = shell.submit()
    shell.serve(active)
    waiting = [shell.submit() for _ in range(5)]
    for request in waiting:
        if state(shell, request) is S.PARKED:
            shell.prefill(request)
    assert [state(shell, r) for r in waiting] == [S.PARKED] * parked + [S.WAITING] * (5 - parked)


def test_a_freed_lane_goes_to_the_oldest_parked_before_any_waiting() -> None:
    shell = Shell(slots=(3,), depth=2)
    active = shell.submit()
    shell.serve(active)
    parked = [shell.submit(), shell.submit()]
    late = shell.submit()
    for request in parked:
        shell.prefill(request)
    shell.retire(active)  # the slots left let one more be parked
    assert [state(shell, r) for r in (*parked, late)] == [S.SEALED, S.PARKED, S.PARKED]
    shell.land()
    shell.publish(parked[0])
    shell.retire(parked[0])
    assert [state(shell, r) for r in (parked[1], late)] == [S.SEALED, S.PARKED]


def test_a_source_whose_only_slot_bars_parking_does_not_bar_it_at_another() -> None:
    shell = Shell(slots=(1, 2))
    active = shell.submit()
    shell.serve(active)
    second = shell.submit()
    assert state(shell, second) is S.PARKED
    assert shell.grant_of(second).source == 1


def test_a_cancelled_parked_hand_off_frees_its_slot_and_the_next_takes_its_place() -> None:
    shell = Shell()
    active, second, third = (shell.submit() for _ in range(3))
    shell.serve(active)
    shell.prefill(second)
    assert shell.cancel(second)
    assert not [f for f in shell.all(Free) if f.attempt.request == second]
    assert state(shell, third) is S.PARKED
    assert cause_of(shell, active) is None


# Sources come and go.


def test_the_slots_of_a_dead_source_are_not_leased_again() -> None:
    shell = Shell(slots=(2, 1))
    shell.died(0)
    request = shell.submit()
    assert shell.grant_of(request).source == 1
    shell.serve(request)
    shell.retire(request)


def test_the_death_of_one_source_spares_who_runs_at_another_and_who_waits() -> None:
    shell = Shell(lanes=3, slots=(1, 1))
    first, second, third = (shell.submit() for _ in range(3))
    shell.died(0)
    assert cause_of(shell, first) is Cause.SOURCE_DIED
    assert [state(shell, r) for r in (second, third)] == [S.STREAMING, S.RESERVED]
    shell.serve(second)
    assert shell.grant_of(third).source == 1


def test_the_death_of_the_last_source_fails_all_who_lack_a_slot() -> None:
    shell = Shell(lanes=2, slots=(2,))
    requests = [shell.submit() for _ in range(4)]
    shell.died()
    causes = [Cause.SOURCE_DIED] + [Cause.NO_SOURCE] * 3
    assert [reports(shell, r) for r in requests] == [[(cause, "killed")] for cause in causes]
    assert (slots(shell), lanes(shell)) == ({"free": 2}, {"free": 2})


def test_a_new_source_serves_after_a_death() -> None:
    shell = Shell(slots=(1,))
    shell.submit()
    shell.died()
    shell.add_source(1, 1)
    request = shell.submit()
    shell.serve(request)
    assert cause_of(shell, request) is None


def test_a_source_that_is_to_be_killed_is_granted_nothing_any_more() -> None:
    shell = Shell(lanes=2, slots=(2, 1))
    first = shell.submit()
    shell.cancel(first)
    shell.tick(50)
    shell.released(first)  # too late: it was read before the death, and the kill was sent
    assert slots(shell) == {"free": 3}
    second, third = shell.submit(), shell.submit()
    assert shell.grant_of(second).source == 1
    assert state(shell, third) is S.RESERVED
    shell.died(0)
    assert reports(shell, third) == []


def test_a_source_that_is_to_be_killed_is_none_to_wait_for() -> None:
    shell = Shell(slots=(1,), lanes=2)
    first, waiting = shell.submit(), shell.submit()
    shell.cancel(first)
    shell.tick(50)
    assert reports(shell, waiting) == [(Cause.NO_SOURCE, NO_SLOT)]
    with pytest.raises(Refused):
        shell.submit()
    assert lanes(shell) == {"free": 2}


# Nobody waits for what cannot be had again.


def test_nobody_waits_for_a_lane_when_all_are_quarantined() -> None:
    shell = Shell()
    first = shell.submit()
    shell.prefill(first)
    shell.begin()
    parked, waiting = shell.submit(), shell.submit()
    assert state(shell, parked) is S.PARKED
    shell.import_failed(ImportId(0))
    for stranded in (parked, waiting):
        assert reports(shell, stranded) == [(Cause.NO_STORAGE, NO_LANE)]
    with pytest.raises(Refused, match="no decoder storage") as refusal:
        shell.submit()
    assert refusal.value.field == "decoder"
    shell.released(parked)
    assert slots(shell)["free"] == 1


def test_as_long_as_a_lane_is_left_it_is_waited_for() -> None:
    shell = Shell(lanes=2, slots=(1, 1))
    first, second, third = shell.submit(), shell.submit(), shell.submit()
    shell.device_failed(first)
    assert [reports(shell, r) for r in (second, third)] == [[], []]
    shell.serve(second)
    shell.retire(second)
    shell.released(first)
    shell.serve(third)


def test_nobody_waits_for_a_slot_when_all_are_quarantined() -> None:
    shell = Shell(lanes=2, slots=(1,))
    first, waiting = shell.submit(), shell.submit()
    shell.progress(first)
    shell.begin()
    shell.import_failed(ImportId(0))  # its read token never comes back
    shell.released(first)
    assert reports(shell, waiting) == []
    shell.tick(50)
    assert reports(shell, waiting) == [(Cause.NO_SOURCE, NO_SLOT)]
    with pytest.raises(Refused, match="no prefill source is left in service"):
        shell.submit()
    assert lanes(shell) == {"free": 1, "quarantined": 1}
    shell.add_source(1, 1)
    shell.serve(shell.submit())


@pytest.mark.parametrize("promised", [False, True])
def test_a_lost_lane_is_taken_out_of_service_also_when_it_is_promised(promised: bool) -> None:
    shell = Shell(lanes=2, slots=(3,))
    first, second = shell.submit(), shell.submit()
    shell.serve(first)
    shell.serve(second)
    if promised:
        third = shell.submit()
    shell.retire(first)
    shell.lane_lost()
    assert shell.owner.statistics()["lanes"]["quarantined"] == 1
    if promised:
        waiting = shell.submit()
        assert lanes(shell) == {"free": -1, "held": 2, "quarantined": 1}
        shell.retire(second)
        assert lanes(shell) == {"held": 1, "quarantined": 1}
        assert reports(shell, waiting) == []
        shell.reserve_refused(third)
        assert len([r for r in shell.all(Reserve) if r.attempt.request == waiting]) == 1
        shell.released(third)
        shell.serve(waiting)
    else:
        assert lanes(shell) == {"held": 1, "quarantined": 1}
        shell.retire(second)
        assert lanes(shell) == {"free": 1, "quarantined": 1}


@pytest.mark.parametrize("reason", ["", "still written"])
def test_the_last_lane_lost_fails_who_waits_and_not_who_holds(reason: str) -> None:
    shell = Shell()
    first = shell.submit()
    shell.serve(first)
    second, third = shell.submit(), shell.submit()
    shell.retire(first)
    shell.lane_lost()
    assert (reports(shell, second), cause_of(shell, third)) == ([], Cause.NO_STORAGE)
    shell.lane_lost()  # no more can be lost than there are
    shell.serve(second)
    shell.retire(second, reason)
    assert lanes(shell) == {"quarantined": 1}
