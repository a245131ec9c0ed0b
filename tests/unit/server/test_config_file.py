"""headrace.toml: what is wrong with a file is refused in one sentence that names the place."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import pytest

from headrace.errors import Refused
from headrace.server.config import DecoderTable, ServeConfig, SourceTable
from headrace.server.config_file import (
    MAX_FILE_NBYTES,
    decoder_names,
    parse_config,
    read_config,
)
from headrace.server.config_keys import Table, file_table, key_at

ONE = "[[decoders]]\nmodel = 'm'\n"


def refusal(text: str) -> str:
    """The one sentence."""
    with pytest.raises(Refused) as caught:
        parse_config(text, "f.toml")
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith("f.toml")
    return said.removeprefix("f.toml").removeprefix(":").strip()


def test_the_least_config_has_all_defaults() -> None:
    assert parse_config(ONE, "f") == ServeConfig(decoders=(DecoderTable(model="m"),))
    assert parse_config(ONE, "f").decoders[0].sources == (SourceTable(),)


def test_a_number_without_a_point_is_one() -> None:
    assert parse_config(f"{ONE}[http]\ndrain_timeout_s = 7", "f").http.drain_timeout_s == 7.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there is no [[decoders]]; add one with its model"),
        ("decoders = []", "decoders is an empty list; it is one table or more, at most 64"),
        ("[decoders]\nmodel = 'm'", "decoders is a table; it is one table or more"),
        ("decoders = [1]", "decoders[0] is 1; it is a table, under [[decoders]]"),
        ("[[decoders]]\nlanes = 1", "decoders[0] has no model; `headrace models list`"),
        ("[[decoders]]\nmodel = ''", 'decoders[0].model is ""; it is a text that is not empty'),
        ("[decoder]\nmodel = 'm'", "unknown key `decoder` at the top level; did you mean `deco"),
        (f"{ONE}lane = 3", "unknown key `lane` in decoders[0]; did you mean `lanes`?"),
        (f"{ONE}{ONE}lane = 3", "unknown key `lane` in decoders[1]; did you mean `lanes`?"),
        (
            f"{ONE}[[decoders.sources]]\n[[decoders.sources]]\nslot = 1",
            "unknown key `slot` in decoders[0].sources[1]; did you mean `slots`?",
        ),
        (f"port = 1\n{ONE}", "unknown key `port` at the top level; it is a key of [http]"),
        ("[http]\nlanes = 3", "unknown key `lanes` in http; it is a key of [decoders]"),
        ("[page]\nzzz = 3", "unknown key `zzz` in page; its keys are enabled, recent, look_every"),
        (
            f"{ONE}[[decoders.sources]]\nslots = 0",
            "decoders[0].sources[0].slots is 0; it is a count from 1 to 4096",
        ),
        (f"{ONE}lanes = 0", "decoders[0].lanes is 0; it is a count from 1 to 4096"),
        (f"{ONE}lanes = true", "decoders[0].lanes is true; it is a count from 1"),
        (f"{ONE}lanes = 2.5", "decoders[0].lanes is 2.5; it is a count from 1"),
        (f"{ONE}context = 0", "decoders[0].context is 0; it is a count from 1"),
        (f"{ONE}name = 'a b'", 'decoders[0].name is "a b"; it is a name of up to 64 letters'),
        (f'{ONE}name = "a\\n"', 'decoders[0].name is "a\\n"; it is a name of up to 64 letters'),
        (f"{ONE}dtype = 1979-05-27", "decoders[0].dtype is 1979-05-27; it is a text"),
        (f"{ONE}options = [1]", "decoders[0].options is a list; it is a table"),
        (f"{ONE}served_as = 'm'", 'decoders[0].served_as is "m"; it is a list, each item'),
        (f"{ONE}served_as = ['m', 3]", "decoders[0].served_as[1] is 3; it is a text of 1 to 256"),
        (f"{ONE}sources = 3", "decoders[0].sources is 3; it is one table or more, at most 16"),
        (f"http = 3\n{ONE}", "http is 3; it is a table"),
        (f"{ONE}[http]\nport = 65536", "http.port is 65536; it is a count from 0 to 65535"),
        (f"{ONE}[http]\nport = '80'", 'http.port is "80"; it is a count from 0 to 65535'),
        (f"{ONE}[queue]\npatience = nan", "queue.patience is nan; it is a number from 0 to 1000"),
        (f"{ONE}[queue]\nmax_requests = 0", "queue.max_requests is 0; it is a count from 1"),
        (
            f"{ONE}[http]\ndrain_timeout_s = inf",
            "http.drain_timeout_s is inf; it is a number above 0 and at most 1e+09",
        ),
        (
            f"{ONE}[requests]\nroute = 'fast'",
            'requests.route is "fast"; it is one of auto, chunked, streamed, whole',
        ),
        (f"{ONE}[restart]\nfactor = 0.5", "restart.factor is 0.5; it is a number from 1"),
        (f"{ONE}name = '{'x' * 500}'", f'decoders[0].name is "{"x" * 59}...; it is a name'),
        ("a =", "is no TOML: "),
        ("a = 1\na = 2", "is no TOML: "),
        (f"a = {'[' * 5000}", "is no TOML of ours: it is nested too deeply"),
        (f"a = 1{'0' * 5000}", "is no TOML: "),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, said: str) -> None:
    assert refusal(text).startswith(said)


def test_every_key_refuses_a_value_of_no_kind_by_its_place() -> None:
    """A table where a value belongs, and a text where a table does."""

    def wrong(table: Table, place: str) -> list[tuple[str, str]]:
        found = []
        for key in table.keys:
            here = f"{place}.{key.name}".removeprefix(".")
            if key.tables is None:
                value = "3" if key.rule == "a table" else "{ x = 1 }"
                found.append((here, f"{key.name} = {value}"))
            elif not key.repeated:
                found += wrong(key.tables, here)
        return found

    for place, line in wrong(file_table(), ""):
        table = place.rpartition(".")[0]
        assert refusal(f"{ONE}[{table}]\n{line}").startswith(f"{place} "), place
    (decoders,) = (key.tables for key in file_table().keys if key.name == "decoders")
    assert decoders is not None
    for place, line in wrong(decoders, ""):
        text = f"[[decoders]]\n{'' if place == 'model' else 'model = 1'}\n{line}"
        text = text.replace("model = 1", "model = 'm'")
        assert refusal(text).startswith(f"decoders[0].{place} "), place


@pytest.mark.parametrize("secret", ["sk-secret", "{ a = 'sk-secret' }", "['sk-secret']"])
@pytest.mark.parametrize("key", ["api_key", "api_key_file", "api_keyfile"])
def test_a_secret_in_the_wrong_place_is_not_repeated(key: str, secret: str) -> None:
    value = f"'{secret}'" if secret.startswith("sk") else secret
    if key == "api_key_file" and value.startswith("'"):
        return  # a path, of which `check_config` judges
    assert "sk-secret" not in refusal(f"{ONE}[http]\n{key} = {value}")


def test_a_place_that_is_none_has_no_key() -> None:
    assert key_at("decoders[0].sources[1].slots") is not None
    assert key_at("decoders[0].nothing") is None
    assert key_at("nothing.at.all") is None


def test_a_file_that_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(path: Path) -> str:
        with pytest.raises(Refused) as caught:
            read_config(path)
        return str(caught.value).replace(str(tmp_path), "TMP")

    assert (
        said(tmp_path / "none") == "TMP/none is missing; `headrace config show` prints one to "
        "begin with"
    )
    assert said(tmp_path) == "TMP is a directory; name the file in it"
    assert said(tmp_path / "none\0") == "TMP/none\0 cannot be read: embedded null byte"
    file = tmp_path / "f.toml"
    file.write_bytes(b"# \xff")
    assert said(file) == "TMP/f.toml is not UTF-8 text (byte 2); save it as UTF-8"
    file.write_bytes(b"#" * (MAX_FILE_NBYTES + 1))
    assert said(file) == f"TMP/f.toml has more than {MAX_FILE_NBYTES} bytes; name a config"
    file.write_text(ONE)
    assert read_config(file) == parse_config(ONE, "f")
    if os.geteuid() != 0:
        file.chmod(0)
        assert said(file) == "TMP/f.toml cannot be read: Permission denied"


def test_decoders_are_named_by_what_they_are_and_numbered_if_several() -> None:
    table = DecoderTable(model="m")
    null = msgspec.structs.replace(table, decoder="null")
    mine = msgspec.structs.replace(table, name="mine")
    assert decoder_names([table]) == ("cpu",)
    assert decoder_names([table, null, table]) == ("cpu-1", "null", "cpu-2")
    assert decoder_names([mine, table]) == ("mine", "cpu-2")
    for pair in ([mine, null, mine], [msgspec.structs.replace(table, name="null"), null]):
        with pytest.raises(Refused, match=r"^decoders\[0\] and decoders\[[12]\] are both named"):
            decoder_names(pair)


def test_reading_a_config_imports_nothing_heavy() -> None:
    import subprocess

    heavy = ("torch", "numpy", "starlette", "uvicorn", "transformers")
    code = (
        "import sys, headrace.server.config_file, headrace.server.config_text, "
        "headrace.server.config_checks, headrace.cli; "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


SOURCE = "[[decoders.sources]]\n"
NO_DATE = "is a date or a time, which no option is; put it in quotes"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("a = 2026-01-01", f"a {NO_DATE}"),
        ("a = 2026-01-01T00:00:00Z", f"a {NO_DATE}"),
        ("a = [{ b = 07:32:00 }]", f"a[0].b {NO_DATE}"),
        ("a = nan", "a is nan; give a number"),
        ("a = { b = [1, -inf] }", "a.b[1] is -inf; give a number"),
        ("a = 18446744073709551616", "a has more than 64 bits; give a smaller number"),
    ],
)
def test_options_that_no_engine_could_be_handed_are_refused(options: str, said: str) -> None:
    for table, place in (("", "decoders[0].options"), (SOURCE, "decoders[0].sources[0].options")):
        assert refusal(f"{ONE}{table}options = {{ {options} }}") == f"{place}.{said}"


def test_names_that_metrics_give_to_something_else_are_refused() -> None:
    assert refusal(f"{ONE}name = 'other'").startswith("decoders[0].name is other, which metrics")
    for name in ("other", "owner"):
        said = refusal(f"{ONE}{SOURCE}{SOURCE}name = '{name}'")
        assert said.startswith(f"decoders[0].sources[1].name is {name}, which metrics and logs")
    assert parse_config(f"{ONE}name = 'owner'", "f").decoders[0].name == "owner"


@pytest.mark.parametrize("code", ["000a", "0000", "001b", "0085", "202e", "200b", "2028", "feff"])
def test_a_served_name_has_no_character_that_is_not_seen(code: str) -> None:
    said = refusal(f'{ONE}served_as = ["x", "a\\u{code}b"]')
    assert said.startswith("decoders[0].served_as[1] is 'a\\")
    assert said.isprintable()
    assert parse_config(f"{ONE}served_as = ['a b', 'o/m:1', 'モデル']", "f")


def test_a_mark_of_the_byte_order_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    path.write_bytes(b"\xef\xbb\xbf" + ONE.encode())
    assert read_config(path) == parse_config(ONE, "f")
