"""What a config cannot be served with here is refused in one sentence, before anything starts."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.capacity import MEMORY_MARGIN_NBYTES
from headrace.errors import BackendUnavailable, Refused
from headrace.server import config_checks
from headrace.server.config_checks import _ARGUMENT_NBYTES, Checked, check_config
from headrace.server.config_file import parse_config
from headrace.server.keys import KEY_VARIABLE
from headrace.server.sizes import Sizes
from tests.unit.server.model_directory import POSITIONS, model_directory

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _small_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host of 8 GiB and 4 cores whose models are small; no key in the environment."""
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.setattr(config_checks, "total_nbytes", lambda: 8 * GIB)
    monkeypatch.setattr(config_checks, "available_nbytes", lambda: 7 * GIB)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    takes(monkeypatch, lane=1 << 20, slot=1 << 20, weights=GIB)


def takes(monkeypatch: pytest.MonkeyPatch, *, lane: int, slot: int, weights: int) -> None:
    def measured(tables: Any, lanes: Any) -> list[Sizes]:
        counts = [sum(each.slots for each in table.sources) for table, *_ in tables]
        return [
            Sizes(lane, slot, lane * number, slot * count, weights)
            for number, count in zip(lanes, counts, strict=True)
        ]

    monkeypatch.setattr(config_checks, "measured", measured)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_directory(tmp_path / "model")


def config_of(model: Path, *, more: str = "", http: str = "", own: str = "context = 512") -> str:
    decoder = f"[[decoders]]\nmodel = '{model}'\n{own}\n"
    return f"{decoder}{more}\n[http]\n{http}"


def checked(text: str) -> Checked:
    return check_config(parse_config(text, "f"))


def refusal(text: str) -> str:
    with pytest.raises(Refused) as caught:
        checked(text)
    said = str(caught.value)
    assert "\n" not in said
    return said


def test_a_config_that_can_be_served_is_told_whole(model: Path) -> None:
    found = checked(config_of(model, own="context = 64\nlanes = 2"))
    (decoder,) = found.decoders
    assert (decoder.name, decoder.lanes) == ("cpu", 2)
    assert decoder.sizes == Sizes(1 << 20, 1 << 20, 2 << 20, 2 << 20, GIB)
    assert decoder.start.pair == "torch -> cpu"
    assert decoder.start.config.context == 64
    assert found.warnings == ()


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (f"context = {POSITIONS + 1}", f"decoders[0].context is {POSITIONS + 1}, and "),
        ("context = 64\ndecoder = 'gpu'", "decoders[0].decoder: unknown decoder 'gpu'; known are"),
        (
            "context = 64\ndecoder = 'atom'",
            "decoders[0].decoder atom needs compiled DIR, the model as optimum-rbln compiled",
        ),
        (
            "context = 64\ndecoder = 'atom'\ncompiled = '/nowhere'",
            "decoders[0].compiled: /nowhere is not a directory",
        ),
        (
            "context = 64\ndecoder = 'atom'\nlanes = 2\ncompiled = '.'",
            "decoders[0].lanes is 2 and decoder atom has one lane; leave lanes out",
        ),
        (
            "context = 64\ndecoder = 'atom'\ndecode_batch = 2\ncompiled = '.'",
            "decoders[0].decode_batch is 2 and decoder atom decodes one sequence; leave dec",
        ),
        (
            "context = 64\ncompiled = '.'",
            "decoders[0].compiled is for decoder atom, and it is cpu; leave compiled out",
        ),
        (
            "context = 64\ndecoder = 'null'\ndecode_batch = 2",
            "decoders[0].decode_batch is for a decoder that decodes, and null does not",
        ),
        ("context = 64\npython = '/nope'", "interpreter '/nope' is missing or not executable; g"),
        ("context = 64\ncontrol = '/nowhere/x'", "decoders[0].control: /nowhere is not a direct"),
        (f"context = 64\ncontrol = '/tmp/{'x' * 120}'", "decoders[0].control has more than 107"),
        ("context = 64\ncontrol = '/proc/meminfo'", "decoders[0].control: /proc/meminfo is ther"),
    ],
)
def test_what_a_decoder_cannot_have_is_refused(model: Path, own: str, said: str) -> None:
    assert refusal(config_of(model, own=own)).startswith(said)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("source = 'npu'", "decoders[0].sources[1].source: unknown source 'npu'; known are tor"),
        (
            "emulate = true",
            "decoders[0].sources[1].emulate is for source rngd, and it is torch; leave emulate",
        ),
        ("python = '/nope'", "interpreter '/nope' is missing or not executable; give decoders[0]"),
        ("name = 'torch-1'", "decoders[0]: two sources are named torch-1; name them apart"),
        ("name = 'x'\n[[decoders.sources]]\nname = 'x'", "decoders[0]: two sources are named x"),
    ],
)
def test_what_a_source_cannot_have_is_refused(model: Path, source: str, said: str) -> None:
    more = f"[[decoders.sources]]\n[[decoders.sources]]\n{source}"
    assert refusal(config_of(model, more=more)).startswith(said)


def test_rngd_computes_in_one_dtype(model: Path) -> None:
    more = "dtype = 'float32'\n[[decoders.sources]]\nsource = 'rngd'"
    assert refusal(config_of(model, more=more)).startswith(
        "decoders[0].dtype is float32 and source rngd computes in bfloat16; leave dtype out"
    )


def test_a_missing_environment_is_told_by_the_key(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.delenv("HEADRACE_RNGD_PYTHON", raising=False)
    monkeypatch.delenv("HEADRACE_ATOM_PYTHON", raising=False)
    with pytest.raises(BackendUnavailable, match=r"or with decoders\[0\]\.sources\[0\]\.python$"):
        checked(config_of(model, more="[[decoders.sources]]\nsource = 'rngd'"))
    own = f"context = 64\ndecoder = 'atom'\ncompiled = '{tmp_path}'"
    with pytest.raises(BackendUnavailable, match=r"or with decoders\[0\]\.python; rebel"):
        checked(config_of(model, own=own))


def test_an_interpreter_without_headrace_is_refused(model: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    python.chmod(0o755)
    said = refusal(config_of(model, own=f"context = 64\npython = '{python}'"))
    assert f"{python} is not a Python that has headrace installed" in said
    assert "give decoders[0].python the path of one" in said


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gemma3-270", "no model 'gemma3-270': did you mean gemma3-270m?"),
        ("gemma3-270m", "model gemma3-270m is not pulled: run: headrace models pull gemma3-270m"),
        ("/nowhere", "no model '/nowhere'"),
    ],
)
def test_a_model_that_is_not_there_is_refused(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "empty"))
    assert refusal(f"[[decoders]]\nmodel = '{name}'").startswith(f"decoders[0].model: {said}")


@pytest.mark.parametrize("text", ["[]", "{", '{"max_position_embeddings": "many"}'])
def test_a_model_whose_config_is_broken_is_refused(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    said = refusal(config_of(model))
    assert said.startswith("decoders[0].model: ")
    assert "config.json" in said


def test_names_that_are_taken_twice_are_refused(model: Path, tmp_path: Path) -> None:
    other = model_directory(tmp_path / "other")
    second = f"name = 'a'\n[[decoders]]\ncontext = 64\nmodel = '{other}'\n"
    assert refusal(config_of(model, more=f"{second}name = 'a'")).startswith(
        "decoders[0] and decoders[1] are both named a; give one another name"
    )
    served = f"served_as = ['x']\n[[decoders]]\ncontext = 64\nserved_as = ['x']\nmodel = '{other}'"
    assert refusal(config_of(model, more=served)).startswith(
        "decoders[0] and decoders[1] are both served as x and have different models"
    )
    twice = "served_as = ['x', 'x']"
    assert refusal(config_of(model, more=twice)).startswith("decoders[0].served_as has x twice")
    same = served.replace(str(other), str(model))
    assert len(checked(config_of(model, more=same)).decoders) == 2
    control = f"control = '{tmp_path}/s'\n"
    both = f"{control}[[decoders]]\ncontext = 64\nmodel = '{other}'\n{control}"
    assert refusal(config_of(model, more=both)).startswith(
        "decoders[1].control is that of decoders[0] too; give each its own"
    )


def test_a_control_socket_that_an_earlier_run_left_is_no_mistake(
    model: Path, tmp_path: Path
) -> None:
    left = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.bind(str(tmp_path / "s"))
    left.close()
    assert checked(config_of(model, more=f"control = '{tmp_path}/s'")).decoders


@pytest.mark.parametrize(
    ("requests", "said"),
    [
        ("route = 'auto'\nchunk = 4", "requests.chunk: route auto sets chunk by itself"),
        ("route = 'auto'\ngroup_layers = 4", "requests.group_layers: route auto sets group_la"),
    ],
)
def test_requests_that_no_owner_would_take_are_refused(
    model: Path, requests: str, said: str
) -> None:
    assert refusal(f"{config_of(model)}\n[requests]\n{requests}").startswith(said)


@pytest.mark.parametrize("host", ["", "http://x", "a b", "::1]:80", "host/"])
def test_a_host_that_is_none_is_refused(model: Path, host: str) -> None:
    assert refusal(config_of(model, http=f"host = '{host}'")).startswith(f"http.host is '{host}'")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", "127.0.0.1.nip.io"])
def test_beyond_this_host_only_with_a_key_or_by_intent(
    model: Path, host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(config_checks, "check_own", asked.append)
    http = f"host = '{host}'\n"
    said = refusal(config_of(model, http=http))
    assert said.startswith(f"http.host is {host} and nobody would be asked for a key")
    open_to_all = checked(config_of(model, http=f"{http}allow_open = true"))
    assert open_to_all.warnings == (f"http.host is {host} and anybody may use it",)
    assert asked == [host]
    monkeypatch.setenv(KEY_VARIABLE, "sk-1")
    assert checked(config_of(model, http=http)).warnings == ()
    monkeypatch.setenv(KEY_VARIABLE, " ")
    assert refusal(config_of(model, http=http)).startswith(f"{KEY_VARIABLE} is set and empty")
    monkeypatch.delenv(KEY_VARIABLE)
    keys = tmp_path / "keys"
    keys.write_text("sk-1\n")
    keys.chmod(0o600)
    assert checked(config_of(model, http=f"{http}api_key_file = '{keys}'")).warnings == ()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "300.1.1.1"])
def test_a_host_that_stands_for_no_address_is_refused(model: Path, host: str) -> None:
    """As `headrace serve` refuses it."""
    said = refusal(config_of(model, http=f"host = '{host}'\nallow_open = true"))
    assert said.startswith(f"http.host '{host}' is no address: ")
    other = refusal(config_of(model, http="host = '192.0.2.1'\nallow_open = true"))
    assert other.startswith("http.host '192.0.2.1' cannot be listened at: ")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_this_host_needs_no_key(model: Path, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_checks, "check_own", lambda host: None)  # it may have no IPv6
    assert checked(config_of(model, http=f"host = '{host}'")).warnings == ()


@pytest.mark.parametrize(
    "endpoint", ["c:4318", "ftp://x", "http://", "http://:80", "http://x:99999", "http://u:pw@x"]
)
def test_an_endpoint_that_is_none_is_refused_without_its_password(
    model: Path, endpoint: str
) -> None:
    said = refusal(f"{config_of(model)}\n[telemetry]\notlp_endpoint = '{endpoint}'")
    assert said.removeprefix("f: ").startswith("telemetry.otlp_endpoint ")
    assert "pw" not in said
    fine = "http://collector:4318/v1/traces"
    assert checked(f"{config_of(model)}\n[telemetry]\notlp_endpoint = '{fine}'").decoders


def test_an_endpoint_that_nothing_here_sends_to_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `headrace serve` refuses it, for want of the extra."""
    monkeypatch.delitem(sys.modules, "headrace.server.otel", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    text = config_of(model)
    said = refusal(f"{text}\n[telemetry]\notlp_endpoint = 'http://collector:4318'")
    assert said.startswith("telemetry.otlp_endpoint needs OpenTelemetry (")
    assert "pip install 'headrace[otel]'" in said
    assert checked(text).decoders


def test_more_lanes_or_slots_than_memory_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes(monkeypatch, lane=GIB, slot=GIB // 2, weights=0)
    said = refusal(config_of(model, own="context = 64\nlanes = 8"))
    assert said == (
        "decoders[0]: 8 lanes of 1.07 GB and 2 slots of 536.9 MB at 64 positions are 9.66 GB here, "
        "and this host has 8.59 GB; lower lanes, slots or context"
    )
    more = "[[decoders.sources]]\nslots = 16"
    assert refusal(config_of(model, own="context = 64\nlanes = 1", more=more)).startswith(
        "decoders[0]: 1 lane of 1.07 GB and 16 slots"
    )
    other = model_directory(tmp_path / "other")
    two = f"lanes = 2\n[[decoders]]\ncontext = 64\nlanes = 5\nmodel = '{other}'"
    assert refusal(config_of(model, more=two)).startswith("decoders[1]: 5 lanes")
    assert checked(config_of(model, own="context = 64\nlanes = 5")).decoders


def test_a_margin_is_left_to_the_processes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = config_of(model, own="context = 64\nlanes = 1")
    takes(monkeypatch, lane=8 * GIB - MEMORY_MARGIN_NBYTES, slot=0, weights=0)
    assert checked(text).decoders
    takes(monkeypatch, lane=8 * GIB - MEMORY_MARGIN_NBYTES + 1, slot=0, weights=0)
    assert refusal(text).startswith("decoders[0]: 1 lane of")


def test_what_may_not_fit_is_warned_of(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    takes(monkeypatch, lane=GIB, slot=1, weights=GIB)
    (warning,) = checked(config_of(model, own="context = 64\nlanes = 6")).warnings
    assert warning.startswith("lanes, slots and weights take up to 7.78 GB and 7.52 GB are avail")
    (warning,) = checked(config_of(model, own="context = 64\nlanes = 7")).warnings
    assert warning.endswith("this host has 8.59 GB: a model may not load")
    assert checked(config_of(model, own="context = 64\nlanes = 5")).warnings == ()
    null = "context = 64\ndecoder = 'null'\nlanes = 7"
    assert len(checked(config_of(model, own=null)).warnings) == 2  # this, and what is odd


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ("decoder = 'null'\nkeep_bytes = 1", "decoders[0].keep_bytes is 1 and decoder null keeps"),
        (
            "keep_bytes = 1\noptions = { keep_nbytes = 1 }",
            "decoders[0].keep_bytes is given and keep_nbytes in decoders[0].options; leave one out",
        ),
        (
            f"options = {{ long = '{'x' * 200_000}' }}",
            "decoders[0]: its settings are 2",
        ),
    ],
)
def test_options_that_no_owner_could_be_given_are_refused(model: Path, own: str, said: str) -> None:
    assert refusal(config_of(model, own=f"context = 64\n{own}")).startswith(said)


def test_an_owner_takes_the_longest_settings_that_pass(model: Path) -> None:
    """The bound is the kernel's: an argument just below it starts a process."""
    subprocess.run(["/bin/true", "--config=" + "x" * _ARGUMENT_NBYTES], check=True)
    with pytest.raises(OSError, match="Argument list too long"):
        subprocess.run(["/bin/true", "x" * (1 << 17)], check=False)


def test_what_only_a_start_can_tell_is_said(
    model: Path, monkeypatch: pytest.MonkeyPatch, other_python: str
) -> None:
    def unchecked(own: str, more: str = "") -> tuple[str, ...]:
        found = checked(config_of(model, own=f"context = 64\n{own}", more=more))
        return found.decoders[0].unchecked

    source = "[[decoders.sources]]\nsource = "
    assert unchecked("", f"{source}'torch'\n{source}'replay'") == ()
    assert unchecked("decoder = 'a:b'", f"{source}'c:d'\n{source}'c:d'") == (
        "the options of a:b",
        "the options of c:d",
    )
    python = f"python = '{other_python}'"
    assert unchecked(f"decoder = 'cuda'\n{python}") == ("the device of cuda",)
    assert unchecked("", f"{source}'cuda'\n{python}") == ("the device of cuda",)
    assert unchecked("decoder = 'cuda'", f"{source}'cuda'") == ()
    rngd = f"{source}'rngd'\n{python}\n"
    assert unchecked("", rngd) == ("the device of rngd",)
    assert unchecked("", f"{rngd}emulate = true") == ()
    atom = f"decoder = 'atom'\ncompiled = '{model}'\n{python}\noptions = "
    assert unchecked(f"{atom}{{}}") == ("the device of atom",)
    assert unchecked(f"{atom}{{ sdk = 'a:b' }}") == ()
    monkeypatch.setattr(config_checks, "can_measure", lambda: False)
    assert unchecked("") == ("options and sizes, which torch and transformers are needed for",)


def test_a_control_socket_that_may_not_be_looked_at_is_refused_by_its_name(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a directory of another user: of a service that runs, which is asked about beside it."""
    stat = Path.stat

    def closed(self: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if self == tmp_path / "s":
            raise PermissionError(errno.EACCES, "Permission denied")
        return stat(self, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", closed)
    assert refusal(config_of(model, more=f"control = '{tmp_path}/s'")) == (
        f"decoders[0].control: {tmp_path}/s cannot be looked at (Permission denied); ask as the "
        "user that runs the server"
    )
    nothing = refusal(config_of(model, more='control = "/tmp/a\\u0000b"'))
    assert nothing.startswith("decoders[0].control: /tmp/a\0b cannot be looked at (")
