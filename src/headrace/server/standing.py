"""What is in service of a decoder, by what its owner said last."""

from __future__ import annotations

from typing import Final, NamedTuple

from headrace.messages import Inspected, SourceHeld, Up

_IN_SERVICE: Final = "in service"
_FOR_GOOD: Final = ("set aside", "gone")


class Standing(NamedTuple):
    """A decoder's lanes, sources and slots.

    up: None while its owner is not ready. report: what it holds, None until it was first asked.
    local: whether the owner may compute prompts by itself.
    """

    up: Up | None
    report: Inspected | None
    local: bool

    @property
    def lanes(self) -> int:
        """Lanes in service."""
        if self.up is None:
            return 0
        report = self.report
        apart = 0 if report is None else sum(each.state == "quarantined" for each in report.lanes)
        return max(0, self.up.lanes - apart)

    @property
    def sources(self) -> int:
        """Sources in service; all of them until the owner was first asked."""
        if self.up is not None and self.report is None:
            return self.up.num_sources
        return sum(each.state == _IN_SERVICE for each in self._held)

    @property
    def slots(self) -> int:
        """Prompts that can be prefilled at once."""
        if self.alone or self.up is None:
            return int(self.alone)
        report = self.report
        if report is None or report.truncated or not report.slots:
            return self.up.num_slots * self.sources // max(1, self.up.num_sources)
        serving = {each.source for each in self._held if each.state == _IN_SERVICE}
        usable = (each.state != "quarantined" for each in report.slots if each.source in serving)
        return sum(usable)

    @property
    def alone(self) -> bool:
        """Whether all prompts are the owner's own to compute from now on, one after the other."""
        return self.local and self._sources_gone

    @property
    def forsaken(self) -> bool:
        """Whether nobody is left to compute a prompt."""
        return not self.local and self._sources_gone

    @property
    def _held(self) -> tuple[SourceHeld, ...]:
        """Its sources; behind them an owner may list its own engine, which is none of them."""
        if self.up is None or self.report is None:
            return ()
        return self.report.sources[: self.up.num_sources]

    @property
    def _sources_gone(self) -> bool:
        """Whether no source of its can come back."""
        return bool(self._held) and all(each.state in _FOR_GOOD for each in self._held)
