"""The image's recipe as it stands: nobody builds it here, so what it says is what is tested."""

from __future__ import annotations

import ast
import fnmatch
import json
import re
import shlex
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from headrace.cli.serve import ServeOptions
from headrace.server.config import HttpConfig
from headrace.server.config_file import read_config

ROOT = Path(__file__).parents[3]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """Each instruction and its arguments, continued lines joined."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    text = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
    found = [line.partition(" ") for line in text.splitlines() if line.strip()]
    return [(name, rest.strip()) for name, _, rest in found]


def last_stage() -> list[tuple[str, str]]:
    """What the image itself is made of."""
    all_of_it = instructions()
    begun = max(index for index, (name, _) in enumerate(all_of_it) if name == "FROM")
    return all_of_it[begun:]


def of(name: str) -> list[str]:
    return [rest for each, rest in last_stage() if each == name]


def test_every_instruction_is_one_that_docker_knows() -> None:
    known = {"CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN"}
    known |= {"STOPSIGNAL", "USER", "VOLUME", "WORKDIR"}
    assert {name for name, _ in instructions()} <= known
    assert [rest.split()[0] for name, rest in instructions() if name == "FROM"] == [
        "python:3.12-slim"
    ] * 2


def test_it_runs_as_a_user_without_privileges() -> None:
    (user,) = of("USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)  # a number, so that a cluster can check it
    stage = [name for name, _ in last_stage()]
    assert stage.index("USER") > max(i for i, name in enumerate(stage) if name in ("RUN", "COPY"))
    made = next(rest for rest in of("RUN") if "useradd" in rest)
    assert f"--uid {user.partition(':')[0]} " in made


def test_it_starts_the_server_itself_and_stops_it_by_the_signal_that_drains() -> None:
    entrypoint, command = (json.loads(of(name)[0]) for name in ("ENTRYPOINT", "CMD"))
    assert (entrypoint, command[0]) == (["headrace"], "serve")
    assert of("STOPSIGNAL") == ["SIGTERM"]
    flags = {word.removeprefix("--").replace("-", "_") for word in command if word[:2] == "--"}
    assert flags <= set(ServeOptions.__dataclass_fields__)
    port = command[command.index("--port") + 1]
    assert of("EXPOSE") == [port] == [str(HttpConfig().port)]


def test_its_health_check_asks_the_server_in_the_container() -> None:
    (check,) = of("HEALTHCHECK")
    options, _, command = check.partition("CMD ")
    assert re.fullmatch(r"(--[a-z-]+=\d+s? ){4}", options)
    words = json.loads(command)
    assert words[:2] == ["python", "-c"]
    calls = [node for node in ast.walk(ast.parse(words[2])) if isinstance(node, ast.Call)]
    (asked,) = (ast.literal_eval(call.args[0]) for call in calls)
    url = urlsplit(asked)
    assert (url.hostname, url.port, url.path) == ("127.0.0.1", HttpConfig().port, "/health")


def copied() -> list[str]:
    """What is copied from the repository."""
    found: list[str] = []
    for name, rest in instructions():
        if name == "COPY" and "--from" not in rest:
            found += shlex.split(rest)[:-1]
    return found


def test_it_copies_what_is_there_and_what_the_build_is_sent() -> None:
    rules = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [rule for rule in rules if rule and not rule.startswith("#")]
    assert rules[0] == "*"  # nothing is sent but what is named
    sent = {rule[1:] for rule in rules if rule.startswith("!")}
    assert set(copied()) == sent
    for name in sent:
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("name", ["models", "cache", ".git", "tests", "weights.safetensors"])
def test_nothing_else_is_sent(name: str) -> None:
    assert not any(fnmatch.fnmatch(name, each) for each in copied())


def test_packages_are_those_of_the_constraints_and_torch_is_that_for_cpus() -> None:
    (install,) = (rest for name, rest in instructions() if name == "RUN" and "pip" in rest)
    words = shlex.split(install)
    assert words[words.index("--constraint") + 1] == "constraints.txt"
    assert words[words.index("--extra-index-url") + 1].endswith("/whl/cpu")
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    extras = re.fullmatch(r"\.\[(.*)\]", words[-1])
    assert extras is not None
    metadata = (ROOT / "pyproject.toml").read_text()
    for extra in extras[1].split(","):
        assert re.search(rf"^{extra} = \[", metadata, re.MULTILINE), extra


def test_models_are_in_a_volume_and_none_is_in_the_image() -> None:
    (volume,) = of("VOLUME")
    environment = " ".join(of("ENV"))
    assert f"HEADRACE_CACHE={volume}" in environment
    made = next(rest for rest in of("RUN") if "install" in rest)
    assert volume in made  # owned by the user before it becomes a volume
    for decoder in read_config(ROOT / "deploy" / "headrace.toml").decoders:
        assert str(Path(decoder.control or "").parent) in made
    assert "models pull" not in " ".join(rest for _, rest in instructions())
