"""Case `tail`: what a hand-off from a torch source adds to vLLM's time to the first token.

At each prompt length and link, every route loads the same prompt into an idle engine, all routes
once in a round, and each second round takes them in the reverse order (A/B/C, C/B/A). The engine is
one for all: the speed of the emulated link is set between requests. In each round vLLM also
prefills the prompt itself (`local`, without a link only), and what it answers is what every load's
answer is compared with.

What the goal is made of, at each length and link:

* *T*: the median time in which imports of the whole route are under way (`import_ns`). Its imports
  begin when the source is done, so that this is what the same import takes alone.
* *fixed*: the median transfer tail of `fixed` rows, one in each round of this run: the streamed
  load of a prompt of one block without a link. What it has to move after the source-final time is
  one layer of 32 positions; the rest is what each load has: the final message, turns of the owner,
  publishing.
* the goal of the streamed route: its median tail is at most 1.25 x (T x last_group_nbytes /
  kv_nbytes + fixed).

A tail runs from the source-final time to the publication, by the owner's own measurement; the time
to the first token from `add_request` to the step that gave it, vLLM's computing of the prompt's
last tokens included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from headrace.bench.rows import RowFile, busy_share
from headrace.bench.vllm.engine import Engine
from headrace.bench.vllm.setting import BLOCK, ROUTES, Place, Setting, consumer, torch_source

CASE: Final = "tail"
LOCAL, FIXED = "local", "fixed"
ONE_BLOCK: Final = BLOCK + 1  # tokens of the shortest prompt of which a block is loaded

Missing = tuple[int, str]  # round, label


def run(setting: Setting, place: Place, file: RowFile, say: Callable[[str], None]) -> None:
    """Measure what `file` does not hold yet."""
    longest = max(setting.sizes.lengths)
    kv = consumer(torch_source(place), prefill_chunk=setting.prefill_chunk)
    options = setting.engine(place, longest, kv_transfer_config=kv)
    with Engine(place.python, options) as engine:
        about = {name: value for name, value in engine.about.items() if name != "pid"}
        file.append({"case": CASE, "measure": "engine", **about})
        answers = {n: _warm_up(engine, setting, n) for n in (*setting.sizes.lengths, ONE_BLOCK)}
        for num_tokens in setting.sizes.lengths:
            for link_mb_s in setting.sizes.links_mb_s:
                say(f"{num_tokens} tokens, link {link_mb_s:g} MB/s")
                _point(engine, setting, file, num_tokens, link_mb_s, answers)


def _warm_up(engine: Engine, setting: Setting, num_tokens: int) -> list[int]:
    """What is done once is done; returns vLLM's own answer."""
    prompt, count = setting.prompt(num_tokens), setting.sizes.answer
    engine.load(prompt, 1, "streamed")
    return list(engine.ask(prompt, count)["tokens"])


def _point(
    engine: Engine,
    setting: Setting,
    file: RowFile,
    num_tokens: int,
    link_mb_s: float,
    answers: dict[int, list[int]],
) -> None:
    at = {"case": CASE, "measure": "load", "prompt_tokens": num_tokens, "link_mb_s": link_mb_s}
    last, busy = -1, 0.0
    for repeat, label in missing(setting, num_tokens, link_mb_s, file):
        if repeat != last:
            last, busy = repeat, round(busy_share(0.1), 3)
        length = ONE_BLOCK if label == FIXED else num_tokens
        engine.tell("link", mb_s=0.0 if label == FIXED else link_mb_s)
        prompt, count = setting.prompt(length), setting.sizes.answer
        if label == LOCAL:
            told = engine.ask(prompt, count)
        else:
            told = engine.load(prompt, count, "streamed" if label == FIXED else label)
        row = {**at, "label": label, "repeat": repeat, **answer_of(told, answers[length])}
        file.append({**row, "busy_before": busy})


def missing(
    setting: Setting, num_tokens: int, link_mb_s: float, file: RowFile
) -> Iterator[Missing]:
    """The rounds and labels that `file` does not hold, in their order."""
    at = {"case": CASE, "measure": "load", "prompt_tokens": num_tokens, "link_mb_s": link_mb_s}
    for repeat in range(setting.rounds(num_tokens)):
        for label in labels_of(repeat, link_mb_s):
            if {**at, "label": label, "repeat": repeat} not in file:
                yield repeat, label


def labels_of(repeat: int, link_mb_s: float) -> list[str]:
    """The labels of one round in their order."""
    routes = list(ROUTES[::-1] if repeat % 2 else ROUTES)
    return [FIXED, *([] if link_mb_s else [LOCAL]), *routes]


def answer_of(told: dict[str, Any], expected: list[int]) -> dict[str, Any]:
    """What a row keeps of an answer; what headrace measured among it, where it loaded."""
    times = {name: told[name] for name in ("ttft_ns", "took_ns")}
    right = told["tokens"] == expected
    return {**times, "right": right, "tokens": told["tokens"], **(told["measured"] or {})}
