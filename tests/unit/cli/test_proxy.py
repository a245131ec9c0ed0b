"""`headrace proxy`: what its flags come to."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

from headrace.cli import run_command
from headrace.errors import Refused
from headrace.proxy import serving
from headrace.proxy.config import ProxyConfig
from headrace.server.keys import KEY_VARIABLE
from headrace.server.stopping import ToldToStop

DECODER = "--decoder=http://127.0.0.1:8001"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ProxyConfig]:
    """What was served; it ends at once."""
    found: list[ProxyConfig] = []

    def serve(config: ProxyConfig, told: Any) -> int:
        found.append(config)
        told("listening")
        return 0

    monkeypatch.setattr(serving, "serve", serve)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    return found


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run_command(["proxy", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("headrace: ")
    return line.removeprefix("headrace: ")


def test_without_flags_it_listens_at_this_host(
    served: list[ProxyConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["proxy", DECODER]) == 0
    assert capsys.readouterr().err == "headrace: listening\n"
    (config,) = served
    assert config.decoders == ("http://127.0.0.1:8001",)
    assert (config.http.host, config.http.port) == ("127.0.0.1", 8000)
    assert (config.http.max_body_bytes, config.http.drain_timeout_s) == (4 << 20, 30.0)
    assert (config.prefill, config.route, config.min_tokens) == ("remote", None, 0)
    assert (config.max_in_flight, config.first_byte_timeout_s) == (512, 600.0)
    assert config.keys == ()


def test_flags_are_taken(served: list[ProxyConfig], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-1\n")
    keys.chmod(0o600)
    given = [
        *(DECODER, "--decoder", "http://two:1/", "--host", "0.0.0.0", "--port", "0"),
        *("--prefill", "by-header", "--route", "streamed", "--min-tokens", "64"),
        *("--max-in-flight", "7", "--max-body-bytes", "2048", "--first-byte-timeout", "1.5"),
        *("--drain-timeout", "2", "--api-key-file", str(keys), "--allow-open"),
        *("--log-level", "warning"),
    ]
    assert run_command(["proxy", *given]) == 0
    (config,) = served
    assert config.decoders == ("http://127.0.0.1:8001", "http://two:1")
    assert (config.http.host, config.http.port, config.http.allow_open) == ("0.0.0.0", 0, True)
    assert (config.http.max_body_bytes, config.http.drain_timeout_s) == (2048, 2.0)
    assert (config.prefill, config.route, config.min_tokens) == ("by-header", "streamed", 64)
    assert (config.max_in_flight, config.first_byte_timeout_s) == (7, 1.5)
    assert config.http.max_connections > config.max_in_flight
    assert (config.keys, config.log_level) == (("sk-1",), "warning")


def test_a_key_of_the_environment_is_taken(
    served: list[ProxyConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "sk-2")
    assert run_command(["proxy", DECODER]) == 0
    assert served[0].keys == ("sk-2",)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--decoder requires an argument"),
        (["--decoder=one"], "give the address of a vllm serve"),
        ([DECODER, "--port=65536"], "--port is 65536; it must be at most 65535"),
        ([DECODER, "--min-tokens=-1"], "--min-tokens is -1; it cannot be negative"),
        ([DECODER, "--max-in-flight=0"], "--max-in-flight is 0; it must be at least 1"),
        ([DECODER, "--max-body-bytes=1"], "--max-body-bytes is 1; it must be at least 1024"),
        ([DECODER, "--first-byte-timeout=0"], "--first-byte-timeout is 0; it must be above 0"),
        ([DECODER, "--drain-timeout=nan"], "--drain-timeout is nan; it must be above 0"),
        ([DECODER, "--prefill=no"], 'Choose from: "remote", "local", "by-header"'),
        ([DECODER, "--route=no"], "--route"),
        ([DECODER, "--api-key-file=/nowhere"], "--api-key-file names a file that cannot be read"),
    ],
)
@pytest.mark.usefixtures("served")
def test_what_makes_no_sense_is_refused_in_a_sentence(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in complaint(capsys, *arguments)


def test_what_cannot_be_served_here_is_told_in_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def serve(config: ProxyConfig, told: Any) -> int:
        raise Refused("http.host 'x' is no address", field="http.host")

    monkeypatch.setattr(serving, "serve", serve)
    assert complaint(capsys, DECODER) == "--host 'x' is no address"


def test_a_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = import_module("headrace.cli.proxy")  # the name in the package is the command
    monkeypatch.setattr(module, "NEEDED", ("starlette", "no_such_package"))
    said = complaint(capsys, DECODER)
    assert said == (
        "headrace proxy needs no_such_package, which is not installed; "
        "run: pip install 'headrace[proxy]'"
    )


def test_told_to_stop_before_it_serves_it_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(config: ProxyConfig, told: Any) -> int:
        raise ToldToStop

    monkeypatch.setattr(serving, "serve", serve)
    assert run_command(["proxy", DECODER]) == 0
