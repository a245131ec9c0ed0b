"""Shares between clients, ranks within one, and bounds that nothing passes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import LocalProtocolError
from headrace.server.queue import FairQueue, Job, QueueFull, rounded

S = 1_000_000_000
IDS = itertools.count()


def job(
    client: str = "a",
    length: int = 10,
    *,
    model: str = "m",
    most: int = 5,
    nbytes: int = 1,
    at_ns: int = 0,
    deadline_ns: int | None = None,
) -> Job:
    return Job(next(IDS), client, model, length, most, nbytes, at_ns, deadline_ns)


def anything(_: Job) -> bool:
    return True


def up_to(length: int) -> Callable[[Job], bool]:
    return lambda job: job.num_prompt_tokens <= length


def of_model(model: str) -> Callable[[Job], bool]:
    return lambda job: job.model == model


def drained(queue: FairQueue, fits: Callable[[Job], bool] = anything) -> list[Job]:
    taken = []
    while (one := queue.take(0, fits)) is not None:
        taken.append(one)
    return taken


def must_take(queue: FairQueue, fits: Callable[[Job], bool] = anything) -> Job:
    taken = queue.take(0, fits)
    assert taken is not None
    return taken


def test_what_does_not_fit_is_refused_whole_and_says_how_full_it_is() -> None:
    queue = FairQueue(3, 100)
    queue.offer([job(nbytes=40), job(nbytes=40)])
    with pytest.raises(QueueFull, match="2 of 3 requests and 80 of 100 bytes wait") as full:
        queue.offer([job(nbytes=10), job(nbytes=11)])
    assert not full.value.never
    assert full.value.retry_after_s == 1.0
    with pytest.raises(QueueFull):
        queue.offer([job(nbytes=1), job(nbytes=1)])
    with pytest.raises(QueueFull) as never:
        queue.offer([job(nbytes=101)])
    assert never.value.never
    assert "one request may have at most" in str(never.value)
    assert queue.statistics()["waiting"] == 2
    assert queue.statistics()["refused"] == 5
    queue.offer([job(nbytes=20)])
    queue.offer([])
    assert queue.statistics()["nbytes"] == 100


def test_room_is_asked_for_before_there_is_a_job() -> None:
    queue = FairQueue(2, 100)
    queue.offer([job(nbytes=60)])
    queue.check_room(1, 40, 0)
    for num, nbytes, never in ((2, 2, False), (1, 41, False), (3, 3, True), (1, 101, True)):
        with pytest.raises(QueueFull) as full:
            queue.check_room(num, nbytes, 0)
        assert full.value.never is never
    assert queue.statistics()["refused"] == 7
    assert queue.statistics()["waiting"] == 1


def test_when_to_come_again_is_by_how_fast_jobs_were_taken() -> None:
    queue = FairQueue(10, 100)
    queue.offer([job() for _ in range(10)])
    for second in (0, 2, 4, 6):
        queue.take(second * S, anything)
    queue.offer([job() for _ in range(4)])
    with pytest.raises(QueueFull) as full:
        queue.offer([job(at_ns=6 * S)])
    assert full.value.retry_after_s == 10 * 2 / 2
    with pytest.raises(QueueFull) as stuck:  # nothing was taken for an hour
        queue.offer([job(at_ns=3600 * S)])
    assert stuck.value.retry_after_s == 60.0


def test_an_id_is_used_once() -> None:
    queue = FairQueue(10, 100)
    one = job()
    with pytest.raises(LocalProtocolError, match="in use"):
        queue.offer([one, one])
    queue.offer([one])
    with pytest.raises(LocalProtocolError, match="in use"):
        queue.offer([job(), one])
    with pytest.raises(LocalProtocolError, match="not running"):
        queue.served(one, 0)
    assert queue.take(0, anything) is one
    with pytest.raises(LocalProtocolError, match="in use"):
        queue.offer([one])
    queue.served(one, 1)
    with pytest.raises(LocalProtocolError, match="not running"):
        queue.served(one, 1)
    assert queue.statistics() == {
        "waiting": 0, "nbytes": 0, "running": 0, "clients": 0,
        "offered": 1, "taken": 1, "removed": 0, "expired": 0, "refused": 0,
    }  # fmt: skip


def test_a_removed_job_is_gone_and_the_rest_goes_on() -> None:
    queue = FairQueue(10, 100)
    first, second, third = jobs = [job(), job(), job("b")]
    queue.offer(jobs)
    assert queue.remove(first.id)
    assert not queue.remove(first.id)
    assert queue.remove(third.id)
    assert drained(queue) == [second]
    assert not queue.remove(second.id)


def test_deadlines_pass_in_order_and_once() -> None:
    queue = FairQueue(100, 1000)
    late, later, never = jobs = [job(deadline_ns=30), job(deadline_ns=20), job()]
    queue.offer([*jobs, taken := job(model="n", deadline_ns=10)])
    assert queue.next_deadline_ns() == 10
    assert queue.take(0, of_model("n")) is taken
    assert queue.next_deadline_ns() == 20
    assert queue.expired(19) == []
    assert queue.expired(20) == [later]
    assert queue.expired(99) == [late]
    assert queue.next_deadline_ns() is None
    assert drained(queue) == [never]
    assert queue.statistics()["expired"] == 2


def test_a_short_prompt_overtakes_within_its_patience_and_no_further() -> None:
    def order(later_s: float) -> list[int]:
        queue = FairQueue(10, 100, patience=2.0)
        queue.measured(1000, 1.0)
        queue.offer([job(length=1024), job(length=64, at_ns=int(later_s * S))])
        return [one.num_prompt_tokens for one in drained(queue)]

    assert order(2 * 0.95) == [64, 1024]
    assert order(2 * 0.97) == [1024, 64]


def test_without_a_measurement_or_patience_it_is_who_came_first() -> None:
    unmeasured, impatient = FairQueue(10, 100), FairQueue(10, 100, patience=0.0)
    impatient.measured(1000, 1.0)
    for queue in (unmeasured, impatient):
        queue.offer(jobs := [job(length=1024), job(length=64, at_ns=1), job(length=512, at_ns=2)])
        assert drained(queue) == jobs


def test_an_estimate_follows_what_is_measured() -> None:
    queue = FairQueue(1, 1)
    assert queue.seconds_per_token == 0.0
    queue.measured(0, 1.0)
    queue.measured(10, 0.0)
    assert queue.seconds_per_token == 0.0
    queue.measured(100, 1.0)
    assert queue.seconds_per_token == pytest.approx(0.01)
    for _ in range(100):
        queue.measured(100, 2.0)
    assert queue.seconds_per_token == pytest.approx(0.02, rel=0.01)


def test_what_does_not_fit_now_holds_up_nobody_else() -> None:
    queue = FairQueue(10, 100)
    queue.offer([
        long := job("a", 1000), short := job("a", 10),
        other := job("b", 2000, model="n"), small := job("b", 20, model="n"),
    ])  # fmt: skip
    assert drained(queue, up_to(500)) == [short, small]
    assert drained(queue, of_model("l")) == []
    assert drained(queue, of_model("n")) == [other]
    assert drained(queue) == [long]


def test_of_prompts_of_about_one_length_a_shorter_one_that_fits_goes() -> None:
    queue = FairQueue(10, 100)
    queue.offer([job(length=1020), job(length=1010), fits := job(length=990)])
    assert rounded(1020) == rounded(990)
    assert queue.take(0, up_to(1000)) is fits
    queue = FairQueue(10, 100)
    queue.offer([job("a", 18), job("b", 18), least := job("b", 17)])
    assert rounded(16) < rounded(17) == rounded(18)
    assert queue.take(0, up_to(17)) is least


def test_a_client_that_was_away_gets_no_credit_and_keeps_its_debt() -> None:
    queue = FairQueue(1000, 10_000)
    queue.offer([job("busy") for _ in range(50)])
    for _ in range(20):
        one = must_take(queue)
        queue.served(one, 5)
    queue.offer([job("new") for _ in range(20)])
    shares = [one.client for one in drained(queue)[:20]]
    assert shares.count("new") in (10, 11)


def test_a_debt_is_worked_off_though_new_clients_keep_coming() -> None:
    queue = FairQueue(1000, 10_000)
    queue.offer([job("indebted"), job("indebted", length=1000), job("new")])
    assert [must_take(queue).client for _ in range(3)] == ["indebted", "new", "indebted"]
    queue.offer([job("first"), job("second"), waits := job("indebted")])
    turns = 0
    while must_take(queue) is not waits:
        queue.offer([job(f"new {turns}")])
        turns += 1
        assert turns < 100


def test_whoever_comes_starts_at_the_average_of_those_who_wait_now() -> None:
    queue = FairQueue(100, 1000)
    queue.offer([job("a"), job("a"), left := job("b")])
    queue.served(must_take(queue), 0)
    queue.offer([job("c")])
    assert {name: each.account for name, each in queue._clients.items()} == {
        "a": 10, "b": 0, "c": 5,
    }  # fmt: skip
    queue.remove(left.id)
    queue.offer([job("d")])
    assert queue._clients["d"].account == 8
    assert [one.client for one in drained(queue)] == ["c", "d", "a"]


def test_what_was_not_decoded_is_given_back() -> None:
    queue = FairQueue(100, 1000)
    queue.offer(
        [*(job("modest", most=1000) for _ in range(5)), *(job("plain", most=5) for _ in range(50))]
    )
    order = []
    for _ in range(10):
        one = must_take(queue)
        queue.served(one, 5)
        order.append(one.client)
    assert order.count("modest") == 5


@given(
    st.lists(
        st.tuples(st.integers(1, 500), st.integers(1, 500), st.integers(0, 500)),
        min_size=1,
        max_size=60,
    )
)
def test_two_busy_clients_are_never_further_apart_than_one_job(
    costs: list[tuple[int, int, int]],
) -> None:
    queue = FairQueue(1000, 1000)
    service = {"a": 0, "b": 0}
    come = itertools.cycle(costs)
    decoded: dict[int, int] = {}

    def feed(client: str) -> None:
        length, most, tokens = next(come)
        queue.offer([one := job(client, length, most=most)])
        decoded[one.id] = min(most, tokens)

    for _ in range(2):
        feed("a")
        feed("b")
    greatest = max(length + most for length, most, _ in costs)
    for _ in range(60):
        taken = must_take(queue)
        feed(taken.client)
        queue.served(taken, decoded[taken.id])
        service[taken.client] += taken.num_prompt_tokens + decoded[taken.id]
        assert abs(service["a"] - service["b"]) <= greatest


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("offer"),
            st.lists(
                st.tuples(
                    st.sampled_from("abc"),
                    st.sampled_from("mn"),
                    st.integers(0, 70),
                    st.integers(0, 12),
                    st.one_of(st.none(), st.integers(0, 60)),
                ),
                max_size=4,
            ),
        ),
        st.tuples(st.just("take"), st.dictionaries(st.sampled_from("mn"), st.integers(0, 80))),
        st.tuples(st.just("remove"), st.integers(0, 20)),
        st.tuples(st.just("expire"), st.just(None)),
        st.tuples(st.just("served"), st.integers(0, 9)),
        st.tuples(st.just("measured"), st.integers(1, 4)),
    ),
    max_size=60,
)


class World:
    """A queue, and what must be in it, kept as plain lists."""

    def __init__(self) -> None:
        self.queue = FairQueue(8, 64, patience=3.0)
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.now_ns = 0

    def offer(self, asked: list[tuple[str, str, int, int, int | None]]) -> None:
        jobs = [
            job(client, length, model=model, nbytes=nbytes, at_ns=self.now_ns,
                deadline_ns=None if within is None else self.now_ns + within)
            for client, model, length, nbytes, within in asked
        ]  # fmt: skip
        every = [*self.waiting, *jobs]
        if len(every) <= 8 and sum(one.nbytes for one in every) <= 64:
            self.queue.offer(jobs)
            self.waiting = every
        else:
            with pytest.raises(QueueFull):
                self.queue.offer(jobs)

    def take(self, longest: dict[str, int]) -> None:
        def fits(one: Job) -> bool:
            return one.num_prompt_tokens <= longest.get(one.model, -1)

        taken = self.queue.take(self.now_ns, fits)
        fitting = [one for one in self.waiting if fits(one)]
        if taken is None:
            assert fitting == []
            return
        assert taken in fitting
        for other in fitting:
            if other.client == taken.client and other is not taken:
                assert self.rank(taken) <= self.rank(other)
                if rounded(other.num_prompt_tokens) == rounded(taken.num_prompt_tokens):
                    assert other.model != taken.model or other.id > taken.id
        self.waiting.remove(taken)
        self.running.append(taken)

    def rank(self, one: Job) -> float:
        expected_ns = self.queue.seconds_per_token * 1e9 * rounded(one.num_prompt_tokens)
        return round(one.arrived_ns + 3.0 * expected_ns, 3)

    def remove(self, at: int) -> None:
        if at < len(self.waiting):
            assert self.queue.remove(self.waiting.pop(at).id)

    def expire(self, _: None) -> None:
        late = self.queue.expired(self.now_ns)
        for one in self.waiting:
            due = one.deadline_ns is not None and one.deadline_ns <= self.now_ns
            assert due is (one in late)
        self.waiting = [one for one in self.waiting if one not in late]

    def served(self, num_tokens: int) -> None:
        if self.running:
            self.queue.served(self.running.pop(0), num_tokens)

    def measured(self, ns: int) -> None:
        self.queue.measured(1, ns / 1e9)

    def check(self) -> None:
        told = self.queue.statistics()
        assert told["waiting"] == len(self.waiting) <= 8
        assert told["nbytes"] == sum(one.nbytes for one in self.waiting) <= 64
        assert told["running"] == len(self.running)
        in_line = [each for each in self.queue._clients.values() if each.num_waiting]
        assert {each.name for each in in_line} == {one.client for one in self.waiting}
        assert self.queue._accounts == sum(each.account for each in in_line)
        dues = [one.deadline_ns for one in self.waiting if one.deadline_ns is not None]
        assert self.queue.next_deadline_ns() == min(dues, default=None)


@given(STEPS)
def test_any_steps_keep_the_bounds_and_take_each_job_once(
    steps: list[tuple[str, object]],
) -> None:
    world = World()
    for name, asked in steps:
        world.now_ns += 7
        getattr(world, name)(asked)
        world.check()
    while world.waiting:
        before = len(world.waiting)
        world.take({"m": 100, "n": 100})
        assert len(world.waiting) == before - 1
    while world.running:
        world.served(0)
    told = world.queue.statistics()
    assert (told["waiting"], told["nbytes"], told["running"], told["clients"]) == (0, 0, 0, 0)
    out = told["taken"] + told["removed"] + told["expired"]
    assert told["offered"] == out


@pytest.mark.parametrize("num_clients", [1, 50, 5000])
def test_a_turn_asks_about_few_of_many(num_clients: int) -> None:
    queue = FairQueue(5000, 5000)
    queue.offer(
        [job(f"c{number % num_clients}", 10 + number * 37 % 8000) for number in range(5000)]
    )
    asked = []

    def below(length: int) -> Callable[[Job], bool]:
        def fits(one: Job) -> bool:
            asked.append(one)
            return one.num_prompt_tokens < length

        return fits

    assert queue.take(0, below(0)) is None
    assert len(asked) <= 2
    asked.clear()
    for _ in range(20):
        assert queue.take(0, below(900))
    assert len(asked) < 20 * 20


def test_what_is_over_is_not_remembered_for_ever() -> None:
    queue = FairQueue(10, 100)
    queue.offer([job("stays", 1), job("runs", model="n")])
    queue.offer([job("stays", 1, deadline_ns=1)])  # before all others in every heap
    must_take(queue, of_model("n"))
    for number in range(9000):
        queue.offer([one := job(f"c{number}", 50, model="mn"[number % 2], deadline_ns=10 + number)])
        if number % 2:
            queue.served(must_take(queue, of_model("n")), 1)
        else:
            queue.remove(one.id)
    assert queue.statistics()["clients"] < 4200
    assert len(queue._order) < 10_000
    assert len(queue._deadlines) < 100
    assert len(queue._lengths["m"]) < 100
    assert "n" not in queue._lengths


def test_turns_that_were_replaced_are_dropped() -> None:
    queue = FairQueue(1000, 1000)
    queue.offer([job() for _ in range(400)])
    taken = [must_take(queue) for _ in range(300)]
    for one in taken:
        queue.served(one, 1)
        assert len(queue._order) < 100
    assert len(drained(queue)) == 100


def test_lengths_are_rounded_up_by_less_than_a_quarter() -> None:
    lengths = [rounded(length) for length in range(5000)]
    assert lengths == sorted(lengths)
    assert all(length <= up < length * 1.25 or up == length for length, up in enumerate(lengths))
    assert len(set(lengths)) < 50
