"""Small bugs, planted one at a time into the real machines: the walk must find each.

They are as close as can be to what a tired programmer would write. How they are written down is
told in `headrace.testing.planting`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Final

from headrace import coverage
from headrace.coverage import Coverage
from headrace.protocol.admission import Admission
from headrace.protocol.books import Books, Source
from headrace.protocol.endings import Endings
from headrace.protocol.grants import Grants
from headrace.protocol.handoff import Handoff
from headrace.protocol.owner import Owner
from headrace.protocol.slots import Slot
from headrace.protocol.source import SourceAttempt
from headrace.testing.attempt_bugs import ATTEMPT_BUGS
from headrace.testing.explorer import walk
from headrace.testing.facts import Violation
from headrace.testing.grant_bugs import GRANT_BUGS
from headrace.testing.instances import INSTANCES
from headrace.testing.kept_bugs import KEPT_BUGS
from headrace.testing.owner_bugs import OWNER_BUGS
from headrace.testing.planting import Mutant, read_mutants
from headrace.testing.source_walk import walk_source


def hunt(mutant: Mutant) -> str | None:
    """Walk with the bug planted; returns how it was found, None if it survived.

    The instance `source` is the walk of a source attempt.
    """
    with mutant.planted():
        try:
            if mutant.instance == "source":
                walk_source(digest=False, chunk=1)
                walk_source(digest=True, chunk=0)
            else:
                walk(INSTANCES[mutant.instance])
        except Violation as exc:
            return str(exc)
    return None


_PLACES: Final[dict[str, type | ModuleType]] = {
    "coverage": coverage,
    **{
        c.__name__: c
        for c in (
            Coverage,
            Handoff,
            Slot,
            Books,
            Endings,
            Grants,
            Owner,
            Admission,
            SourceAttempt,
            Source,
        )
    },
}

# Bugs that change nothing, since another condition stands behind: they survive and do not count.
# The coverage that landed is complete only after the last fence and digest; SEALED is reached only
# with the final; the final is refused until every cell was told; what fails an import ends its
# hand-off in the same call; no import begins in DRAINING.
_SHIELDED: Final = r"""
[Handoff.publishable]
digest: publish ignores what is in flight
    and not self._flights =>
digest: publish ignores the final
    and self.final =>
[Handoff._settle]
digest: sealed without every cell told
     and self._claimed.complete =>
[Owner.import_failed]
digest: a failed import lands
    good=False => good=True
[Handoff.end_import]
digest: a wrong digest lands
    if good: => if True:
[Handoff.end]
digest: an end keeps the queue
    self._queue.clear() => pass
"""

MUTANTS: Final = read_mutants(ATTEMPT_BUGS + GRANT_BUGS + OWNER_BUGS + KEPT_BUGS, _PLACES)
EQUIVALENT: Final = read_mutants(_SHIELDED, _PLACES)
