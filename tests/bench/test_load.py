"""`bench load` at smoke size: serving rows, and every arm beside neighbours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.backends.base import Entry
from headrace.backends.null import NullDecoder, decoder_like
from headrace.backends.replay import ReplayEngine, ReplayOptions
from headrace.bench import load, paced
from headrace.bench.discarding import DiscardingDecoder
from headrace.bench.load import Setting
from headrace.bench.load_table import serving_lines, token_lines
from headrace.bench.neighbours import (
    ARMS,
    ARRIVAL_ROUTES,
    ArrivalRoute,
    Arrivals,
    Neighbourhood,
    arms_of,
)
from headrace.bench.plots import draw
from headrace.bench.rows import RowFile
from headrace.bench.stand import RequestFailed
from headrace.cli import run_command
from headrace.errors import LocalProtocolError, Refused
from headrace.plan import Plan, compile_plan
from headrace.runtime.worker import SourceHandle
from tests.bench.test_load_table import serving_row, token_row
from tests.e2e.families import decoder_of, directory_of, hand_off, make_prompt, slot_view
from tests.e2e.families import options as options_for

MODEL = Setting(
    model="llama",
    directory=directory_of("llama"),
    rates_mb_s=(20.0,),
    in_flight=(2,),
    prompt=40,
    repeats=2,
    neighbours=(2,),
    import_prompt=64,
    blocks=2,
    block_s=0.05,
)


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


# The control arm.


def null_pair(num_tokens: int) -> tuple[DiscardingDecoder, NullDecoder, Plan]:
    manifest = ReplayEngine(ReplayOptions(layers=2, heads=1, head_dim=4)).manifest()
    inner = NullDecoder(decoder_like(manifest), context=num_tokens, lanes=2)
    plan = compile_plan(inner.manifest(), "head_major", num_tokens, num_tokens)
    return DiscardingDecoder(inner), inner, plan


def test_what_was_discarded_is_never_published() -> None:
    decoder, inner, plan = null_pair(8)
    slot = slot_view(memoryview(bytearray(b"\x07" * plan.slot.nbytes)), plan.layout)
    copies = plan.copies(plan.whole())
    decoder.discarding = True
    hollow = decoder.reserve(8)
    assert decoder.begin_import(hollow, slot, copies).done()
    assert decoder.discarded_nbytes == plan.nbytes
    assert decoder.num_hollow == 1
    assert not any(bytes(decoder.read(hollow, plan.layout, copies[0])))
    decoder.discarding = False
    assert decoder.begin_import(hollow, slot, copies).done()  # copied later, and hollow still
    with pytest.raises(LocalProtocolError, match="was to be published"):
        decoder.publish(hollow)
    decoder.free(hollow)
    assert decoder.num_hollow == 0

    real = decoder.reserve(8)
    assert decoder.begin_import(real, slot, copies).done()
    assert set(bytes(decoder.read(real, plan.layout, copies[0]))) == {7}
    entry = decoder.publish(real)
    assert isinstance(entry, Entry)
    assert decoder.statistics() == inner.statistics()
    with pytest.raises(LocalProtocolError, match="decodes nothing"):
        decoder.decode_step([(entry, 0)])
    decoder.free(entry)
    decoder.close()


# The paced source.


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_paced_source_feeds_a_real_decoder(family: str) -> None:
    decoder = decoder_of(family)
    num_tokens = 40
    options = paced.options_for(decoder.manifest(), num_tokens, 1e12)
    source = paced.open(json.loads(json.dumps(options)))
    assert source.manifest().model == decoder.manifest().model
    asked = options_for("streamed", num_tokens)
    sink, entry = hand_off(source, decoder, make_prompt(num_tokens), asked)
    try:
        assert sink.plan.nbytes == paced.kv_nbytes(decoder.manifest(), num_tokens)
        (logits,) = decoder.decode_step([(entry, 1)])
        assert torch.isfinite(torch.frombuffer(logits, dtype=torch.float32)).all()
    finally:
        decoder.free(entry)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_paced_numbers_are_the_same_ramp_in_every_dtype(dtype: str) -> None:
    numbers = bytearray(paced.ramp(dtype))
    ramp = torch.frombuffer(numbers, dtype=getattr(torch, dtype)).to(torch.float32)
    assert (ramp - torch.tensor(paced.ramp_values())).abs().max() < 0.01


def test_the_pace_follows_from_the_rate() -> None:
    manifest = decoder_of("llama").manifest()
    options = paced.options_for(manifest, 100, 1e6)
    nbytes = paced.kv_nbytes(manifest, 100)
    assert nbytes == 100 * sum(layer.row_nbytes for layer in manifest.layers)
    assert options["layer_ms"] == pytest.approx(nbytes / 1e6 * 1e3 / len(manifest.layers))


# Rows.


@pytest.mark.usefixtures("nothing_left")
def test_serving_rows_of_each_route(tmp_path: Path) -> None:
    setting = replace(MODEL, neighbours=())
    out = tmp_path / "load.jsonl"
    rows = list(load.run(setting, RowFile(out, load.CLAIM, load.KEY)))
    assert [row["route"] for row in rows] == [*load.ROUTES, *load.ROUTES[::-1]]
    for row in rows:
        assert row["requests"] == load.requests_of(2) == len(row["ttft_ns"]) == len(row["tail_ns"])
        assert row["requests_per_s"] > 0
        assert row["pairing"]["threads"] == 1
        assert min(row["ttft_ns"]) > min(row["prefill_ns"]) > 0
        assert len(row["choices"]) == (row["requests"] if row["route"] == "auto" else 0)
        assert bool(row["nth"]) == (row["route"] == "auto")
        assert row["kv_nbytes_per_s"] * row["elapsed_ns"] / 1e9 == pytest.approx(
            row["requests"] * paced.kv_nbytes(decoder_of("llama").manifest(), 40)
        )
    auto = [row for row in rows if row["route"] == "auto"]
    assert [row["nth"] for row in auto] == [1, 1 + load.requests_of(2)]
    assert "no prefill measured yet" in auto[0]["choices"][0]["reason"]
    again = RowFile(out, load.CLAIM, load.KEY, resume=True)
    assert list(load.run(setting, again)) == []


def test_auto_is_left_out_where_its_own_source_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = load._open_serving
    count = 0

    def one_fits(setting: Setting) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            raise Refused("no memory for another")
        return opened(setting)

    monkeypatch.setattr(load, "_open_serving", one_fits)
    setting = replace(MODEL, neighbours=(), in_flight=(1,), repeats=1, prompt=16, tokens=1)
    rows = list(load.run(setting, RowFile(None, load.CLAIM, load.KEY)))
    skipped = {row["route"]: row.get("skipped") for row in rows}
    assert skipped == {"whole": None, "streamed": None, "auto": "no memory for another"}
    assert [line.route for line in serving_lines(rows)] == ["whole", "streamed"]


@pytest.mark.usefixtures("nothing_left")
def test_token_rows_of_every_arm(tmp_path: Path) -> None:
    setting = replace(MODEL, in_flight=())
    out = tmp_path / "load.jsonl"
    rows = list(load.run(setting, RowFile(out, load.CLAIM, load.KEY)))
    assert [(row["block"], row["arm"], row["route"]) for row in rows] == arms_of()
    for row in rows:
        assert row["pairing"]["threads"] == 1
        assert len(row["gaps_ns"]) >= 2 * 4
        assert min(row["gaps_ns"]) > 0
        assert row["period_ns"] >= row["nominal_period_ns"] > 0
        assert (row["route"] is None) == (row["arm"] == "none")
        if row["arm"] == "none":
            assert (row["requests"], row["imported_nbytes"], row["chunks"]) == (0, 0, 0)
    for arm in ARMS:
        mine = [row for row in rows if (row["arm"], row["route"]) == arm]
        assert (sum(row["imported_nbytes"] for row in mine) > 0) == (arm != ("none", None))
    assert len({row["period_ns"] for row in rows if row["route"] == "whole"}) == 1
    assert {line.key.route for line in token_lines(rows)} == {"streamed", "whole"}
    cut = out.read_text().splitlines(keepends=True)[:-2]
    out.write_text("".join(cut))
    again = RowFile(out, load.CLAIM, load.KEY, resume=True)
    missing = list(load.run(setting, again))
    assert [(row["block"], row["arm"], row["route"]) for row in missing] == arms_of()[-2:]


def test_the_torch_source_is_not_paced() -> None:
    setting = replace(MODEL, source="torch", neighbours=(), repeats=1, prompt=16, tokens=1)
    rows = list(load.run(setting, RowFile(None, load.CLAIM, load.KEY)))
    assert {(row["source"], row["rate_mb_s"]) for row in rows} == {("torch", 0.0)}
    assert setting.seconds() > 0


class Beside:
    """A stand of a tiny model with a source of its own, for neighbours."""

    def __init__(self) -> None:
        self.decoder = DiscardingDecoder(load._decoder_beside(MODEL))
        manifest = self.decoder.manifest()
        source = load._paced(manifest, 64, 20.0)
        self.stand = load._stand(source, self.decoder, MODEL.context)
        self.near = Neighbourhood(
            self.stand, self.decoder, make_prompt(64), context=MODEL.context, block_s=0.01
        )


@pytest.fixture(scope="module")
def beside() -> Iterator[Beside]:
    made = Beside()
    yield made
    made.stand.close()


def test_nothing_that_is_imported_beside_neighbours_is_published(beside: Beside) -> None:
    published = 0
    publish = beside.decoder.publish

    def counted(reservation: Any) -> Entry:
        nonlocal published
        published += 1
        return publish(reservation)

    beside.decoder.publish = counted  # type: ignore[method-assign]
    try:
        with beside.near.decoding(1):
            periods_ns = {
                route: beside.near.carried_period_ns(1, route) for route in ARRIVAL_ROUTES
            }
            assert min(periods_ns.values()) > 1
            for arm, route in ARMS:
                beside.near.block(arm, periods_ns.get(route, 1) if route else 1, route)
                assert not beside.decoder.discarding
    finally:
        del beside.decoder.publish
    assert published == 1  # the neighbour
    assert beside.decoder.discarded_nbytes > 0
    assert beside.decoder.num_hollow == 0


def test_an_arrival_that_was_published_is_an_error(beside: Beside) -> None:
    owner = beside.stand.owner
    arrivals = Arrivals(owner, make_prompt(8), 0)
    arrivals.act()
    arrivals._stopped = True  # so that nobody withdraws it
    while not owner.idle:
        owner.turn(0.05)
    with pytest.raises(LocalProtocolError, match="must not be published finished"):
        arrivals.check()


@pytest.mark.parametrize("route", ARRIVAL_ROUTES)
def test_arrivals_wait_for_the_one_before(beside: Beside, route: ArrivalRoute) -> None:
    owner = beside.stand.owner
    arrivals = Arrivals(owner, make_prompt(64), 1, route)  # due again at once
    while arrivals.completed < 3:
        arrivals.act()
        owner.turn(0.05)
    arrivals.stop()
    owner.drain()
    arrivals.check()
    counts = arrivals.counts()
    assert counts["late"] >= (route == "streamed")  # whole, one turn may end it
    assert counts["imported_nbytes"] >= 3 * paced.kv_nbytes(beside.decoder.manifest(), 64)


def test_a_neighbour_that_ends_ends_the_run(beside: Beside) -> None:
    short = Neighbourhood(beside.stand, beside.decoder, make_prompt(64), context=35, block_s=10.0)
    with pytest.raises(RequestFailed, match="a neighbour finished early"), short.decoding(1):
        short.block("none", 1)
    assert beside.stand.owner.idle


def test_a_stand_that_cannot_be_made_leaves_nothing(nothing_left: None) -> None:
    source = SourceHandle("replay", {"layers": 2})
    with pytest.raises(Refused):
        load._stand(source, load._decoder_beside(MODEL), MODEL.context)


def test_prompts_that_the_model_does_not_hold_are_refused() -> None:
    MODEL.check()
    with pytest.raises(Refused, match="llama holds 512 positions"):
        replace(MODEL, prompt=500).check()
    with pytest.raises(Refused, match="ask for shorter prompts"):
        replace(MODEL, import_prompt=500).check()
    replace(MODEL, prompt=500, in_flight=()).check()


# The command.


def test_the_command_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "load.jsonl"
    same = {"tokens": 4, "prompt": 16, "import_prompt": 512, "block_s": 1.0}
    file = RowFile(out, load.CLAIM, load.KEY, settings=same)
    for arm, arrivals in (*ARMS, *ARMS):
        row = token_row(arm, 0, [1, 2], route=arrivals or "")
        file.append({**row, "source": "paced"})
    for route in load.ROUTES:
        file.append({**serving_row(route, 0, [1]), "model": directory_of("llama").name})
    small = ["--model", str(directory_of("llama")), "--in-flight", "1", "--prompt", "16"]
    small += ["--repeats", "1", "--empty-neighbours", "--rates-mb-s", "50", "--resume"]
    assert run_command(["bench", "load", *small, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "minutes from the start" in said
    assert "serving, repeat 0" in said
    assert "goals met" in said
    other = [*small, "--block-s", "2", "--out", str(out)]
    assert run_command(["bench", "load", *other]) == 2
    assert "was measured with block_s 1.0 and this run has 2.0" in capsys.readouterr().err
    draw(out, tmp_path / "load.svg")
    drawn = (tmp_path / "load.svg").read_text()
    for text in ("requests in flight", "token time, mean, ratio", "real to none, 100 MB/s, whole"):
        assert text in drawn


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--empty-in-flight", "--empty-neighbours"], "are both empty"),
        (["--in-flight", "0"], "--in-flight is 0"),
        (["--neighbours", "65"], "--neighbours is 65"),
        (["--empty-rates-mb-s"], "--rates-mb-s is empty"),
        (["--rates-mb-s", "inf"], "--rates-mb-s is inf"),
        (["--tokens", "0"], "--tokens is 0"),
        (["--blocks", "0"], "--blocks is 0"),
        (["--block-s", "0"], "--block-s is 0"),
        (["--out", "/tmp"], "/tmp is a directory"),
        (["--model", "no-such-model"], "no model 'no-such-model'"),
        (["--model", str(directory_of("llama")), "--prompt", "500"], "holds 512 positions"),
    ],
)
def test_a_mistake_is_told_before_anything_is_measured(
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load, "run", None)
    assert run_command(["bench", "load", *arguments]) == 2
    complaint = capsys.readouterr().err
    assert sentence in complaint
    assert complaint.count("\n") == 1
