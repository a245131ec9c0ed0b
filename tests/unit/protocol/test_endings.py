def test_a_cancel_tells_its_reason() -> None:
    shell = Shell()
    request = shell.submit()
    shell.cancel(request, reason="the server goes down")
    assert reports(shell, request) == [(Cause.CANCELLED, "the server goes down")]


@pytest.mark.parametrize("made", UNDECIDED)
def test_a_cancel_is_reported_at_once_and_all_comes_back(made: str) -> None:
    shell, request = MADE[made]()
    others = {r.request for r in shell.all(Report)}
    assert shell.cancel(request)
    assert reports(shell, request) == [(Cause.CANCELLED, "cancelled by the caller")]
    assert not shell.cancel(request)
    holds_slot = made in HOLDS_SLOT
    told = [c for c in shell.all(SendCancel) if c.attempt.request == request]
    assert len(told) == holds_slot
    finish(shell, request)
    assert state(shell, request) is S.ENDED
    assert len(reports(shell, request)) == 1
    held = [r for r in shell.all(Reserve) if r.attempt.request == request]
    freed = [f for f in shell.all(Free) if f.attempt.request == request]
    assert len(held) == len(freed)
    assert {r.request for r in shell.all(Report)} == others | {request}
    assert not {"quarantined", "draining"} & set(slots(shell))


@pytest.mark.parametrize("made", ["streaming, importing", "sealed, importing"])
@pytest.mark.parametrize("order", ["import first", "source first"])
def test_storage_and_slot_drain_by_themselves_and_never_before_their_tokens(
    made: str, order: str
) -> None:
    shell, request = MADE[made]()
    shell.cancel(request)
    assert not shell.all(Free)
    assert slots(shell)["draining"] == 1
    if order == "import first":
        shell.done(ImportId(0))
        assert len(shell.all(Free)) == 1
        assert slots(shell)["draining"] == 1
        shell.released(request)
    else:
        shell.released(request)
        assert slots(shell)["draining"] == 1
        shell.done(ImportId(0))
        assert len(shell.all(Free)) == 1
    assert slots(shell) == {"free": 2}
    assert not shell.all(Publish)


def test_a_cancel_after_publishing_changes_nothing() -> None:
    shell, request = in_published()
    assert not shell.cancel(request)
    assert cause_of(shell, request) is None


def test_a_cancel_of_what_nobody_asked_for_changes_nothing() -> None:
    assert not Shell().cancel(RequestId(EPOCH, 99))


def test_a_cancel_outruns_a_publish_that_was_not_carried_out() -> None:
    shell, request = in_sealed_with_import()
    shell.owner.import_done(ImportId(0), 0)  # this asks for the publish,
    shell.owner.cancel(request, 0)  # and this comes before the shell took it
    taken = shell.take()
    assert not [c for c in taken if isinstance(c, Publish)]
    assert [c for c in taken if isinstance(c, Free)]
    assert cause_of(shell, request) is Cause.CANCELLED
    with pytest.raises(LocalProtocolError, match="unknown or over"):
        shell.owner.published(AttemptId(*request, 1), 0)


def test_a_cancel_outruns_a_reserve_that_was_not_carried_out() -> None:
    shell = Shell(slots=(1,))
    first = shell.submit()
    shell.owner.submit(4, 0)
    second = RequestId(EPOCH, 1)
    shell.owner.cancel(first, 0)  # the lane is free, and reserved for the second
    shell.owner.cancel(second, 0)
    taken = shell.take()
    assert not [c for c in taken if isinstance(c, Reserve)]
    assert [c.attempt.request for c in taken if isinstance(c, Free)] == [first]
    assert lanes(shell) == {"free": 1}


# What is set apart.


def test_a_failed_import_is_quarantined_only_when_the_others_are_fenced() -> None:
    shell = Shell(chunk_nbytes=4 * ROW_NBYTES)
    request = shell.submit()
    shell.progress(request)
    assert len(shell.begin()) == 3
    shell.import_failed(ImportId(1))
    assert not shell.all(Quarantine)
    shell.done(ImportId(0))
    assert not shell.all(Quarantine)
    shell.done(ImportId(2))
    assert len(shell.all(Quarantine)) == 1
    assert cause_of(shell, request) is Cause.DEVICE


def test_a_failing_device_sets_draining_storage_apart_at_the_last_fence() -> None:
    shell, request = in_streaming_with_import()
    shell.cancel(request)
    shell.owner.device_failed(AttemptId(*request, 1), "no memory", 0)
    assert not shell.all(Quarantine)
    shell.done(ImportId(0))
    assert len(shell.all(Quarantine)) == 1
    assert cause_of(shell, request) is Cause.CANCELLED


def test_a_failure_without_a_reason_quarantines_too() -> None:
    shell, _ = in_streaming_with_import()
    shell.import_failed(ImportId(0), "")
    assert [q.reason for q in shell.all(Quarantine)] == [NO_REASON]
    shell = Shell()
    shell.device_failed(shell.submit(), "")
    assert [q.reason for q in shell.all(Quarantine)] == [NO_REASON]


@pytest.mark.parametrize("reason", ["", "still written"])
def test_a_retired_entry_is_freed_or_set_apart(reason: str) -> None:
    shell, request = in_published()
    shell.retire(request, reason)
    assert [q.reason for q in shell.all(Quarantine)] == [reason] * bool(reason)
    assert len(shell.all(Free)) == (not reason)
    assert lanes(shell) == {"quarantined" if reason else "free": 1}
