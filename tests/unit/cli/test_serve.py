"""`headrace serve`: its flags and its file become one config, and mistakes one sentence."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from headrace.cli import run_command
from headrace.cli.serve import NEEDED, ServeOptions, in_flags
from headrace.errors import BackendUnavailable, PeerDied, Refused
from headrace.server.config import ServeConfig
from tests.unit.server.model_directory import POSITIONS, model_directory

serve = import_module("headrace.cli.serve")  # the name in the package is the command

FILE = "[[decoders]]\nmodel = 'm'\nlanes = 3\n[http]\nport = 1234\nmax_connections = 9\n"


class Serving(ModuleType):
    """Stands for the server: keeps what it was started with."""

    def __init__(self) -> None:
        super().__init__("headrace.server.serving")
        self.config: ServeConfig | None = None
        self.error: Exception | None = None
        self.signal: signal.Signals | None = None

    def serve(self, config: ServeConfig, told: Callable[..., None]) -> int:
        self.config = config
        if self.signal is not None:
            signal.raise_signal(self.signal)
        if self.error is not None:
            raise self.error
        told("ready")
        told("it is odd", level=logging.WARNING)
        return 7


@pytest.fixture(autouse=True)
def serving(monkeypatch: pytest.MonkeyPatch) -> Serving:
    made = Serving()
    monkeypatch.setitem(sys.modules, "headrace.server.serving", made)
    monkeypatch.setattr(sys.modules["headrace.server"], "serving", made, raising=False)
    monkeypatch.setattr(serve, "find_spec", lambda name: True)
    return made


def served(serving: Serving, *arguments: str) -> ServeConfig:
    assert run_command(["serve", *arguments]) == 7
    assert serving.config is not None
    return serving.config


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run_command(["serve", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("headrace: ")
    assert said.count("\n") == 1
    return said.removeprefix("headrace: ").strip()


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "headrace.toml"
    path.write_text(FILE)
    return str(path)


def test_a_file_is_served_as_it_says(serving: Serving, file: str) -> None:
    config = served(serving, "--config", file)
    assert (config.http.port, config.decoders[0].lanes) == (1234, 3)


def test_where_it_listens_and_logs_goes_over_the_file(serving: Serving, file: str) -> None:
    flags = ["--host", "::1", "--port", "0", "--log-level", "error", "--log-json"]
    config = served(serving, "--config", file, *flags)
    assert (config.http.host, config.http.port, config.http.max_connections) == ("::1", 0, 9)
    assert (config.telemetry.log_level, config.telemetry.log_json) == ("error", True)


EVERY = {
    "served_as": ["x", "y"],
    "source": "rngd",
    "slots": 3,
    "source_python": "/s",
    "source_options": {"a": 1},
    "emulate": True,
    "decoder": "atom",
    "lanes": 1,
    "context": 64,
    "decoder_python": "/d",
    "decoder_options": {"b": 2},
    "compiled": "/c",
    "dtype": "bfloat16",
    "threads": 5,
    "decode_batch": 2,
    "prefetch_depth": 0,
    "prefill_chunk": 32,
    "keep_bytes": 1 << 30,
    "control": "/x.sock",
    "route": "streamed",
    "group_layers": 4,
    "chunk": 16,
    "emission": "cache_groups",
    "on_failure": "retry",
    "prefix": "shared",
    "api_key_file": "/k",
    "allow_open": True,
}


def spelled(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return [flag]
    if isinstance(value, list):
        return [word for each in value for word in (flag, each)]
    text = msgspec.json.encode(value).decode() if isinstance(value, dict) else str(value)
    return [flag, text]


def test_every_flag_sets_its_key(serving: Serving) -> None:
    flags = [word for name, value in EVERY.items() for word in spelled(name, value)]
    config = served(serving, "--model", "m", "--host", "h", "--port", "9", *flags)
    (decoder,) = config.decoders
    (source,) = decoder.sources
    told = {
        **{name: getattr(decoder, name) for name in EVERY if hasattr(decoder, name)},
        **{name: getattr(source, name) for name in ("source", "slots", "emulate")},
        **{
            name: getattr(config.requests, name) for name in EVERY if hasattr(config.requests, name)
        },
        **{name: getattr(config.http, name) for name in EVERY if hasattr(config.http, name)},
        "source_python": source.python,
        "source_options": source.options,
        "decoder_python": decoder.python,
        "decoder_options": decoder.options,
        "served_as": list(decoder.served_as),
    }
    assert told == EVERY
    assert (decoder.threads, source.threads) == (5, 5)
    assert (decoder.model, config.http.host, config.http.port) == ("m", "h", 9)


def test_every_flag_is_tried_here() -> None:
    with_a_file = {"config", "host", "port", "log_level", "log_json"}
    assert set(EVERY) == set(ServeOptions.__dataclass_fields__) - with_a_file - {"model"}


def test_no_flag_but_the_model_gives_the_defaults(serving: Serving, tmp_path: Path) -> None:
    model = str(model_directory(tmp_path / "model", positions=1 << 20))
    config = served(serving, "--model", model)
    assert config == msgspec.convert({"decoders": [{"model": model}]}, ServeConfig)
    short = str(model_directory(tmp_path / "short"))
    assert served(serving, "--model", short).decoders[0].context == POSITIONS
    (tmp_path / "short" / "config.json").write_text("[]")  # which the check of the model refuses
    assert served(serving, "--model", short).decoders[0].context == 2048


@pytest.mark.parametrize(("name", "value"), EVERY.items())
def test_no_other_flag_goes_with_a_file(
    name: str, value: Any, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = f"--{name.replace('_', '-')}"
    said = complaint(capsys, "--config", file, *spelled(name, value))
    assert said == f"{flag} does not go with --config; set it in the file, or leave --config out"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give --model NAME, or --config FILE; `headrace models list` shows the models"),
        (["--lanes", "2"], "give --model NAME, or --config FILE"),
        (["--config", "/nope"], "/nope is missing; `headrace config show` prints one to begin"),
        (["--model", "m", "--lanes", "0"], "--lanes is 0; it is a count from 1 to 4096"),
        (["--model", "m", "--lanes", "5000"], "--lanes is 5000; it is a count from 1 to 4096"),
        (["--model", "m", "--slots", "0"], "--slots is 0; it is a count from 1 to 4096"),
        (["--model", "m", "--context", "-1"], "--context is -1; it is a count from 1"),
        (["--model", "m", "--threads", "0"], "--threads is 0; it is a count from 1"),
        (["--model", "m", "--decode-batch", "257"], "--decode-batch is 257; it is a count from 1"),
        (["--model", "m", "--group-layers", "0"], "--group-layers is 0; it is a count from 1"),
        (["--model", "m", "--chunk", "-1"], "--chunk is -1; it is a count from 0"),
        (["--model", "m", "--prefetch-depth", "-1"], "--prefetch-depth is -1; it is a count f"),
        (["--model", "m", "--port", "65536"], "--port is 65536; it is a count from 0 to 65535"),
        (["--model", "m", "--route", "fast"], '--route is "fast"; it is one of auto, chunked'),
        (["--model", "m", "--log-level", "loud"], '--log-level is "loud"; it is one of debug,'),
        (["--model", "m", "--source-options", "[]"], "--source-options is not a JSON object"),
        (["--model", "m", "--decoder-options", "x"], "--decoder-options is not a JSON object"),
        (["--model", ""], '--model is ""; it is a text that is not empty'),
        (["--model", "m", "--served-as", ""], '--served-as[0] is ""; it is a text of 1 to 256'),
        (["--model", "nothing"], "no model 'nothing' (built in: "),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_flag(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments[:2] == ["--model", "m"]:
        arguments = [*arguments, *([] if "--context" in arguments else ["--context", "64"])]
    assert complaint(capsys, *arguments).startswith(said)


def test_a_flag_over_a_file_is_refused_by_its_name(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = complaint(capsys, "--config", file, "--port", "-1")
    assert said == "--port is -1; it is a count from 0 to 65535"


@pytest.mark.parametrize("missing", NEEDED)
def test_a_missing_package_is_told_with_how_to_get_it(
    missing: str, file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == missing else True)
    assert complaint(capsys, "--config", file) == (
        f"headrace serve needs {missing}, which is not installed; run: pip install "
        "'headrace[server,cpu]'"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("decoders[0].sources[0].slots is 0", "--slots is 0"),
        ("decoders[0].sources[0].python", "--source-python"),
        ("decoders[0].python and decoders[0].options", "--decoder-python and --decoder-options"),
        ("decoders[0]: 4 lanes", "--decoder: 4 lanes"),
        ("decoders[0].served_as has x twice", "--served-as has x twice"),
        ("http.api_key_file or http.host", "--api-key-file or --host"),
        ("requests.chunk: route auto", "--chunk: route auto"),
        ("/srv/http.d/decoders of http://x", "/srv/http.d/decoders of http://x"),
    ],
)
def test_keys_are_told_as_the_flags_that_gave_them(text: str, said: str) -> None:
    assert in_flags(text) == said


def test_a_refusal_names_flags_or_keys_as_its_user_wrote_them(
    serving: Serving, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    serving.error = Refused("http.host is x")
    assert complaint(capsys, "--model", "m", "--context", "64") == "--host is x"
    assert complaint(capsys, "--config", file) == f"{file}: http.host is x"
    serving.error = Refused("127.0.0.1:80 is in use", field="http.port")  # which a flag may give
    assert complaint(capsys, "--config", file) == "127.0.0.1:80 is in use"
    serving.error = BackendUnavailable("v", "s", "p", "d", "or decoders[0].sources[0].python")
    said = complaint(capsys, "--model", "m", "--context", "64")
    assert said == "v: s: p: d. or --source-python"


def test_what_is_odd_is_told_as_a_warning(
    serving: Serving, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    served(serving, "--config", file)
    assert capsys.readouterr().err == "headrace: ready\nheadrace: warning: it is odd\n"


def test_what_the_host_lacks_just_now_is_no_mistake(
    serving: Serving, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status of one keeps systemd from starting the server again."""
    serving.error = Refused("too little memory", shortage=True)
    assert run_command(["serve", "--config", file]) == 1
    assert capsys.readouterr().err == "headrace: too little memory\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_it_serves_ends_it_well(
    number: signal.Signals, serving: Serving, file: str
) -> None:
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    serving.signal = number
    assert run_command(["serve", "--config", file]) == 0
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Refused("a\nb"), 2),
        (Refused("too little memory", shortage=True), 1),
        (BackendUnavailable("v", "s", "p", "d", "h"), 2),
        (PeerDied("x"), 1),
    ],
)
def test_where_logs_are_json_so_is_what_ends_it(
    error: Exception,
    status: int,
    serving: Serving,
    file: str,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    serving.error = error
    assert run_command(["serve", "--config", file, "--log-json"]) == status
    assert capsys.readouterr().err == ""
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert " ".join(str(error).splitlines()) in record.getMessage()
