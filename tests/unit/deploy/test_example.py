"""The example config, and that docs/operate.md says what there is: keys, statuses and alarms."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec import NODEFAULT
from msgspec.structs import replace

from headrace.engine.builtin import BUILTIN_MODELS
from headrace.server.config_checks import check_config
from headrace.server.config_file import decoder_names, read_config
from headrace.server.config_keys import Key, file_table
from headrace.server.config_text import toml_value
from headrace.server.terminals import STATUS
from tests.unit.server.model_directory import model_directory

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "deploy" / "headrace.toml"
OPERATE = ROOT / "docs" / "operate.md"


def test_the_example_is_of_two_built_in_models() -> None:
    config = read_config(EXAMPLE)
    assert decoder_names(config.decoders) == ("small", "chat")
    assert {each.model for each in config.decoders} <= set(BUILTIN_MODELS)
    assert config.http.host == "127.0.0.1"


def test_the_example_can_be_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small model in place of the real ones, and without the directory of the sockets."""
    small = model_directory(tmp_path / "model", positions=8192)
    monkeypatch.setattr("headrace.server.config_checks.resolve", lambda name: small)
    monkeypatch.setattr("headrace.server.config_checks.measured", lambda tables, lanes: [None] * 2)
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    config = read_config(EXAMPLE)
    here = [replace(each, control=str(tmp_path / f"{each.name}.sock")) for each in config.decoders]
    checked = check_config(replace(config, decoders=tuple(here)))
    assert [each.start.pair for each in checked.decoders] == ["2 x torch -> cpu", "torch -> cpu"]


def row_of(key: Key) -> str:
    """The row of a key in the docs."""
    if key.default is NODEFAULT:
        default = "must be given"
    else:
        default = "none" if key.default is None else f"`{toml_value(key.default)}`"
    return f"| `{key.name}` | {default} | {key.about} |"


def test_the_docs_have_each_key_of_every_table_and_no_other() -> None:
    _, _, rest = OPERATE.read_text(encoding="utf-8").partition("\n## The config\n")
    section = rest.partition("\n## ")[0]
    tables = {each.header: each for each in file_table().below()}
    told = re.split(r"^`\[+([a-z.]+)\]+`:", section, flags=re.MULTILINE)[1:]
    found = dict(zip(told[::2], told[1::2], strict=True))
    assert set(found) == set(tables)
    for header, text in found.items():
        rows = [line for line in text.splitlines() if line.startswith("| `")]
        assert rows == [row_of(key) for key in tables[header].keys if key.tables is None], header


def test_the_docs_have_each_terminal_with_its_status() -> None:
    text = OPERATE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d{3}) \| `([a-z-]+)` \|", text, flags=re.MULTILINE)
    assert sorted(rows) == sorted((str(status), each.value) for each, status in STATUS.items())


def test_the_docs_have_each_alarm() -> None:
    rules = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()
    alarms = re.findall(r"- alert: (\w+)", rules)
    text = OPERATE.read_text(encoding="utf-8")
    assert re.findall(r"^\| (Headrace\w+) \|", text, flags=re.MULTILINE) == alarms


def test_the_docs_pull_the_models_of_the_example() -> None:
    text = OPERATE.read_text(encoding="utf-8")
    for decoder in read_config(EXAMPLE).decoders:
        assert f"headrace models pull {decoder.model}" in text
