"""Random walks of the ATOM decoder on fake cards that fail at random: what is served is right."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from headrace.backends.atom import AtomDecoder
from headrace.backends.base import Entry, Reservation, ReserveFailed
from headrace.errors import DeviceError, WouldBlock
from headrace.geometry import Layout
from headrace.ids import Span
from headrace.plan import Copy
from headrace.testing.atom_cases import CONTEXT, FED, HYBRID, LLAMA, Case, Cut, Reusing
from headrace.testing.atom_ground import Bench, check_copies, refused
from tests.e2e.families import directory_of

LAYOUTS: tuple[Layout, ...] = ("head_major", "token_major")
CUTS: tuple[Cut, ...] = ("whole", "layers", "backwards", "positions", "late_first")
WALKS = 24
STEPS = 60


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    bench = Bench(directory_of("llama"), directory_of("gemma3"))
    yield bench
    bench.close()
    torch.set_num_threads(before)


class Walk:
    """One decoder, what it holds, and what is known of it.

    came: cells (layer, part, position) that any attempt brought into this reservation. fresh: those
    that the present attempt brought. gone: holders from before.
    """

    def __init__(
        self, bench: Bench, case: Case, decoder: AtomDecoder, fake: Reusing, rng: random.Random
    ) -> None:
        self.bench, self.case, self.decoder, self.fake, self.rng = bench, case, decoder, fake, rng
        self.done: Counter[str] = Counter()
        self.held: Reservation | Entry | None = None
        self.gone: list[Reservation | Entry] = []
        self.came: set[tuple[int, int, int]] = set()
        self.fresh: set[tuple[int, int, int]] = set()
        self.seed = self.fed = 0
        self.broken = False
        self.slot = bench.slot(decoder, case, 1)
        self.pieces: list[list[Copy]] = []

    def step(self) -> None:
        act = self.rng.choice(self._possible())
        try:
            act()
        except DeviceError as exc:
            if "fake driver: the " not in str(exc):  # nobody asked for this one
                raise
            self.held = exc.reservation if isinstance(exc, ReserveFailed) else self.held
            self.broken = True
            self.done["failed"] += 1
        else:
            self.done[act.__name__] += 1

    def _possible(self) -> list[Callable[[], None]]:
        if self.held is None:
            return [self.reserve]
        if self.broken:
            return [self.free, self.publish]
        if isinstance(self.held, Entry):
            return [self.decode] * 4 + [self.stale, self.fail, self.free]
        going_on = [self.bring] * 4 if self.pieces else [self.publish] * 4
        return [
            *going_on,
            self.look,
            self.look,
            self.again,
            self.stale,
            self.fail,
            self.free,
            self.publish,
        ]

    def reserve(self) -> None:
        num_tokens = self.rng.choice((1, 7, 8, 15, 16, 17, 21, 40, CONTEXT - len(FED)))
        self.fed, self.broken, self.came = 0, False, set()
        self._fill(num_tokens)
        self.held = self.decoder.reserve(num_tokens)

    def _fill(self, num_tokens: int) -> None:
        """A source begins, or begins again with other cells."""
        self.seed = self.rng.randrange(3)
        layout = self.rng.choice(LAYOUTS)
        self.slot = self.bench.slot(self.decoder, self.case, num_tokens, self.seed, layout)
        self.pieces = self.slot.pieces(self.rng.choice(CUTS))
        self.fresh = set()

    def bring(self) -> None:
        assert isinstance(self.held, Reservation)
        copies = self.pieces.pop(0)
        self.decoder.begin_import(self.held, self.slot.view, copies)
        for copy in copies:
            self.fresh |= cells_of(copy)
        self.came |= self.fresh

    def again(self) -> None:
        """The attempt failed, and another one follows into the same reservation."""
        self._fill(self.slot.plan.num_tokens)

    def look(self) -> None:
        """What came is read as it was sent; what never did is refused."""
        assert self.held is not None
        copy = self.rng.choice(self.slot.copies())
        start = self.rng.randrange(copy.start, copy.stop)
        span = Span(copy.layer, copy.layer + 1, start, self.rng.randint(start + 1, copy.stop))
        piece = self.slot.copies(span)[copy.part]
        if cells_of(piece) <= self.fresh:
            check_copies(self.decoder, self.held, self.slot, [piece])
        elif not cells_of(piece) <= self.came:
            refused("a read", partial(self.decoder.read, self.held, "head_major", piece))

    def publish(self) -> None:
        if not isinstance(self.held, Reservation):
            return
        if self.broken or any(not cells_of(copy) <= self.came for copy in self.slot.copies()):
            if self.broken and not self.pieces:
                return  # what failed may have been a read of cells that are all there
            refused("a publish", partial(self.decoder.publish, self.held))
        elif not self.pieces:  # else the rest is an earlier attempt's, which an owner knows
            self.gone.append(self.held)
            self.held = self.decoder.publish(self.held)
            check_copies(self.decoder, self.held, self.slot, self.slot.copies())

    def decode(self) -> None:
        assert isinstance(self.held, Entry)
        if self.fed == len(FED):
            self.free()
            return
        (row,) = self.decoder.decode_step([(self.held, FED[self.fed])])
        right = self.bench.right(self.case, self.held.num_tokens, self.seed)
        assert bytes(row.cast("B")) == right.rows[self.fed]
        self.fed += 1

    def stale(self) -> None:
        """A holder from before is good for nothing."""
        for gone in self.gone[-2:]:
            refused("a stale free", partial(self.decoder.free, gone))
            copy = self.slot.copies()[0]
            refused("a stale read", partial(self.decoder.read, gone, "head_major", copy))
            if isinstance(gone, Entry):
                refused("a stale step", partial(self.decoder.decode_step, [(gone, 1)]))
            else:
                refused("a stale publish", partial(self.decoder.publish, gone))
        refused("a second prompt", partial(self.decoder.reserve, 1), WouldBlock)

    def fail(self) -> None:
        """Something on the card is going to fail, soon."""
        if self.rng.random() < 0.2:
            self.fake.card.fail_update(self.rng.randrange(12))
        if self.rng.random() < 0.2:
            self.fake.card.fail_decode(self.rng.randrange(4))

    def free(self) -> None:
        assert self.held is not None
        self.decoder.free(self.held)
        self.gone.append(self.held)
        self.held = None


def cells_of(copy: Copy) -> set[tuple[int, int, int]]:
    return {(copy.layer, copy.part, at) for at in range(copy.start, copy.stop)}


@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize("case", [LLAMA, HYBRID], ids=["llama", "hybrid"])
def test_whatever_is_published_decodes_as_it_came(bench: Bench, case: Case, clears: bool) -> None:
    """Cut at random, in attempts that fail, over what others left, on cards that fail."""
    done: Counter[str] = Counter()
    for seed in range(WALKS):
        rng = random.Random(seed)
        knobs = {"sub_blocks": rng.random() < 0.5, "leaks": clears}
        read_back = rng.random() < 0.5
        with bench.decoder(case, clears=clears, read_back=read_back, **knobs) as (decoder, fake):
            walk = Walk(bench, case, decoder, fake, rng)
            for _ in range(STEPS):
                walk.step()
            done += walk.done
    acts = ("publish", "decode", "again", "failed", "look", "stale")
    assert min(done[name] for name in acts) > WALKS
