"""Everything wrong that a source can say, at every stage of an attempt, between two neighbours.

What is refused is refused before anything changes: the neighbours and all that is not the attempt's
own stay as they were, and afterwards they are published whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import RemoteProtocolError
from headrace.geometry import Layout, Manifest
from headrace.ids import AttemptId, SourceId, Span
from headrace.messages import (
    Computing,
    DeviceTimes,
    Failed,
    FromSource,
    Progress,
    Released,
    SourceFinal,
    decode_from_source,
    encode,
)
from headrace.plan import compile_plan
from headrace.protocol.books import Limits
from headrace.protocol.commands import Cause, Outcome, Publish, Report
from headrace.protocol.owner import Owner
from headrace.testing.malformed import Case, cases
from headrace.testing.malformed_speech import AttemptMessage, Identity
from tests.unit.malformed_scenes import (
    BUDGET,
    DIGEST,
    HALF,
    MANIFEST,
    PLAN,
    REST,
    STAGES,
    UNDECIDED,
    WHOLE,
    Hear,
    N,
    Scene,
    all_but_drops,
    all_but_victim,
    all_cases,
    claims_of,
    ears,
    ends_of,
    finish,
    identity_of,
    is_readable,
    scene_at,
    take_in,
    victim_of,
)
from tests.unit.protocol.builders import EPOCH, FEW, cells_of, geometries, grant

WINDOWS = PLAN.windows


@pytest.fixture(scope="module")
def hear() -> Iterator[Hear]:
    with ears() as hear:
        yield hear


def bring(scene: Scene, case: Case, hear: Hear, *, fails: bool) -> dict[str, int]:
    """Bring a case; returns what was counted.

    What is counted tells no cell; and where the case must not fail its attempt, it changes nothing.
    """
    owner, before = scene.shell.owner, scene.shell.owner.dropped.copy()
    for payload in case.payloads:
        handoff, claims = victim_of(scene), claims_of(victim_of(scene))
        held, num_dropped = all_but_drops(scene), owner.dropped.total()
        hear(scene, payload)
        if owner.dropped.total() > num_dropped:
            assert claims_of(handoff) == claims, case
            assert fails or all_but_drops(scene) == held, case
    return dict(owner.dropped - before)


def count(*names: str) -> dict[str, int]:
    return {name: names.count(name) for name in names}


@pytest.mark.parametrize(("stage", "digest"), [("leased", False), ("parked", True)])
def test_every_case_of_an_attempt_that_was_told_nothing(
    stage: str, digest: bool, hear: Hear
) -> None:
    for case in all_cases(digest=digest):
        if case.kind == "corrupt":
            continue  # legal on the wire; found out when the bytes land, below
        scene = scene_at(stage, digest=digest)
        others, fails = all_but_victim(scene), case.verdict == "fails"
        assert bring(scene, case, hear, fails=fails) == count(*case.counted), case
        assert ends_of(scene, scene.victim) == [Outcome.FAILED] * fails, case
        assert all_but_victim(scene) == others, case
        assert not scene.shell.all(Publish), case
        assert [r.cause for r in scene.shell.all(Report)] == [case.cause] * fails, case
        if is_readable(case) or case.completes:
            finish(scene)


@pytest.mark.parametrize("digest", [False, True], ids=["plain", "digest"])
def test_a_digest_that_no_bytes_have(digest: bool, hear: Hear) -> None:
    wrong = [c for c in all_cases(digest=digest) if c.kind == "corrupt"]
    assert len(wrong) == 2
    for case in wrong:
        scene = scene_at("leased", digest=digest)
        assert bring(scene, case, hear, fails=True) == {}
        scene.shell.begin(BUDGET)
        scene.land(scene.victim)
        (report,) = scene.shell.all(Report)
        assert (report.request, report.cause) == (scene.victim, Cause.CORRUPT)
        finish(scene)


def due(stage: str, scene: Scene, case: Case) -> tuple[tuple[str, ...], bool]:
    """What must become of one packet at a stage: what is counted, and whether the attempt fails."""
    speaks = stage in [each.__name__ for each in UNDECIDED] and stage != "released"
    if case.counted == ("unexpected",):
        return case.counted, False
    if not is_readable(case):
        return case.counted, speaks
    message = decode_from_source(case.payloads[0])
    assert isinstance(message, Computing | Progress | SourceFinal | Failed | Released)
    lease = (message.attempt, message.slot, message.generation) == identity_of(scene.grant)
    gives_back = lease and isinstance(message, Released)
    if stage == "dead":
        return ("dead",), False
    if message.attempt != scene.grant.attempt or stage in ("ended", "reused", "retried"):
        return ("stale",), False
    if not speaks:
        first = gives_back and stage not in ("released", "returned")
        return (() if first else ("late",) if lease else ("stale",)), False
    if stage == "sealed":
        return (() if gives_back else ("malformed",)), not gives_back
    if stage == "told" and case.name == "order: the final first":
        return (), False  # not first any more, and legal
    return case.counted, case.verdict == "fails"


@pytest.mark.parametrize("stage", STAGES)
def test_every_packet_at_every_stage(stage: str, hear: Hear) -> None:
    single = [case for case in all_cases(digest=False) if len(case.payloads) == 1]
    unreadable = [case for case in single if not is_readable(case)]
    few = unreadable[::40] if stage != "reused" else []  # where they are another's fault
    some = {case.name for case in single[::5]}
    for case in [*filter(is_readable, single), *few]:
        scene = scene_at(stage)
        others, ends = all_but_victim(scene), len(ends_of(scene, scene.victim))
        counted, fails = due(stage, scene, case)
        assert bring(scene, case, hear, fails=fails) == count(*counted), (case, stage)
        assert len(ends_of(scene, scene.victim)) == ends + fails, case
        if fails:
            cause = Cause.MALFORMED if counted else Cause.SOURCE_FAILED
            assert scene.shell.all(Report)[-1].cause is cause, case
        assert all_but_victim(scene) == others, case
        if (fails or not counted) and case.name in some:
            finish(scene)


def test_garbage_is_the_fault_of_the_one_that_runs(hear: Hear) -> None:
    """It names nobody; the slot's holder before has no part in it."""
    scene = scene_at("reused")
    (new,) = scene.others
    hear(scene, b"\xc1")
    assert ends_of(scene, new) == [Outcome.FAILED]
    assert scene.shell.all(Report)[-1].cause is Cause.MALFORMED
    assert scene.shell.owner.dropped == count("undecodable")
    scene.shell.released(new)
    scene.others = ()
    finish(scene)


@FEW
@given(geometries(), st.booleans())
def test_the_cases_fit_any_plan(geometry: tuple[Manifest, Layout, int, int], digest: bool) -> None:
    """Each is named once, and a fresh attempt with that plan does as its verdict says."""
    decoder, layout, n, context = geometry
    plan = compile_plan(decoder, layout, n, context)
    others = [(AttemptId(EPOCH, 1, 1), 1, 3)]
    found = list(cases(plan, grant(n, digest=digest), others=others))
    assert len({case.name for case in found}) == len(found)
    unreadable = [case for case in found if not is_readable(case) and not case.completes]
    for case in found:
        if case in unreadable and case not in unreadable[::40]:
            continue
        owner = Owner(EPOCH, Limits(num_lanes=1, context=context))
        owner.add_source(SourceId(0), 2, lambda _num_tokens, _start: plan, 0)
        owner.submit(n, 0, digest=digest)
        for payload in case.payloads:
            take_in(owner, SourceId(0), decoder, partial(decode_from_source, payload))
        assert dict(owner.dropped) == count(*case.counted), case
        causes = [c.cause for c in owner.commands() if isinstance(c, Report)]
        fails = case.verdict == "fails" and case.kind != "corrupt"  # that is found when it lands
        assert causes == [case.cause] * fails, case
        owner.check_integrity()


# Any bytes.

SAMPLES = [case.payloads for case in all_cases(digest=False)]
NEAR = [-1, 0, 1, 2, 3, 4, 5, 6, 35, 36, 37, 39, 40, 41, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1]
LAYERS = len(WINDOWS)


def test_any_byte_replaced_is_a_message_of_whole_numbers_or_one_error() -> None:
    """Each byte of each legal message, by each other byte."""
    scene = scene_at("leased")
    identity = identity_of(scene.grant)
    samples: list[FromSource] = [
        Progress(*identity, (HALF, REST), (1, 1 << 63), 1, 1, 2),
        Computing(*identity),
        SourceFinal(*identity, "logits", 0, 1, 2),
        Failed(*identity, "why"),
        Released(*identity),
    ]
    readable = 0
    for payload in map(encode, samples):
        for at in range(len(payload)):
            for byte in range(256):
                changed = payload[:at] + bytes([byte]) + payload[at + 1 :]
                try:
                    message = decode_from_source(changed)
                except RemoteProtocolError:
                    continue
                readable += 1
                assert all(type(number) is int for number in numbers(message)), changed
    assert readable > 1000


def numbers(message: FromSource | DeviceTimes | tuple[object, ...]) -> Iterator[object]:
    """All that is no text in a message, and is there."""
    for value in message if isinstance(message, tuple) else msgspec.structs.astuple(message):
        if isinstance(value, tuple | DeviceTimes):
            yield from numbers(value)
        elif value is not None and not isinstance(value, str):
            yield value


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(
    st.one_of(
        st.binary(max_size=200), st.binary(max_size=40).map(lambda b: b"\x98\xa8progress" + b)
    )
)
def test_any_bytes_are_a_message_or_one_error(payload: bytes) -> None:
    try:
        message = decode_from_source(payload)
    except RemoteProtocolError:
        return
    assert decode_from_source(encode(message)) == message


class Told:
    """What the victim's source told so far, as cells, and what must become of its next packet.

    Nothing of the victim is in flight when a packet comes, so its slot is another's to have as soon
    as it is over and given back. `theirs`: the lease of A, which the same source has given back.
    """

    def __init__(self, identity: Identity, theirs: Identity) -> None:
        self.identity = identity
        self.theirs = theirs
        self.cells: set[tuple[int, int]] = set()
        self.final = False
        self.over = False
        self.returned = False
        self.wrong_digest = False

    @property
    def speaks(self) -> bool:
        """Whether what is wrong in a packet can still fail the attempt."""
        return not self.over and not self.returned

    def due(self, message: FromSource | None) -> str:
        """What the next packet is counted as; nothing if it is legal. None is no message."""
        if message is None:
            return "undecodable"
        if not isinstance(message, AttemptMessage):
            return "unexpected"
        lease = message.attempt, message.slot, message.generation
        if message.attempt != self.identity[0]:
            return "late" if lease == self.theirs else "stale"
        if lease != self.identity:
            return "malformed" if self.speaks else "stale"
        if self.returned:
            return "stale" if self.over else "late"
        if self.over:
            return "" if isinstance(message, Released) else "late"
        return "" if self._is_legal(message) else "malformed"

    def _is_legal(self, message: AttemptMessage) -> bool:
        match message:
            case Progress(spans=spans, digests=digests):
                return not self.final and len(digests) in (0, len(spans)) and self._new(spans)
            case SourceFinal(first=first, token=token):
                whole = self.cells == set(cells_of(PLAN, WHOLE))
                of_the_manifest = first == MANIFEST.first and token < MANIFEST.vocab_size
                return whole and not self.final and of_the_manifest
            case Released():
                return True
        return not self.final

    def note(self, message: AttemptMessage) -> None:
        """A legal message was taken."""
        match message:
            case Progress(spans=spans, digests=digests):
                self.cells |= set(cells_of(PLAN, *spans))
                stamped = zip(spans, digests, strict=False)
                wrong = [span for span, digest in stamped if digest != DIGEST]
                self.wrong_digest |= bool(cells_of(PLAN, *wrong))
            case SourceFinal():
                self.final = True
            case Failed():
                self.over = True
            case Released():
                self.over = self.over or not self.final
                self.returned = True

    def _new(self, spans: tuple[Span, ...]) -> bool:
        for a, b, p, q in spans:
            if not (0 <= a < b <= LAYERS and 0 <= p < q <= N):
                return False
        cells = cells_of(PLAN, *spans)
        return len(set(cells)) == len(cells) and not self.cells.intersection(cells)


def _payloads() -> st.SearchStrategy[bytes]:
    """Cases, cases with a few bytes changed, and messages made of numbers near legal ones."""
    scene = scene_at("leased")
    victim = identity_of(scene.grant)
    a, b = (identity_of(scene.shell.grant_of(request)) for request in (scene.a, scene.b))
    near = st.sampled_from(NEAR)
    attempts = st.sampled_from([*[victim[0]] * 30, victim[0].next, a[0], b[0], AttemptId(7, 99, 1)])
    slots = st.sampled_from([*[victim[1]] * 200, *NEAR])
    generations = st.sampled_from([*[victim[2]] * 200, *NEAR])
    layer, position = st.integers(0, LAYERS), st.sampled_from([0, 10, 20, 36, 37, 38, N])
    span = st.one_of(
        st.builds(Span, layer, layer, position, position),
        st.integers(0, LAYERS - 1).map(lambda at: Span(at, at + 1, 0, N)),
        st.builds(Span, near, near, near, near),
    )
    spans = st.lists(span, min_size=1, max_size=3).map(tuple) | st.just((WHOLE,))
    digests = st.lists(near, max_size=2).map(tuple) | st.just(())
    at = (attempts, slots, generations)
    none, zero, logits = st.just(()), st.just(0), st.just("logits")
    messages = st.one_of(
        st.builds(Progress, *at, spans, digests, near, near, near),
        st.builds(Progress, *at, st.just((WHOLE,)), none, zero, zero, zero),
        st.builds(SourceFinal, *at, st.sampled_from(["logits", "token"]), near, near, near),
        st.builds(SourceFinal, *at, logits, zero, zero, zero),
        st.builds(Computing, *at),
        st.builds(Failed, *at, st.text(max_size=3)),
        st.builds(Released, *at),
    ).map(encode)
    cased = st.sampled_from([payload for payloads in SAMPLES for payload in payloads])
    changes = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 255)), max_size=2)
    others = st.sampled_from(
        [encode(kind(*its)) for its in (a, b) for kind in (Computing, Released)]
    )
    changed = st.builds(_changed, messages | cased, changes)
    return st.one_of(messages, messages, messages, changed, changed, others)


@st.composite
def _told(draw: st.DrawFn) -> list[tuple[bytes, bool]]:
    """Some of what a good source tells, in any order of its rows, and then anything.

    With each packet: whether imports begin and land after it.
    """
    identity = identity_of(scene_at("leased").grant)
    rows = draw(st.permutations([Span(at, at + 1, 0, N) for at in range(LAYERS)]))
    good: list[FromSource] = [Progress(*identity, (row,), (), 0, 0, 0) for row in rows]
    good += [SourceFinal(*identity, "logits", 0, 0, 0), Released(*identity)]
    packets = [encode(message) for message in good[: draw(st.integers(0, len(good)))]]
    packets += draw(st.lists(_payloads(), max_size=8))
    return [(packet, draw(st.booleans())) for packet in packets]


def _changed(payload: bytes, changes: list[tuple[int, int]]) -> bytes:
    out = bytearray(payload)
    for at, byte in changes:
        if out:
            out[at % len(out)] = byte
    return bytes(out)


def _message_of(payload: bytes) -> FromSource | None:
    try:
        return decode_from_source(payload)
    except RemoteProtocolError:
        return None


@settings(max_examples=120, deadline=None, database=None, derandomize=True)
@given(_told())
def test_whatever_comes_is_legal_or_changes_nothing(told: list[tuple[bytes, bool]]) -> None:
    """A second statement of what is legal says of each packet what must become of it."""
    scene = scene_at("leased")
    mine = Told(identity_of(scene.grant), identity_of(scene.shell.grant_of(scene.a)))
    scene.shell.begin(BUDGET)
    others = all_but_victim(scene)
    with ears() as hear:
        for payload, imports in told:
            _hear_and_compare(scene, mine, payload, hear)
            assert all_but_victim(scene) == others
            assert ends_of(scene, scene.victim) == [Outcome.FAILED] * mine.over
            if imports:
                scene.shell.begin(BUDGET)
                scene.land(scene.victim)
                others = all_but_victim(scene)
                mine.over |= mine.wrong_digest
    finish(scene)


def _hear_and_compare(scene: Scene, mine: Told, payload: bytes, hear: Hear) -> None:
    owner, message = scene.shell.owner, _message_of(payload)
    dropped, handoff = owner.dropped.copy(), victim_of(scene)
    claims, held = claims_of(handoff), all_but_drops(scene)
    due = mine.due(message)
    hear(scene, payload)
    assert owner.dropped - dropped == count(*[due] * bool(due)), message
    if isinstance(message, AttemptMessage) and not due:
        mine.note(message)
        return
    assert claims_of(handoff) == claims
    if mine.speaks and due in ("undecodable", "malformed"):
        mine.over = True
    else:
        assert all_but_drops(scene) == held
