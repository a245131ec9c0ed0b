"""The scheduler half against a table-free statement of its rules, over random histories."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.runtime.config import SourceConfig
from headrace.vllm.scheduling import Prompt, Scheduling, Told
from headrace.vllm.settings import Settings

BLOCK = 4
SLOTS = 3
ODD = ((0, True, True), (4, True, True), (5, True, True), (9, False, True), (9, True, False))
"""Prompts by their length, whether a load is asked for, and whether they are text alone."""
REMEMBERED = (
    "_pending",
    "_begun",
    "_aborted",
    "_dropped",
    "_left",
    "_over",
    "_counted",
    "_computed",
)


class Walk(RuleBasedStateMachine):
    """vLLM and the worker around it, as far as they decide the order of calls.

    alive: requests of vLLM's; waiting: those of them whose blocks are vLLM's only once they are
    reported, and those that are finished and whose blocks are kept for that; owed: what the worker
    was told of and has not reported; over: what was reported, and vLLM was not told yet.
    """

    def __init__(self) -> None:
        super().__init__()
        source = SourceConfig("replay", num_slots=SLOTS)
        self.halves = Scheduling(Settings(sources=(source,)), BLOCK)
        self.halves.hear(Told(64, starts_anywhere=True, num_slots=SLOTS))
        self.names = 0
        self.alive: dict[str, Prompt] = {}
        self.waiting: set[str] = set()
        self.untold: list[str] = []
        self.owed: set[str] = set()
        self.over: list[str] = []
        self.loaded: set[str] = set()
        self.aborted: list[str] = []
        self.dropped: list[str] = []

    @rule(odd=st.sampled_from([*[(9, True, True)] * 6, *ODD]))
    def arrives(self, odd: tuple[int, bool, bool]) -> None:
        count, wants, plain = odd
        self.names += 1
        name, params = f"r{self.names}", {"do_remote_prefill": wants}
        self.alive[name] = Prompt(name, tuple(range(count)), params, plain)

    def at_rest(self) -> list[str]:
        return sorted(self.alive.keys() - self.waiting)

    @precondition(lambda self: self.at_rest())
    @rule(at=st.integers(0, 99), has_blocks=st.sampled_from([True, True, True, False]))
    def schedules(self, at: int, has_blocks: bool) -> None:
        """A request without blocks: new, preempted, or to be recomputed."""
        name = self.at_rest()[at % len(self.at_rest())]
        each = self.alive[name]
        tokens = each.tokens or ()
        end = max(0, len(tokens) - 1) // BLOCK * BLOCK
        wanted = bool((each.params or {})["do_remote_prefill"]) and each.plain
        expected = end if wanted and name not in self.loaded else 0
        if expected and len(self.waiting) >= SLOTS:
            assert self.halves.matched(each, 0) is None
            return
        assert self.halves.matched(each, 0) == expected
        if not has_blocks:
            return
        self.halves.allocated(each, ((1, 2, 3),), expected)
        if expected:
            self.waiting.add(name)
            self.untold.append(name)

    @rule()
    def steps(self) -> None:
        orders = self.halves.step()
        assert [load.request_id for load in orders.loads] == self.untold
        assert list(orders.dropped) == self.dropped
        assert list(orders.aborted) == self.aborted
        self.owed |= {*self.untold, *self.dropped}
        assert not set(self.dropped) & set(self.over), "reported before it was told"
        self.untold, self.dropped, self.aborted = [], [], []

    @precondition(lambda self: self.owed)
    @rule(at=st.integers(0, 99))
    def ends(self, at: int) -> None:
        """In the worker; vLLM hears of it with the step's output."""
        name = sorted(self.owed)[at % len(self.owed)]
        self.owed.remove(name)
        self.over.append(name)

    @precondition(lambda self: self.over)
    @rule()
    def hears(self) -> None:
        self.halves.reported(self.over)
        for name in self.over:
            assert name in self.waiting, "reported twice"
            self.waiting.remove(name)
            if name in self.aborted:
                self.aborted.remove(name)
            if name in self.alive:
                self.loaded.add(name)
        self.over = []

    @precondition(lambda self: self.alive)
    @rule(at=st.integers(0, 99))
    def finishes(self, at: int) -> None:
        """By an abort, or because it is done."""
        name = sorted(self.alive)[at % len(self.alive)]
        del self.alive[name]
        self.halves.finished(name)
        self.loaded.discard(name)
        if name in self.untold:
            self.untold.remove(name)
            self.dropped.append(name)
        elif name in self.waiting:
            self.aborted.append(name)

    @invariant()
    def what_is_loading_is_what_vllm_waits_for(self) -> None:
        assert self.halves.loading == len(self.waiting)

    def teardown(self) -> None:
        while self.alive:
            self.finishes(0)
        self.steps()
        while self.owed:
            self.ends(0)
        self.hears()
        self.steps()
        assert not self.waiting
        assert not any(getattr(self.halves, name) for name in REMEMBERED)


Walk.TestCase.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, derandomize=True, database=None
)
TestWalk = Walk.TestCase
