"""What `bench ttft` measures: models, points, routes, their order, and how long it will take."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from headrace.bench.families import FAMILIES, make_model, prefill_s
from headrace.engine.text import max_positions_of
from headrace.errors import Refused
from headrace.geometry import Layer, Sliding
from headrace.messages import AskedRoute

CHUNK = 256  # positions of the chunked route's transfer chunk, without a prefill chunk
GROUP_SIZES = (1, 4)
ABOUT_GROUPS = 8
AUTO = "auto"
MARGIN = 16  # positions of a lane beyond the prompt

SHORT = 256  # up to here a prompt is measured at least LEAST_SHORT times, else LEAST times
LEAST_SHORT, LEAST, MOST = 5, 2, 10
START_S = 8.0  # of two sources and two decoders, once for each model and link
BESIDE_S = 0.2  # the idle check before a request, and what is done after it


class Cut(NamedTuple):
    """What one label stands for: a route, layers of a layer group, and the transfer chunk."""

    route: AskedRoute
    group_layers: int = 1
    chunk: int = 0


@dataclass(frozen=True)
class Subject:
    """A model that can be had; `family`: what its configuration calls its kind."""

    name: str
    family: str
    directory: Path
    layers: tuple[Layer, ...]
    vocab_size: int

    def kv_nbytes(self, num_tokens: int) -> int:
        """About how much KV a prompt has."""
        rows = (
            min(num_tokens, layer.kind.tail) if isinstance(layer.kind, Sliding) else num_tokens
            for layer in self.layers
        )
        return sum(n * layer.row_nbytes for n, layer in zip(rows, self.layers, strict=True))


@dataclass(frozen=True)
class Point:
    """What is measured together. `link_mb_s`: 10**6 bytes per second, 0 = no link."""

    subject: Subject
    num_tokens: int
    link_mb_s: float = 0.0
    prefill_chunk: int = 0
    repeats: int = LEAST

    @property
    def cuts(self) -> dict[str, Cut]:
        """The routes that are measured here, by label."""
        return cuts_of(len(self.subject.layers), self.num_tokens, self.prefill_chunk)

    @property
    def least(self) -> int:
        return LEAST_SHORT if self.num_tokens <= SHORT else LEAST

    def repeat_s(self) -> float:
        """About how long all routes take once, on one core."""
        alone = prefill_s(self.subject.directory, self.num_tokens)
        tails = 0.0
        if self.link_mb_s:
            carried = self.subject.kv_nbytes(self.num_tokens) / (self.link_mb_s * 1e6)
            by_layer = max(carried / len(self.subject.layers), carried - alone)
            late = sum(cut.route in ("whole", "chunked") for cut in self.cuts.values())
            tails = late * carried + (len(self.cuts) - late) * by_layer
        return len(self.cuts) * (alone + BESIDE_S) + tails


def subjects(
    names: Sequence[str], folder: Path, *, layers: int, window: int, say: Callable[[str], None]
) -> list[Subject]:
    """The models that can be had, in order; of one that cannot, `say` tells why.

    `names`: built-in names, directories, or families, which are made in `folder` with `layers`
    layers and sliding windows of `window` positions.

    Raises:
        Refused: none can be had.
    """
    from headrace.engine.models import resolve

    found = []
    for name in names:
        try:
            if name in FAMILIES:
                directory = make_model(name, folder / name, layers=layers, window=window)
            else:
                directory = resolve(name)
        except Refused as exc:
            say(f"left out: {exc}")
            continue
        found.append(subject_of(name, directory))
    if not found:
        raise Refused("none of the models can be had; `headrace models list` shows what is pulled")
    return found


def subject_of(name: str, directory: Path) -> Subject:
    """The model in a directory; the last part of a path is its name."""
    from headrace.engine.layers import geometry  # torch only where a model is opened
    from headrace.engine.loading import load_config

    config = load_config(directory)
    layers = geometry(config, "decoder", "float32", max_positions_of(directory))
    family, vocab_size = str(config.model_type), int(config.vocab_size)
    return Subject(Path(name).name, family, directory, layers, vocab_size)


def cuts_of(layers: int, num_tokens: int, prefill_chunk: int = 0) -> dict[str, Cut]:
    """The routes for a model and a prompt, by label.

    Streamed by each of GROUP_SIZES and in about 8 groups. Without a prefill chunk the chunked route
    is emitted after the prefill; a prompt of one chunk has no chunked route.
    """
    sizes = {min(size, layers) for size in (*GROUP_SIZES, math.ceil(layers / ABOUT_GROUPS))}
    chunk = prefill_chunk or CHUNK
    cuts = {"whole": Cut("whole")}
    if num_tokens > chunk:
        cuts["chunked"] = Cut("chunked", chunk=chunk)
    cuts |= {f"streamed-{size}": Cut("streamed", size) for size in sorted(sizes)}
    return cuts | {AUTO: Cut("auto")}


def order_of(labels: Sequence[str], repeat: int) -> list[str]:
    """The labels as a repeat takes them: A/B/B/A over two repeats, then begun with another."""
    first = repeat // 2 % len(labels)
    turned = [*labels[first:], *labels[:first]]
    return turned[::-1] if repeat % 2 else turned


def points_of(
    models: Sequence[Subject],
    *,
    prompts: Sequence[int],
    links_mb_s: Sequence[float] = (),
    link_prompt: int = 1024,
    prefill_chunk: int = 0,
) -> list[Point]:
    """Every model at every prompt without a link, and with links at one prompt.

    The first model goes over each link with a prompt of `link_prompt`; the others over the second
    link (or the only one) with at most SHORT tokens. With a prefill chunk there are only points
    whose prompt is longer than it.
    """
    points = []
    for number, subject in enumerate(models):
        links = links_mb_s if number == 0 else links_mb_s[:2][-1:]
        length = link_prompt if number == 0 else min(link_prompt, SHORT)
        at = [(0.0, num_tokens) for num_tokens in prompts] + [(link, length) for link in links]
        points += [
            Point(subject, num_tokens, link, prefill_chunk)
            for link, num_tokens in at
            if num_tokens > prefill_chunk
        ]
    return points


def within(points: Sequence[Point], seconds: float, repeats: int = 0) -> list[Point]:
    """The points with as many repeats as fit into `seconds`, or with `repeats` if that is not 0.

    Each has its least number; what time is left goes to where the least was spent so far.
    """
    if repeats:
        return [replace(point, repeats=repeats) for point in points]
    cost = [point.repeat_s() for point in points]
    counts = [point.least for point in points]
    left = seconds - seconds_of([replace(p, repeats=p.least) for p in points])
    while True:
        fits = [i for i, each in enumerate(cost) if counts[i] < MOST and each <= left]
        if not fits:
            return [replace(p, repeats=n) for p, n in zip(points, counts, strict=True)]
        chosen = min(fits, key=lambda i: counts[i] * cost[i])
        counts[chosen] += 1
        left -= cost[chosen]


def seconds_of(points: Sequence[Point]) -> float:
    """About how long the points take, with starting the processes, on one core each."""
    starts = {(point.subject.name, point.link_mb_s) for point in points}
    return START_S * len(starts) + sum(point.repeats * point.repeat_s() for point in points)
