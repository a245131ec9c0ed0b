"""The record of a probe of an ATOM card: what it is good for, and what of it is taken as shown."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace as other
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.engine.atom.artifact import digest_of
from headrace.engine.atom.record import (
    RECORD_VERSION,
    Record,
    Verified,
    how_to_make,
    path_of,
    verified,
)
from headrace.engine.atom.sdk import Sdk
from headrace.engine.records import Finding, write
from headrace.errors import BackendUnavailable, Refused

NAMES = {0: "RBLN-CA25", 1: "RBLN-CA25", 2: "RBLN-CA22"}
REBEL = SimpleNamespace(get_npu_name=NAMES.get)
FAKE = Sdk("fake rebellions", REBEL, lambda *a: None, lambda n: None, {"rebel-compiler": "1"}, "3")
REAL = other(FAKE, name="rebellions")
NEWER = other(FAKE, versions={"rebel-compiler": "2"})
OTHER_DRIVER = other(FAKE, driver="4")
CARD = {"index": 0, "name": "RBLN-CA25"}
SLIDING = [{"geometry": "sliding, ...", "kind": "sliding", "rows": 16, "names": []}]

Steps = Mapping[str, Finding]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "/nonexistent")  # no rbln-smi
    return tmp_path / "cache"


@pytest.fixture
def compiled(tmp_path: Path) -> Path:
    return compile_into(tmp_path / "compiled")


def compile_into(directory: Path, text: str = "{}") -> Path:
    directory.mkdir()
    (directory / "rbln_config.json").write_text(text)
    (directory / "prefill.rbln").write_bytes(b"0123")
    for path in directory.iterdir():
        os.utime(path, ns=(1, 1))
    return directory


def finding(**facts: Any) -> Finding:
    return Finding(facts)


def good(**changed: Finding) -> dict[str, Finding]:
    """What is found where all is well, and what is not."""
    return {
        "calls": finding(_update_kv_cache=True, _fetch_kv_cache=True),
        "warm_up": finding(needed=False),
        "round_trip": finding(
            finite_changed={"declared": 0, "custom_float16": 9}, others_kept=True
        ),
        "number_format": finding(found="declared"),
        "sub_blocks": finding(works=True),
        "decode_places": finding(as_imported=True),
        "row_order": finding(order="by_position"),
        "logits": finding(near=True),
        "import_decodes": finding(identical=True, clearing_seen=True, own_repeatable=True),
        "reuse": finding(clears=False),
        **changed,
    }


def made(compiled: Path, findings: Steps | None = None, sdk: Sdk = FAKE, **more: Any) -> Record:
    told: dict[str, Any] = {
        "packages": dict(sdk.versions),
        "driver": sdk.driver,
        "card": CARD,
        "compiled": {"digest": digest_of(compiled), "caches": SLIDING},
        **more,
    }
    return Record(sdk=sdk.name, made="now", findings=dict(findings or good()), **told)


def refusal(compiled: Path, sdk: Sdk = FAKE, device: int = 0) -> BackendUnavailable:
    with pytest.raises(BackendUnavailable) as told:
        verified(sdk, device, compiled)
    assert (told.value.vendor, told.value.stage) == ("rebellions", "layout_unverified")
    return told.value


def place(compiled: Path, sdk: Sdk = FAKE, card: Mapping[str, Any] = CARD) -> Path:
    return path_of(sdk, card, digest_of(compiled))


def test_a_record_is_found_where_it_was_left(compiled: Path, cache: Path) -> None:
    path = place(compiled)
    assert path.is_relative_to(cache / "atom" / "records")
    write(made(compiled, checkpoint="sha256:1"), path)
    assert verified(FAKE, 0, compiled) == Verified("declared", True, False, False, "sha256:1")


def test_without_a_record_it_says_how_to_make_one(compiled: Path) -> None:
    exc = refusal(compiled)
    assert exc.detail == "there is no record for this card, driver, compiled model and packages"
    assert exc.hint == f"Run: headrace atom probe --model CHECKPOINT --compiled {compiled}"
    assert exc.probe == str(place(compiled))
    assert refusal(compiled, device=1).hint == f"{exc.hint} --device 1"


ANOTHER: list[tuple[Sdk, int]] = [(NEWER, 0), (REAL, 0), (OTHER_DRIVER, 0), (FAKE, 1), (FAKE, 2)]


@pytest.mark.parametrize(("sdk", "device"), ANOTHER)
def test_a_record_is_good_for_one_card_its_driver_and_its_packages(
    compiled: Path, sdk: Sdk, device: int
) -> None:
    """Also where it was put in the place of another's; a fake's is good for no card."""
    record = made(compiled)
    write(record, place(compiled))
    assert "there is no record" in refusal(compiled, sdk, device).detail
    write(record, place(compiled, sdk, {"index": device, "name": NAMES[device]}))
    assert refusal(compiled, sdk, device).detail in (
        "the record was made by other packages or another driver",
        "the record is of another card or another compiled model",
    )


@pytest.mark.parametrize("change", ["rbln_config.json", "prefill.rbln", "new.rbln"])
def test_a_record_is_good_for_one_compiled_model(
    compiled: Path, tmp_path: Path, change: str
) -> None:
    write(made(compiled), place(compiled))
    same = compile_into(tmp_path / "moved")
    assert verified(FAKE, 0, same).number_format == "declared"
    before = made(compiled)
    (compiled / change).write_bytes(b"4321")
    assert "there is no record" in refusal(compiled).detail
    write(before, place(compiled))
    assert "another compiled model" in refusal(compiled).detail


def test_a_card_goes_by_its_place_and_by_its_number_only_without_one(compiled: Path) -> None:
    named = {"index": 0, "name": "RBLN-CA25", "bus_id": "0000:01:00.0"}
    digest = digest_of(compiled)
    assert path_of(REAL, named, digest) == path_of(REAL, {**named, "index": 3}, digest)
    assert path_of(REAL, named, digest) != path_of(REAL, {**named, "bus_id": "2"}, digest)
    assert path_of(REAL, named, digest) != path_of(REAL, CARD, digest)
    assert path_of(REAL, CARD, digest) != path_of(REAL, {**CARD, "index": 1}, digest)


def test_what_cannot_be_looked_at_is_told(compiled: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"holds no rbln_config\.json"):
        verified(FAKE, 0, tmp_path)
    with pytest.raises(BackendUnavailable, match=r"no_device: rebel\.get_npu_name\(9\)"):
        verified(FAKE, 9, compiled)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"sdk": "fake rebellions"', "\udcff"])
def test_what_is_no_record_is_told(compiled: Path, text: str) -> None:
    path = place(compiled)
    path.parent.mkdir(parents=True)
    path.write_text(text, errors="surrogateescape")
    exc = refusal(compiled)
    assert "is no record of a probe" in exc.detail
    assert exc.hint == how_to_make(compiled, 0)


def test_a_record_of_another_form_is_none(compiled: Path) -> None:
    write(made(compiled, version=RECORD_VERSION + 1), place(compiled))
    assert refusal(compiled).detail == "the record was made by other packages or another driver"


@pytest.mark.parametrize(
    ("changed", "want"),
    [
        ({}, Verified("declared", True, False, False)),
        ({"warm_up": finding(needed=True)}, Verified("declared", True, False, True)),
        ({"sub_blocks": finding(works=False)}, Verified("declared", False, False, False)),
        ({"sub_blocks": Finding({"works": True}, "no")}, Verified("declared", False, False, False)),
        ({"reuse": finding(clears=True)}, Verified("declared", True, True, False)),
        ({"reuse": Finding(error="no")}, Verified("declared", True, True, False)),
        ({"reuse": finding(clears=0)}, Verified("declared", True, True, False)),
        (
            {
                "number_format": finding(found="custom_float16"),
                "round_trip": finding(finite_changed={"custom_float16": 0}, others_kept=True),
            },
            Verified("custom_float16", True, False, False),
        ),
        (
            {
                "round_trip": finding(
                    finite_changed={"declared": 3}, others_kept=True, converted=True
                ),
            },
            Verified("converted", True, False, False),
        ),
    ],
)
def test_what_was_found_is_what_is_relied_on(
    compiled: Path, changed: dict[str, Finding], want: Verified
) -> None:
    """Where nothing was found, the way that is always right is taken."""
    write(made(compiled, good(**changed)), place(compiled))
    assert verified(FAKE, 0, compiled) == want


@pytest.mark.parametrize(
    ("step", "finding", "said"),
    [
        ("calls", finding(_update_kv_cache=True), "the runtime has no _fetch_kv_cache"),
        ("calls", Finding(error="it broke"), "the compiled model was not opened: it broke"),
        ("warm_up", finding(needed=None), "no block came back as it was sent"),
        ("warm_up", Finding(error="it broke"), "after the card had computed: it broke"),
        ("number_format", finding(found=None), "in which numbers the card keeps a cache"),
        ("number_format", finding(found="float8"), "in which numbers the card keeps a cache"),
        (
            "round_trip",
            finding(finite_changed={"declared": 3}),
            "3 finite values came back changed",
        ),
        ("round_trip", finding(finite_changed={"custom_float16": 0}), "not found whether values"),
        ("round_trip", finding(finite_changed={"declared": 0}), "changed more than its block"),
        (
            "round_trip",
            finding(finite_changed={"declared": 3}, converted=True),
            "changed more than its block",
        ),
        ("round_trip", Finding(error="it broke"), "come back as they were sent: it broke"),
        (
            "decode_places",
            finding(as_imported=False, elsewhere="position 9 is not there"),
            "elsewhere than an import would: position 9 is not there",
        ),
        ("decode_places", Finding(error="it broke"), "it was not found where it is: it broke"),
        ("row_order", finding(order="turned by 8 of 16 rows"), "but turned by 8 of 16 rows"),
        ("row_order", finding(), "not found in the order of positions, but unknown"),
        ("logits", finding(near=False), "compiled from another one"),
        ("logits", Finding(error="it broke"), "computes the checkpoint's logits: it broke"),
        ("import_decodes", finding(identical=False), "was not found to decode to the bits"),
        ("import_decodes", finding(identical=True), "was not found to decode to the bits"),
        (
            "import_decodes",
            finding(clearing_seen=False, identical=True),
            "decodes as if it was not",
        ),
        ("import_decodes", finding(own_repeatable=False), "not the same twice"),
        ("import_decodes", Finding({"identical": True, "clearing_seen": True}, "no"), "bits"),
    ],
)
def test_what_was_not_found_to_hold_is_refused_with_its_step(
    compiled: Path, step: str, finding: Finding, said: str
) -> None:
    for findings in (good(**{step: finding}), good()):
        if findings == good():
            del findings[step]  # a step that was not taken is as good as one that failed
            said = ""
        write(made(compiled, findings), place(compiled))
        exc = refusal(compiled)
        assert exc.detail.startswith(f"step {step}: ")
        assert said in exc.detail


@pytest.mark.parametrize(
    ("sizes", "held"),
    [
        (finding(told=False), True),
        (finding(told=True, agrees=True), True),
        (Finding(error="it broke"), True),  # a round trip tells all the same
        (finding(told=True, agrees=False, first="9 bytes of past_key_values_0"), False),
    ],
)
def test_a_cache_of_other_bytes_than_its_mirror_is_refused(
    compiled: Path, sizes: Finding, held: bool
) -> None:
    write(made(compiled, good(sizes=sizes)), place(compiled))
    if held:
        assert verified(FAKE, 0, compiled).number_format == "declared"
    else:
        detail = refusal(compiled).detail
        assert detail.startswith("step sizes: ")
        assert detail.endswith(": 9 bytes of past_key_values_0")


def test_a_format_that_is_unknown_is_made_known_by_a_checkpoint(compiled: Path) -> None:
    no_reference = Finding(error="no reference was given")
    write(made(compiled, good(number_format=no_reference)), place(compiled))
    exc = refusal(compiled)
    assert exc.detail.endswith(": no reference was given")
    assert exc.hint == how_to_make(compiled, 0)


def test_what_a_probe_died_in_is_told_unless_what_is_needed_was_found_before(
    compiled: Path,
) -> None:
    write(made(compiled, unfinished="costs"), place(compiled))
    assert verified(FAKE, 0, compiled).sub_blocks
    findings = good()
    del findings["import_decodes"]
    write(made(compiled, findings, unfinished="import_decodes"), place(compiled))
    assert refusal(compiled).detail == "the probe died in its step 'import_decodes'"
