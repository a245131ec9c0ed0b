"""The docs say what is there: their code runs, their links and references lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import headrace
from headrace.ids import AttemptId, SlotIndex
from headrace.protocol.commands import Command
from headrace.protocol.handoff import Handoff, HandoffEvent, HandoffState
from headrace.protocol.slots import Slot
from headrace.protocol.source import SourceState
from headrace.testing import diagrams
from headrace.testing.conformance_decoder import DecoderConformance
from headrace.testing.conformance_engine import PrefillEngineConformance
from tests.docs.reading import (
    DOCS,
    PACKAGE,
    PAGES,
    ROOT,
    anchors,
    blocks,
    code_spans,
    links,
    prose,
    section,
    unresolved,
)

LIFECYCLE = ROOT / "docs" / "lifecycle.md"
GLOSSARY = ROOT / "docs" / "glossary.md"
ADOPT = ROOT / "docs" / "adopt.md"
BACKENDS = ROOT / "docs" / "add-a-backend.md"
RUN_SECONDS = 60

BLOCKED = ("torch", "numpy", "transformers")
MSGSPEC_ALONE = ["adopt.md"]  # pages that say that they need no other package

TERMS = """
source; decoder; owner; layer group; cache group; manifest; plan; transfer set; span;
progress message; coverage; slab; slot; generation; lease; attempt; reservation; lane; admission;
parked; import; fence; source-final time; publish; drain; quarantine; transfer tail; hidden share;
route; transfer chunk; prefill chunk
"""

ELSEWHERE = {  # names of others that the docs use
    "Future.cancel()",
    "INTERPRETER",
    "None",
    "PYTHONPATH",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
}

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
by_doc = pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)


def run_page(page: Path, directory: Path, *arguments: str) -> str:
    """Write the files of a page into `directory`, then run Python there; what it printed."""
    for block in blocks(page):
        if block.file is not None:
            (directory / block.file).write_text(block.code, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(directory)])}
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=directory,
        env=env,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name
)
def test_code_of_a_page_runs_as_written(page: Path, tmp_path: Path) -> None:
    script = ["import sys"]
    if page.name in MSGSPEC_ALONE:
        script.append(f"sys.modules.update(dict.fromkeys({BLOCKED}))")
    for block in blocks(page):
        if block.file is None:
            code = "\n" * block.line + block.code  # so that a traceback tells the page's line
            script.append(f"exec(compile({code!r}, {str(page)!r}, 'exec'))")
    run_page(page, tmp_path, "-c", "\n".join(script))


def test_worked_backends_conform(tmp_path: Path) -> None:
    """The page's own subclasses run every check of both suites."""
    said = run_page(BACKENDS, tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    suites = (PrefillEngineConformance, PrefillEngineConformance, DecoderConformance)
    checks = sum(name.startswith("test_") for suite in suites for name in vars(suite))
    assert f"{checks} passed" in said


@by_page
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in links(page):
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(there), f"{page.name}: {target}"


@by_doc
def test_references_to_code_resolve(page: Path) -> None:
    spans = set(code_spans(page)) - ELSEWHERE
    assert {span: why for span in sorted(spans) if (why := unresolved(span))} == {}


@pytest.mark.parametrize(
    "reference",
    [
        "protocol/nothing.py",
        "protocol/slots.py:Slot.nothing",
        "protocol/slots.py:Nothing",
        "headrace.nothing",
        "headrace.plan.Nothing",
        "Slot.nothing",
        "Nothing",
        "docs/nothing.md",
    ],
)
def test_a_reference_that_leads_nowhere_is_seen(reference: str) -> None:
    assert unresolved(reference)


@pytest.mark.parametrize(
    "reference",
    [
        "protocol/slots.py:Slot.generation",
        "headrace.plan.Plan.windows",
        "headrace.DecoderOwner",
        "SlotState.FREE",
        "docs/lifecycle.md",
        "tests/",
        "--route streamed",
        "numpy",
    ],
)
def test_a_reference_that_leads_somewhere_passes(reference: str) -> None:
    assert unresolved(reference) is None


def test_glossary_has_every_word_once_with_what_carries_it() -> None:
    rows = [line.split(" | ") for line in prose(GLOSSARY).splitlines() if line.startswith("| ")]
    words = [row[0].removeprefix("| ") for row in rows]
    where = {row[0].removeprefix("| "): row[-1] for row in rows if len(row) == 3}
    for term in TERMS.split(";"):
        assert words.count(term.strip()) == 1, term
        assert re.search(r"`[\w/]+\.py:\w", where[term.strip()]), term


def test_lifecycle_names_every_command_and_every_reason_to_drop() -> None:
    spans = set(code_spans(LIFECYCLE))
    assert {command.__name__ for command in get_args(Command)} <= spans
    sources = [file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")]
    reasons = {name for text in sources for name in re.findall(r'dropped\["(\w+)"\]', text)}
    assert "stale" in reasons
    assert reasons <= spans


def test_adopt_lists_the_public_names_and_no_others() -> None:
    table = section(ADOPT, "What is stable").split("Not stable")[0]
    listed = re.findall(r"`headrace\.(\w+)`", table)
    assert sorted(listed) == sorted({*headrace.__all__, "__all__"} - {"__version__"})


def test_diagrams_are_those_of_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert diagrams.main(["--check", str(LIFECYCLE)]) == 0, capsys.readouterr().err


def test_diagram_has_every_transition_and_where_it_begins_and_ends() -> None:
    text = diagrams.diagram(Handoff.TABLE)
    assert f"[*] --> {Handoff(AttemptId(0, 0, 1), 1).state.name}" in text
    assert f"{HandoffState.ENDED.name} --> [*]" in text
    transitions = sum(map(len, Handoff.TABLE.values()))
    assert sum(len(arrow.events) for arrow in diagrams.arrows(Handoff.TABLE)) == transitions
    assert "STREAMING --> SEALED : SEAL\n" in text
    for event in HandoffEvent:
        assert event.name in text
    assert f"[*] --> {Slot(SlotIndex(0)).state.name}" in diagrams.diagram(Slot.TABLE)
    assert "--> [*]" not in diagrams.diagram(Slot.TABLE)
    last = diagrams.diagram(diagrams.TABLES["source attempt"]).splitlines()[-1]
    assert last.strip() == f"{SourceState.DONE.name} --> [*]"


def test_diagrams_are_written_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    empty = [f"<!-- diagram: {name} -->\nold\n<!-- /diagram -->" for name in diagrams.TABLES]
    page.write_text("\n\n".join(["# Title", *empty, "end\n"]), encoding="utf-8")
    assert diagrams.main(["--check", str(page)]) == 1
    assert "out of date" in capsys.readouterr().err
    assert diagrams.main(["--write", str(page)]) == 0
    assert diagrams.main(["--check", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Title\n")
    assert text.endswith("\nend\n")
    assert "old" not in text
    assert diagrams.main([]) == 0
    shown = capsys.readouterr().out
    assert all(diagrams.diagram(table) in shown for table in diagrams.TABLES.values())


def test_markers_that_are_missing_or_unknown_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- diagram: other -->\n<!-- /diagram -->\n", encoding="utf-8")
    assert diagrams.main(["--write", str(page)]) == 2
    assert "other" in capsys.readouterr().err
    assert diagrams.main(["--check", str(tmp_path / "none.md")]) == 2
