"""What is measured, how large, and the config that a server is started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from headrace.engine.text import max_positions_of
from headrace.errors import Refused


@dataclass(frozen=True)
class Sizes:
    """How much each case does; times in s, prompts and answers in tokens.

    clients, load_s, lengths, tokens: of the load. capacity_s, phase_s: of the overload. leavers:
    clients at once that leave, whose requests have leaver_tokens. overhead_repeats: of four
    requests each.
    """

    clients: int = 8
    load_s: float = 600.0
    sample_s: float = 5.0
    lengths: tuple[int, ...] = (32, 96, 192, 384)
    tokens: int = 32
    capacity_s: float = 60.0
    phase_s: float = 90.0
    disconnects: int = 1000
    leavers: int = 12
    leaver_tokens: int = 16
    kills_s: float = 300.0
    kill_every_s: float = 20.0
    malformed: int = 200
    fuzz: int = 10_000
    overhead_repeats: int = 15
    overhead_prompts: tuple[int, ...] = (64, 512)
    overhead_tokens: int = 64
    mixed_s: float = 90.0
    long: int = 900
    short: int = 32

    @property
    def longest(self) -> int:
        """Positions that the largest request of any case needs."""
        prompt = max(*self.lengths, *self.overhead_prompts, self.long)
        return prompt + max(self.tokens, self.overhead_tokens)


QUICK: Final = Sizes(
    clients=2,
    load_s=0.6,
    sample_s=0.1,
    lengths=(8, 24),
    tokens=4,
    capacity_s=0.3,
    phase_s=0.2,
    disconnects=12,
    leavers=4,
    leaver_tokens=6,
    kills_s=1.0,
    kill_every_s=0.4,
    malformed=40,
    fuzz=60,
    overhead_repeats=2,
    overhead_prompts=(8, 24),
    overhead_tokens=4,
    mixed_s=0.3,
    long=64,
    short=8,
)
"""For tests: every part once, and no figure worth a word."""


@dataclass(frozen=True)
class Setting:
    """What is served and asked for; `model` is its name, `directory` where it lies."""

    model: str
    directory: Path
    route: str = "whole"
    source: str = "torch"
    source_options: Mapping[str, Any] = field(default_factory=dict)
    decoder: str = "cpu"
    decoder_options: Mapping[str, Any] = field(default_factory=dict)
    lanes: int = 4
    slots: int = 2
    context: int = 1024
    threads: int = 1
    seed: int = 1
    sizes: Sizes = Sizes()

    def check(self) -> None:
        """Refuse what the model or the context cannot hold."""
        longest = max_positions_of(self.directory)
        for limit, what in ((longest, f"{self.model} holds"), (self.context, "--context is")):
            if self.sizes.longest > limit:
                raise Refused(
                    f"{what} {limit} positions, and the longest request needs "
                    f"{self.sizes.longest}; name another model or raise --context",
                    field="context",
                )

    def facts(self) -> dict[str, Any]:
        """What rows depend on."""
        kept = asdict(self)
        del kept["directory"]
        return kept

    def same(self) -> dict[str, Any]:
        """What all rows of a file have in common; sizes may differ between its cases."""
        kept = self.facts()
        del kept["sizes"]
        return kept

    def config(self, *, sources: int = 1, **tables: Mapping[str, Any]) -> dict[str, Any]:
        """A headrace.toml with one decoder and `sources` like sources; `tables`: more of it."""
        source = {
            "source": self.source,
            "slots": self.slots,
            "threads": self.threads,
            "options": dict(self.source_options),
        }
        decoder = {
            "model": str(self.directory),
            "served_as": [self.model],
            "decoder": self.decoder,
            "lanes": self.lanes,
            "context": self.context,
            "threads": self.threads,
            "options": dict(self.decoder_options),
            "sources": [{**source, "name": f"source-{at}"} for at in range(sources)],
        }
        http = {"port": 0, **tables.get("http", {})}
        rest = {name: dict(table) for name, table in tables.items() if name != "http"}
        return {"http": http, "requests": {"route": self.route}, **rest, "decoders": [decoder]}

    def told(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A config as rows keep it, without this machine's paths."""
        decoders = [{**each, "model": self.model} for each in config["decoders"]]
        return {**config, "decoders": decoders}
