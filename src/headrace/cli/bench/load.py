"""`headrace bench load`: many requests at once, and token time beside imports."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from headrace.bench import load
from headrace.bench.load import Setting
from headrace.bench.load_table import figures, serving_lines, token_lines
from headrace.bench.rows import RowFile, Spread
from headrace.cli.arguments import check_count, check_output, check_seconds
from headrace.cli.bench.tables import open_rows, print_goals
from headrace.errors import Refused

MOST_AT_ONCE = 65
MAX_MB_S = 1e6

_console = Console(highlight=False, markup=False)


def load_command(
    *,
    model: str = "smollm2-135m",
    source: Literal["paced", "torch"] = "paced",
    rates_mb_s: tuple[float, ...] = (100.0, 400.0),
    in_flight: tuple[int, ...] = (1, 2, 4, 8),
    prompt: int = 256,
    tokens: int = 4,
    repeats: int = 10,
    neighbours: tuple[int, ...] = (1, 2, 4),
    import_prompt: int = 512,
    blocks: int = 10,
    block_s: float = 1.0,
    resume: bool = False,
    out: Path | None = None,
) -> int:
    """Requests in flight by route, and token time of those who decode while others are imported.

    The decoder is the cpu decoder with one thread; `auto` has one, a source and an owner of its
    own. The token time, beside arrivals that are streamed and that come whole, is compared with a
    control that has the same arrivals and messages and discards what is imported, and with no
    prefill at all.

    Parameters
    ----------
    model
        Of the decoder: a built-in name or a directory.
    source
        Of the served requests: `paced` has the model's geometry and computes nothing, `torch`
        computes. Beside neighbours it is always paced.
    rates_mb_s
        KV of a paced prefill, MB/s (1e6 bytes); the first one for the served requests.
    in_flight
        How many requests are served at once; none leaves this half out.
    prompt, tokens
        Of a served request.
    neighbours
        How many requests decode while others are imported; none leaves this half out.
    import_prompt
        Prompt length of what is imported beside them.
    blocks, block_s
        Each arm is looked at this often, for this many seconds; an odd number is one more.
    resume
        Go on with the rows that --out holds.
    """
    _check_rates(rates_mb_s)
    _check_at_once(in_flight, neighbours)
    for flag, value in (
        ("--prompt", prompt),
        ("--tokens", tokens),
        ("--repeats", repeats),
        ("--import-prompt", import_prompt),
        ("--blocks", blocks),
    ):
        check_count(flag, value)
    check_seconds("--block-s", block_s)
    check_output("--out", out, make_parents=True)
    from headrace.engine.models import resolve

    directory = resolve(model)
    setting = Setting(
        model=directory.name if "/" in model else model,
        directory=directory,
        source=source,
        rates_mb_s=rates_mb_s,
        in_flight=in_flight,
        prompt=prompt,
        tokens=tokens,
        repeats=repeats,
        neighbours=neighbours,
        import_prompt=import_prompt,
        blocks=blocks,
        block_s=block_s,
    )
    setting.check()
    same = {"tokens": tokens, "prompt": prompt, "import_prompt": import_prompt, "block_s": block_s}
    file = open_rows(out, load.CLAIM, load.KEY, same, resume=resume)
    _run(setting, file)
    _print_rows(file.rows)
    return 0


def _check_at_once(in_flight: tuple[int, ...], neighbours: tuple[int, ...]) -> None:
    if not (in_flight or neighbours):
        raise Refused("--in-flight and --neighbours are both empty; give one of them a number")
    for flag, values in (("--in-flight", in_flight), ("--neighbours", neighbours)):
        for value in values:
            check_count(flag, value, limit=MOST_AT_ONCE)


def _check_rates(rates_mb_s: tuple[float, ...]) -> None:
    if not rates_mb_s:
        raise Refused("--rates-mb-s is empty; give at least one")
    for rate_mb_s in rates_mb_s:
        if not 0 < rate_mb_s <= MAX_MB_S:
            raise Refused(f"--rates-mb-s is {rate_mb_s:g}; it must be above 0, and finite")


def _run(setting: Setting, file: RowFile) -> None:
    _say(f"about {setting.seconds() / 60:.1f} minutes from the start")
    last = ""
    for row in load.run(setting, file):
        where = _where(row)
        if where != last:
            _say(f"{where} ...")
        last = where


def _where(row: dict[str, Any]) -> str:
    if row["measure"] == "serving":
        return f"serving, repeat {row['repeat']}"
    return f"{row['neighbours']} decode beside {row['rate_mb_s']:g} MB/s of KV"


def _say(text: str) -> None:
    _console.print(text, soft_wrap=True)


def _print_rows(rows: list[dict[str, Any]]) -> None:
    last = ""
    for line in serving_lines(rows):
        if str(line.key) != last:
            last = str(line.key)
            _say(f"\n{last}: median [p10, p90]")
        took = f"  took {line.note}" if line.note else ""
        _say(
            f"{line.route:>9}: {_short(line.requests_per_s)} requests/s  "
            f"{_short(line.mb_per_s)} MB/s of KV  TTFT {_short(line.ttft_ms)} ms  "
            f"tail {_short(line.tail_ms)} ms, "
            f"of which decode steps {_short(line.step_in_the_way_ms)} ms{took}"
        )
    for each in token_lines(rows):
        if str(each.key) != last:
            last = str(each.key)
            _say(f"\n{last}: token time, median [p10, p90]")
        _say(
            f"{each.arm:>9}: {_short(each.gap_ms)} ms  mean {each.mean_ms:.2f} ms  "
            f"p99 {each.p99_ms:.2f} ms  n={each.gap_ms.samples}  "
            f"beside {_short(each.mb_per_s)} MB/s of KV"
        )
    _say("")
    print_goals(_console, figures(rows))


def _short(spread: Spread) -> str:
    return f"{spread.median:.4g} [{spread.p10:.4g}, {spread.p90:.4g}]"
