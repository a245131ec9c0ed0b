"""`headrace bench rngd`: how distances are bounded, and a small run on the real kernels."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.bench import rngd
from headrace.bench.rngd_states import (
    FACTOR,
    FEW,
    LOGITS_FACTOR,
    SHARE,
    Distance,
    OverBound,
    Prefilled,
    States,
    check_bound,
    distance,
    of_part,
)
from headrace.bench.rows import read_rows
from headrace.cli.bench.rngd import rngd_command
from headrace.errors import BackendUnavailable, Refused
from headrace.geometry import Full, Layer, Manifest, Part
from headrace.plan import compile_plan
from headrace.runtime.requests import Request, RequestOptions
from tests.rngd_checkpoints import checkpoint_of

LONG = 40


def states(num_positions: int = LONG, *, seed: int = 0, off: float = 0.0) -> States:
    """Random numbers of two layers; `off`: the size of what is added to each, which is random."""
    draw = torch.Generator().manual_seed(0)
    added = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        wanted = torch.randn(*shape, generator=draw)
        return wanted + off * torch.randn(*shape, generator=added)

    cells = {(layer, part): numbers(num_positions, 2, 8) for layer in (0, 1) for part in (0, 1)}
    return States(cells, numbers(300))


def changed(found: States, key: tuple[int, int], by: torch.Tensor) -> States:
    return States({**found.cells, key: by}, found.logits)


def test_a_distance_is_the_largest_and_the_rms() -> None:
    one, other = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 2.0, 3.0, 2.0])
    assert distance(one, other) == Distance(2.0, 1.0)


def test_a_part_is_that_of_all_layers() -> None:
    exact = states()
    moved = changed(exact, (1, 0), exact.cells[1, 0] + 2.0)
    assert of_part(moved, exact, 1) == (0.0, 0.0)
    assert of_part(moved, exact, 0).max == pytest.approx(2.0, rel=1e-5)
    assert of_part(moved, exact, 0).rms == pytest.approx(2.0**0.5, rel=1e-5)


def test_what_rounds_as_torch_does_is_within_the_bound() -> None:
    exact, rounded = states(), states(seed=1, off=0.01)
    check_bound(states(seed=2, off=0.01), rounded, exact)
    check_bound(states(seed=2, off=0.01 * (FACTOR - 1)), rounded, exact)
    check_bound(exact, rounded, exact)


@pytest.mark.parametrize("key", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_each_layer_and_part_is_bounded_alone(key: tuple[int, int]) -> None:
    exact, rounded, good = states(), states(seed=1, off=0.01), states(seed=2, off=0.01)
    off = states(seed=3, off=0.01 * (FACTOR + 1)).cells[key]
    with pytest.raises(OverBound, match=f"layer {key[0]} {'KV'[key[1]]}, rms"):
        check_bound(changed(good, key, off), rounded, exact)


def test_a_single_number_that_is_far_off_is_seen() -> None:
    exact, rounded, good = states(), states(seed=1, off=0.01), states(seed=2, off=0.01)
    spoilt = good.cells[1, 0].clone()
    spoilt[3, 1, 2] += 0.15
    with pytest.raises(OverBound, match="K, the largest difference"):
        check_bound(changed(good, (1, 0), spoilt), rounded, exact)


def test_logits_are_bounded() -> None:
    exact, rounded, good = states(), states(seed=1, off=0.01), states(seed=2, off=0.01)
    off = exact.logits + 0.01 * (LOGITS_FACTOR + 1)
    with pytest.raises(OverBound, match="logits, rms"):
        check_bound(States(good.cells, off), rounded, exact)


@pytest.mark.parametrize(("num_positions", "quantised"), [(FEW - 1, False), (LONG, True)])
def test_few_positions_and_8_bit_weights_are_bounded_by_a_share(
    num_positions: int, quantised: bool
) -> None:
    exact, rounded = states(num_positions), states(num_positions, seed=1, off=1e-6)
    near = states(num_positions, seed=2, off=SHARE * 0.8)
    far = states(num_positions, seed=2, off=SHARE * 1.4)
    check_bound(near, rounded, exact, quantised=quantised)
    with pytest.raises(OverBound, match="layer 0 K, rms"):
        check_bound(far, rounded, exact, quantised=quantised)


@pytest.mark.parametrize("num_positions", [2, LONG])
def test_what_is_no_number_is_over_every_bound(num_positions: int) -> None:
    exact, rounded = states(num_positions), states(num_positions, seed=1, off=0.01)
    poisoned = changed(rounded, (1, 1), rounded.cells[1, 1] * torch.nan)
    with pytest.raises(OverBound, match="layer 1 V"):
        check_bound(poisoned, rounded, exact)


@pytest.mark.parametrize("layout", ["head_major", "token_major"])
def test_bytes_become_the_same_numbers_in_either_layout(layout: Any) -> None:
    parts = (Part("k", 2, 4, "bfloat16"), Part("v", 2, 4, "bfloat16"))
    layers = (Layer(0, "layers.0", Full(), parts),)
    manifest = Manifest("decoder", "m", layers, ("token_major", "head_major"), 3, "float32", 16)
    plan = compile_plan(manifest, layout, 5, 16)
    numbers = torch.arange(40.0).reshape(5, 2, 4)
    placed = numbers if layout == "token_major" else numbers.transpose(0, 1)
    raw = placed.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()
    row = torch.tensor([1.0, 2.0, 3.0])
    request = Request(None, 5, RequestOptions())  # type: ignore[arg-type]
    got = Prefilled(plan, {(0, 0): raw, (0, 1): raw}, row.numpy().tobytes(), request)
    assert torch.equal(got.states().cells[0, 1], numbers)
    assert torch.equal(got.states().logits, row)
    assert got.same_bytes(got)
    assert not got.same_bytes(Prefilled(plan, got.cells, bytes(12), request))
    assert not got.same_bytes(Prefilled(plan, {(0, 0): raw}, got.logits, request))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"lengths": ()}, "--lengths is empty"),
        ({"lengths": (3, 3)}, "names a number twice"),
        ({"token_buckets": (0,)}, "--token-buckets"),
        ({"groups": (0,)}, "--groups"),
        ({"repeats": 0}, "--repeats"),
        ({"prefill_chunk": -1}, "--prefill-chunk"),
        ({"lengths": (513,)}, "holds 512 positions"),
        ({"resume": True}, "--resume goes on with"),
    ],
)
def test_what_makes_no_sense_is_refused(asked: dict[str, Any], said: str) -> None:
    model = str(checkpoint_of("llama").kernels)
    with pytest.raises(Refused, match=said):
        rngd_command(**{"model": model, "source_python": sys.executable, **asked})


def test_without_an_environment_it_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HEADRACE_RNGD_PYTHON", raising=False)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    with pytest.raises(BackendUnavailable, match="headrace rngd setup"):
        rngd_command(model="smollm2-135m")


@pytest.mark.rngd_emulation
def test_a_small_run(rngd_python: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On real kernels; gone on with, it measures only what is not there."""
    out = tmp_path / "rows.jsonl"
    asked: dict[str, Any] = {
        "model": str(checkpoint_of("llama").kernels),
        "token_buckets": (16, 32),
        "groups": (1, 3),
        "repeats": 2,
        "source_python": rngd_python,
        "out": out,
    }
    assert rngd_command(lengths=(33,), **asked) == 0
    assert rngd_command(lengths=(1, 33), resume=True, **asked) == 0
    assert asked["model"] not in out.read_text(), "a place of this machine"
    rows = read_rows(out)
    assert [row["prompt_tokens"] for row in rows] == [33, 1]
    for row in rows:
        assert row["runs_equal"]
        assert row["within_bound"]
        assert row["runs"] == 1 + 2 + 2 + 2
        assert len(row["stages_ns"]) == 2
        assert all(took > 0 for each in rngd.stage_ms(row).values() for took in each)
        for group in row["groups"]:
            assert group["messages"] == len(group["ahead_ns"])
            assert group["before_logits"] >= group["messages"] - 1
    stamps = [json.loads(line) for line in out.read_text().splitlines() if '"stamp"' in line]
    assert [stamp["claim"] for stamp in stamps] == [rngd.CLAIM] * 2
    titles = [line for line in capsys.readouterr().out.splitlines() if "CPU" in line]
    assert len(titles) == 8
    assert all("Emulated" in title for title in titles)
