"""Kernels of which some arguments say where they lie become kernels of which all do."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.rngd.labels import PLACED, is_mixed, labelled
from headrace.engine.rngd.signature import read_signature

PLAIN = """\
def helper<A=2>(
    x: [A]/bf16
) -> [A]/bf16:
    return x
def kernel<T=4, V=6, W=8>(
    rows: [T, V]/bf16,
    ids: [T]/i32,
    T_AXIS: Axis
) -> [T, V]/bf16:
    assert T == 4
    T_AXIS: Axis = 4
    out: [T, V]/bf16 = tk.Some(
        %0 = read(rows)
    )
    return out
"""
HEAD = "dram([Broadcast] | [V @ W, T])/bf16 @ original=[V, T]"
MIXED = PLAIN.replace("    ids: [T]/i32,", f"    head: {HEAD},\n    ids: [T]/i32,")


def test_only_a_kernel_with_both_is_mixed() -> None:
    assert not is_mixed(PLAIN)
    assert labelled(PLAIN) == PLAIN
    assert is_mixed(MIXED)
    assert not is_mixed(labelled(MIXED))
    assert labelled(labelled(MIXED)) == labelled(MIXED)
    assert not is_mixed("no kernel")
    assert labelled("no kernel") == "no kernel"


def test_the_body_takes_what_was_placed_as_it_was_and_after_what_says_how_long_axes_are() -> None:
    assert labelled(MIXED) == MIXED.replace(
        "    rows: [T, V]/bf16,",
        f"    rows{PLACED}: dram([Broadcast] | [T, V])/bf16 @ original=[T, V],",
    ).replace(
        "    ids: [T]/i32,", f"    ids{PLACED}: dram([Broadcast] | [T])/i32 @ original=[T],"
    ).replace(
        "    T_AXIS: Axis = 4\n",
        "    T_AXIS: Axis = 4\n"
        f"    rows: [T, V]/bf16 = as_logical(rows{PLACED})\n"
        f"    ids: [T]/i32 = as_logical(ids{PLACED})\n",
    )


def test_a_kernel_that_is_nothing_but_facts_ends_with_what_is_placed() -> None:
    bare = MIXED[: MIXED.index("    out:")].rstrip("\n")
    assert labelled(bare).endswith(f"\n    ids: [T]/i32 = as_logical(ids{PLACED})")


def test_shapes_stay() -> None:
    before, after = read_signature(MIXED), read_signature(labelled(MIXED))
    assert [each.shape for each in before.arguments] == [each.shape for each in after.arguments]
    assert [each.padded for each in before.arguments] == [each.padded for each in after.arguments]
    assert before.results == after.results
    assert [each.name.removesuffix(PLACED) for each in after.arguments] == ["rows", "head", "ids"]


ONE_CHIP, FOUR_CHIPS = ("llama", "qwen3"), ("exaone4", "gemma4")


def looked_at(python: str, asked: str, directory: Path, families: Sequence[str]) -> list[Any]:
    """See `label_small`."""
    checkpoints = pytest.importorskip("tests.rngd_checkpoints")
    models = [str(checkpoints.make_checkpoint(each, directory).kernels) for each in families]
    command = [python, "-m", "tests.unit.engine.rngd.label_small", asked, *models]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.rngd_emulation
def test_the_installed_compiler_takes_every_kernel_of_one_chip(
    rngd_python: str, tmp_path: Path
) -> None:
    found = looked_at(rngd_python, "taken", tmp_path, ONE_CHIP)
    assert [name for _, name, _, taken in found if not taken] == []
    assert {directory for directory, _, mixed, _ in found if mixed} == {"llama-bf16", "qwen3-fp8"}


@pytest.mark.rngd_emulation
def test_the_installed_compiler_takes_no_kernel_that_writes_a_cache_of_four_chips(
    rngd_python: str, tmp_path: Path
) -> None:
    """So these families are emulated only. Where this fails, a later compiler may take them."""
    found = looked_at(rngd_python, "taken", tmp_path, FOUR_CHIPS)
    names = [name for _, name, _, _ in found]
    writing = [name for name in names if "attention" not in name and "last" not in name]
    assert [name for _, name, _, taken in found if not taken] == writing
    assert len(writing) >= 6


@pytest.mark.rngd_emulation
def test_a_labelled_kernel_gives_the_same_bits(rngd_python: str, tmp_path: Path) -> None:
    found = looked_at(rngd_python, "equal", tmp_path, ONE_CHIP + FOUR_CHIPS)
    equal = [equal for _, _, _, equal in found if equal is not None]
    assert len(equal) >= 4
    assert all(equal)
