"""A probe of an ATOM card: what it finds on fakes that differ, and what its record comes to."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.engine import records
from headrace.engine.atom import probe as probing
from headrace.engine.atom import prompts, record
from headrace.engine.atom.probe_steps import LOADS, STEPS, Step
from headrace.engine.atom.prompts import Reference
from headrace.engine.atom.record import Record, Verified
from headrace.errors import Refused
from headrace.testing.atom_records import OPEN, recorded, reference_of
from headrace.testing.fake_rebellions import PRIVATE_CALLS, FakeRebellions, compile_fake
from tests.e2e.families import directory_of
from tests.unit.engine.atom.wrong_cards import (
    PARTITION,
    Compile,
    compiling,
    found,
    probe,
    refusal,
)

NAMES = [LOADS.name, *(step.name for step in STEPS)]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    return compiling(tmp_path_factory.mktemp("compiled"))


def test_every_step_finds_facts_and_a_decoder_takes_the_record(
    compiled: Compile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, reference = compiled("gemma3"), tmp_path / "reference.npz"
    prompts.write(reference_of(directory), reference)
    assert probing.main([f"--compiled={directory}", f"--reference={reference}", "--sdk", OPEN]) == 0
    printed, said = capsys.readouterr()
    made = records.read(Path(printed.strip()), Record)
    assert list(made.findings) == NAMES
    assert [step for step, each in made.findings.items() if each.error or not each.facts] == []
    assert (made.sdk, made.packages, made.driver) == (
        "fake rebellions",
        {"fake-rebellions": "1"},
        "fake",
    )
    assert made.card == {"index": 0, "name": "RBLN-CA25"}
    assert made.compiled["directory"] == directory.name
    assert [
        (each["kind"], each["rows"], len(each["names"])) for each in made.compiled["caches"]
    ] == [
        ("sliding", 16, 4),
        ("full", PARTITION, 4),
    ]
    assert made.checkpoint == reference_of(directory).checkpoint
    steps = [line.removeprefix("probe: ") for line in said.splitlines()]
    assert [line for line in steps if line in NAMES] == NAMES
    sdk = FakeRebellions().sdk()
    assert record.verified(sdk, 0, directory) == found(made)
    assert found(made) == Verified("declared", False, False, False, made.checkpoint)


@pytest.mark.parametrize(
    ("family", "dtype", "knobs", "want"),
    [
        ("llama", "float32", {}, ("declared", False, False, False)),
        ("mistral", "bfloat16", {}, ("declared", False, False, False)),
        ("gemma4", "float16", {"sub_blocks": True}, ("declared", True, False, False)),
        (
            "gemma3",
            "float32",
            {"number_format": "custom_float16"},
            ("custom_float16", False, False, False),
        ),
        (
            "llama",
            "bfloat16",
            {"number_format": "custom_float16", "sub_blocks": True},
            ("custom_float16", True, False, False),
        ),
        (
            "llama",
            "float16",
            {"number_format": "custom_float16"},
            ("custom_float16", False, False, False),
        ),
        (
            "llama",
            "float16",
            {"number_format": "converted"},
            ("converted", False, False, False),
        ),
        (
            "gemma3",
            "float32",
            {"number_format": "converted", "leaks": True},
            ("converted", False, True, False),
        ),
        ("llama", "float32", {"needs_warm_up": "raises"}, ("declared", False, False, True)),
        ("llama", "float32", {"needs_warm_up": "loses"}, ("declared", False, False, True)),
        ("llama", "float32", {"leaks": True}, ("declared", False, True, False)),
        (
            "gemma3",
            "bfloat16",
            {"leaks": True, "sub_blocks": True},
            ("declared", True, True, False),
        ),
        ("llama", "float32", {"calls": PRIVATE_CALLS[:2]}, ("declared", False, False, False)),
    ],
)
def test_each_card_is_found_to_be_as_it_is(
    compiled: Compile, family: str, dtype: str, knobs: dict[str, Any], want: Any
) -> None:
    directory, fake = compiled(family, dtype), FakeRebellions(**knobs)
    made = probe(directory, fake)
    assert found(made) == replace(Verified(*want), checkpoint=made.checkpoint)
    assert fake.card.faults == []
    assert all(made.fact("import_decodes", name) for name in ("own_repeatable", "argmax_agrees"))
    assert made.fact("round_trip", "others_kept") is True


def test_a_whole_block_that_is_overwritten_needs_no_clearing(compiled: Compile) -> None:
    """One block has room for all of the lane, and an import writes all of it."""
    assert found(probe(compiled(flash=False), FakeRebellions(leaks=True))).clears is False
    leaky = FakeRebellions(leaks=True, sub_blocks=True)
    assert found(probe(compiled(flash=False), leaky)).clears is True


def test_all_patterns_are_sent_where_they_fit_and_no_two_blocks_are_alike(
    compiled: Compile, tmp_path: Path
) -> None:
    made = probe(compiled(dtype="bfloat16"))
    facts = made.findings["round_trip"].facts
    assert facts["elements"] == 8 * 4 * 2 * PARTITION * 16 == facts["patterns"]
    large = tmp_path / "large"
    compile_fake(directory_of("llama"), large, max_seq_len=512, dtype="bfloat16")
    facts = probe(large).findings["round_trip"].facts
    assert (facts["patterns"], facts["identical"]) == (1 << 16, True)


@pytest.mark.parametrize(
    ("family", "dtype", "knobs", "said"),
    [
        (
            "mistral",
            "float32",
            {"sliding": "ring"},
            "step decode_places: .* position 63 is not in row 15 of block 0 of past_key_values_0",
        ),
        ("gemma3", "float32", {"sliding": "ring"}, "step decode_places: .* is not in row 15 of "),
        # Nothing says that its prefill attends both ways.
        ("llama", "float32", {"bidirectional_prefill": True}, "step number_format: "),
        ("llama", "float32", {"calls": ()}, "step calls: .* no _update_kv_cache and no _fetch_kv_"),
        ("llama", "float32", {"calls": PRIVATE_CALLS[1:]}, "step calls: .* no _update_kv_cache$"),
        (
            "llama",
            "float32",
            # Nothing tells that a mirror has half of the bytes that are declared.
            {"number_format": "custom_float16", "calls": PRIVATE_CALLS[:2]},
            "step warm_up: no block came back",
        ),
    ],
)
def test_a_card_that_cannot_be_used_is_refused_with_its_step(
    compiled: Compile, family: str, dtype: str, knobs: dict[str, Any], said: str
) -> None:
    made = probe(compiled(family, dtype), FakeRebellions(**knobs))
    assert re.match(said, refusal(made))


@pytest.mark.parametrize("after", [0, 1, 30, 60])
def test_a_card_that_goes_stale_is_refused(compiled: Compile, after: int) -> None:
    """All calls return, and nothing is changed by them any more."""
    fake = FakeRebellions()
    fake.card.go_stale(after)
    assert refusal(probe(compiled(), fake)).startswith("step warm_up" if after == 0 else "step ")


def test_an_update_that_fails_is_an_error_of_its_step(compiled: Compile) -> None:
    fake = FakeRebellions()
    fake.card.fail_update(3)
    made = probe(compiled(), fake)
    assert "the transfer to the card failed" in made.findings["round_trip"].error
    assert refusal(made).startswith("step round_trip: it was not found whether values")


def test_without_a_reference_nothing_tells_the_formats_apart(compiled: Compile) -> None:
    made = probe(compiled(), reference=None)
    assert made.checkpoint == ""
    assert made.findings["round_trip"].error == ""
    assert "step number_format: " in refusal(made)
    assert "no reference was given" in refusal(made)


def test_a_reference_of_other_prompts_or_another_model_tells_nothing(compiled: Compile) -> None:
    right = reference_of(compiled())
    shuffled = Reference(right.checkpoint, right.tokens[::-1], right.states)
    assert "of other prompts" in refusal(probe(compiled(), reference=shuffled))
    turned = {key: states[:, ::-1].copy() for key, states in right.states.items()}
    other = Reference(right.checkpoint, right.tokens, turned)
    made = probe(compiled(), reference=other)
    assert made.fact("number_format", "distance")["declared"] > 0.5
    assert "in which numbers" in refusal(made)


@pytest.mark.parametrize("dies", NAMES)
def test_a_step_that_the_process_dies_in_is_named(
    compiled: Compile, monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    """In place of a record that was good."""
    directory, path = compiled(), recorded(compiled())
    assert record.verified(FakeRebellions().sdk(), 0, directory)

    def end(bench: Any) -> dict[str, Any]:
        raise SystemExit(9)

    monkeypatch.setattr(probing, "LOADS", Step("calls", end) if dies == "calls" else LOADS)
    steps = tuple(Step(step.name, end) if step.name == dies else step for step in STEPS)
    monkeypatch.setattr(probing, "STEPS", steps)
    with pytest.raises(SystemExit):
        probe(directory)
    left = records.read(path, Record)
    assert (left.unfinished, list(left.findings)) == (dies, NAMES[: NAMES.index(dies)])
    if dies in ("reuse", "costs"):
        assert found(left).clears is (dies == "reuse")
    else:
        assert refusal(left) == f"the probe died in its step {dies!r}"


def test_a_record_that_is_put_elsewhere_is_left_where_the_decoder_looks_too(
    compiled: Compile, tmp_path: Path
) -> None:
    out = tmp_path / "not" / "there.json"
    made = probe(compiled(), out=out)
    assert records.read(out, Record) == made
    assert record.verified(FakeRebellions().sdk(), 0, compiled()) == found(made)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--device=1"], "no_device: rebel.get_npu_name(1): it is None"),
        (["--compiled=/nonexistent"], "/nonexistent holds no rbln_config.json"),
        (["--compiled={cut}"], "rbln_config.json cannot be read: "),
        (["--compiled={part}"], "whose decoder is its part language_model, which is not"),
        (["--compiled={many}"], "was compiled for 2 cards, and one is supported"),
        (["--reference=/nonexistent"], "/nonexistent cannot be read: No such file"),
        (["--out=/dev/null/record"], "/dev/null/record cannot be written"),
    ],
)
def test_what_cannot_be_probed_leaves_no_record(
    compiled: Compile,
    cache: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    said: str,
) -> None:
    told = json.loads((compiled() / "rbln_config.json").read_text())
    other = {
        "cut": json.dumps(told)[:-9],
        "part": json.dumps({"cls_name": "x", "language_model": told}),
        "many": json.dumps({**told, "num_devices": 2}),
    }
    for name, text in other.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "rbln_config.json").write_text(text)
    more = [each.format(**{name: tmp_path / name for name in other}) for each in more]
    assert probing.main([f"--compiled={compiled()}", "--sdk", OPEN, *more]) == 2
    printed, told = capsys.readouterr()
    assert printed == ""
    assert said in told
    assert told.splitlines()[-1].startswith("headrace: ")
    assert not cache.exists()


@pytest.mark.parametrize("damaged", [None, "{", '{"fake": "of another"}'])
def test_a_compiled_model_that_cannot_be_loaded_is_no_fault_of_the_card(
    compiled: Compile, tmp_path: Path, capsys: pytest.CaptureFixture[str], damaged: str | None
) -> None:
    directory = tmp_path / "damaged"
    shutil.copytree(compiled(), directory)
    (directory / "fake.json").unlink()
    if damaged is not None:
        (directory / "fake.json").write_text(damaged)
    with pytest.raises(Refused, match="compile it again") as told:
        probing.probe(FakeRebellions().sdk(), 0, directory, None, say=lambda text: None)
    assert told.value.field == "compiled"
    assert probing.main([f"--compiled={directory}", "--sdk", OPEN]) == 2
    assert "no_device" not in capsys.readouterr().err


def test_without_the_vendors_packages_it_says_so(
    compiled: Compile, capsys: pytest.CaptureFixture[str]
) -> None:
    assert probing.main([f"--compiled={compiled()}"]) == 2
    printed, said = capsys.readouterr()
    assert printed == ""
    assert said.startswith("headrace: rebellions: sdk_missing: import: ModuleNotFoundError: ")
    assert len(said.splitlines()) == 1


def test_a_card_that_is_refused_ends_with_status_1_and_says_why(
    compiled: Compile, capsys: pytest.CaptureFixture[str]
) -> None:
    assert probing.main([f"--compiled={compiled()}", "--sdk", OPEN]) == 1
    printed, said = capsys.readouterr()
    assert Path(printed.strip()).is_file()
    last = said.splitlines()[-1]
    assert last.startswith("headrace: rebellions: layout_unverified: ")
    assert f"headrace atom probe --model CHECKPOINT --compiled {compiled()}" in last


def test_a_record_is_made_once_and_left_in_each_cache(
    compiled: Compile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = recorded(compiled())

    def never(*given: Any, **named: Any) -> None:
        raise AssertionError("it was probed again")

    monkeypatch.setattr("headrace.testing.atom_records.probe", never)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "another"))
    second = recorded(compiled())
    assert second != first
    assert records.read(second, Record) == records.read(first, Record)
    assert record.verified(FakeRebellions().sdk(), 0, compiled()).number_format == "declared"
