"""Tiny owners to walk: one for each corner of the protocol, small enough to visit every state."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from headrace.geometry import Full, Kind, Layer, Manifest, Part, Sliding
from headrace.ids import Span
from headrace.messages import MAX_PROGRESS
from headrace.plan import Plan, compile_plan
from headrace.protocol.admission import FailurePolicy
from headrace.protocol.books import Limits
from headrace.testing.facts import Terms

EPOCH: Final = 7
DIGEST: Final = 0xD1


@dataclass(frozen=True)
class Instance:
    """One tiny owner, and which kinds of events it is walked with.

    slots: of each source. depth: prefetch depth. spans: how a well-behaved source cuts the transfer
    set. deadline: ticks from submission to a request's deadline, None = no deadline. max_progress:
    the bound on progress messages, made tiny where spans without cells could reach it. malice: also
    malformed, stale and misdirected messages, and misuse by the shell. device_faults: whatever the
    decoder is asked to do may fail. attempts, local: the policy of every request; with `local` the
    owner has an engine of its own. restarts: how many sources that died may be started again.
    reinstates: an operator brings back what is apart. starts: positions that are kept of each
    request's prompt, 0 for those that are not named.
    """

    name: str
    spans: tuple[Span, ...]
    requests: int = 1
    lanes: int = 1
    slots: tuple[int, ...] = (1,)
    depth: int = 0
    num_tokens: int = 2
    kinds: tuple[Kind, ...] = (Full(),)
    chunk_nbytes: int = 1 << 20
    budgets: tuple[int, ...] = (1,)
    digest: bool = False
    deadline: int | None = None
    progress_timeout: int = 1
    drain_timeout: int = 1
    max_progress: int = MAX_PROGRESS
    malice: bool = True
    deaths: bool = True
    cancels: bool = True
    ticks: bool = True
    device_faults: bool = False
    attempts: int = 1
    local: bool = False
    restarts: int = 0
    reinstates: bool = False
    starts: tuple[int, ...] = ()

    @cached_property
    def limits(self) -> Limits:
        return Limits(
            self.lanes,
            self.num_tokens,
            self.depth,
            self.chunk_nbytes,
            self.progress_timeout,
            self.drain_timeout,
        )

    @cached_property
    def terms(self) -> Terms:
        return Terms(
            self._layers,
            self.num_tokens,
            self.lanes,
            self.depth,
            self.digest,
            self.chunk_nbytes,
            self.progress_timeout,
            self.drain_timeout,
            self.max_progress,
            self.attempts,
            self.local,
        )

    @cached_property
    def policy(self) -> FailurePolicy:
        return FailurePolicy(self.attempts, self.local)

    @property
    def plan(self) -> Plan:
        """The plan of a prompt of which nothing was kept."""
        return self._plans[0]

    def start_of(self, number: int) -> int:
        """Positions that are kept of the prompt of request `number`."""
        return self.starts[number] if number < len(self.starts) else 0

    def _plan(self, start: int) -> Plan:
        manifest = Manifest(
            "decoder", "tiny", self._layers, ("token_major",), 2, "float32", self.num_tokens
        )
        return compile_plan(manifest, "token_major", self.num_tokens, self.num_tokens, start)

    def plan_for(self, num_tokens: int, start: int) -> Plan:
        """The plan of a prompt; every prompt of an instance has the same length."""
        return self._plans[start]

    @cached_property
    def _plans(self) -> tuple[Plan, ...]:
        """By the first position that they carry."""
        return tuple(self._plan(start) for start in range(self.num_tokens))

    @property
    def _layers(self) -> tuple[Layer, ...]:
        parts = (Part("k", 1, 1, "uint8"), Part("v", 1, 1, "uint8"))
        return tuple(Layer(at, f"layer{at}", kind, parts) for at, kind in enumerate(self.kinds))


_WHOLE: Final = (Span(0, 1, 0, 2),)
_CHUNKS: Final = (Span(0, 1, 0, 1), Span(0, 1, 1, 2))
_HYBRID: Final[tuple[Kind, ...]] = (Full(), Sliding(2, 2))

_ALL: Final = (
    Instance("one", _WHOLE, deadline=2, progress_timeout=2, drain_timeout=2),
    Instance(
        "hybrid",  # a span of two pieces, and one without cells
        (Span(0, 1, 0, 3), Span(1, 2, 0, 1), Span(1, 2, 1, 2), Span(1, 2, 2, 3)),
        num_tokens=3,
        kinds=_HYBRID,
        chunk_nbytes=4,
        budgets=(1, 5, 100),
        max_progress=4,
    ),
    Instance("digest", _CHUNKS, digest=True, device_faults=True, chunk_nbytes=2),
    Instance(
        "digest-hybrid",  # spans of two layers
        (Span(0, 2, 0, 2), Span(0, 2, 2, 3)),
        num_tokens=3,
        kinds=_HYBRID,
        digest=True,
        chunk_nbytes=4,
    ),
    Instance(
        "empty",
        (Span(0, 1, 0, 2),),
        requests=2,
        slots=(2,),
        depth=1,
        kinds=(Sliding(1, 0),),
        progress_timeout=2,
        max_progress=2,
    ),
    Instance("reuse", _WHOLE, requests=3, depth=1, deaths=False),
    Instance("parked", _CHUNKS, requests=2, slots=(2,), depth=1),
    Instance("prefetch", _WHOLE, requests=3, slots=(3,), depth=1, malice=False),
    Instance(
        "deeper",
        _WHOLE,
        requests=4,
        slots=(3,),
        depth=2,
        malice=False,
        deaths=False,
        ticks=False,
    ),
    Instance("parked-digest", _CHUNKS, requests=2, slots=(2,), depth=1, digest=True),
    Instance("lanes", _WHOLE, requests=2, lanes=2),
    Instance("near", _CHUNKS, requests=2, lanes=2, slots=(2,), malice=False, ticks=False),
    Instance("sources", _WHOLE, requests=2, lanes=2, slots=(1, 1)),
    Instance("uneven", _WHOLE, requests=3, slots=(1, 2), depth=1, malice=False, ticks=False),
    Instance("faults", _WHOLE, requests=2, lanes=2, slots=(2,), device_faults=True, malice=False),
    Instance("stranded", _WHOLE, requests=3, slots=(2,), depth=1, device_faults=True, malice=False),
    Instance("overdue", _WHOLE, requests=2, lanes=2, device_faults=True, malice=False),
    Instance(
        "overdrawn",
        _WHOLE,
        requests=3,
        lanes=2,
        device_faults=True,
        malice=False,
        deaths=False,
        ticks=False,
    ),
    Instance(
        "refused",
        (Span(0, 1, 0, 2),),
        requests=2,
        slots=(2,),
        depth=1,
        kinds=(Sliding(1, 0),),
        max_progress=1,
        device_faults=True,
    ),
    Instance(
        "times",
        _WHOLE,
        requests=2,
        slots=(2,),
        depth=1,
        deadline=3,
        progress_timeout=2,
        drain_timeout=2,
        malice=False,
    ),
    Instance("retry", _WHOLE, attempts=2, restarts=1, deadline=3, progress_timeout=2),
    Instance(
        "retry-late",  # imports outlast the source that is given up
        _WHOLE,
        attempts=2,
        drain_timeout=3,
        malice=False,
        deaths=False,
    ),
    Instance("retry-parked", _WHOLE, requests=2, slots=(2,), depth=1, attempts=2, ticks=False),
    Instance(
        "retry-queue",
        _WHOLE,
        requests=3,
        slots=(2,),
        depth=1,
        attempts=2,
        malice=False,
        deaths=False,
        cancels=False,
        ticks=False,
    ),
    Instance(
        "retry-elsewhere",
        _WHOLE,
        requests=2,
        slots=(1, 1),
        attempts=2,
        malice=False,
        ticks=False,
    ),
    Instance(
        "retry-digest",
        _CHUNKS,
        digest=True,
        attempts=3,
        malice=False,
        deaths=False,
        device_faults=True,
    ),
    Instance("local", _WHOLE, local=True, deadline=3, progress_timeout=2),
    Instance("locals", _WHOLE, requests=2, lanes=2, local=True, malice=False, ticks=False),
    Instance(
        "local-lost",
        _WHOLE,
        requests=2,
        lanes=2,
        local=True,
        malice=False,
        deaths=False,
        cancels=False,
    ),
    Instance("restarts", _WHOLE, attempts=2, restarts=2, malice=False),
    Instance(
        "restarts-parked",
        _WHOLE,
        requests=2,
        slots=(2,),
        depth=1,
        attempts=2,
        restarts=1,
        malice=False,
        ticks=False,
        cancels=False,
    ),
    Instance("reinstated", _WHOLE, device_faults=True, reinstates=True),
    Instance(
        "reinstated-promised",
        _WHOLE,
        requests=2,
        device_faults=True,
        malice=False,
        deaths=False,
        ticks=False,
        cancels=False,
        reinstates=True,
    ),
    Instance(
        "reinstated-next",
        _WHOLE,
        requests=2,
        device_faults=True,
        malice=False,
        deaths=False,
        cancels=False,
        reinstates=True,
    ),
    Instance("kept", _WHOLE, starts=(2,), device_faults=True, deadline=2),
    Instance(
        "kept-first",  # a part of it, and the source may tell of the rest only
        (Span(0, 1, 0, 2), Span(0, 1, 2, 3)),
        num_tokens=3,
        starts=(1,),
        attempts=2,
        deaths=False,
    ),
    Instance(
        "kept-between",
        _WHOLE,
        requests=3,
        slots=(2,),
        depth=1,
        starts=(0, 2, 0),
        malice=False,
        ticks=False,
    ),
    Instance("kept-lanes", _WHOLE, requests=2, lanes=2, starts=(2, 1), device_faults=True),
    Instance("kept-gone", _WHOLE, requests=2, starts=(0, 2), malice=False, ticks=False),
    Instance("kept-lost", _WHOLE, requests=2, starts=(2, 2), device_faults=True, malice=False),
)
INSTANCES: Final = {instance.name: instance for instance in _ALL}
