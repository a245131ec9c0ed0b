"""The curl lines of the docs run against a server, and docs/serve.md's tables are the code's."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import inspect

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from headrace.server.bodies import MAX_SEED, ChatBody, CompletionBody, TokenizeBody
from headrace.server.fields import NEUTRAL_OF_CHAT, NEUTRAL_OF_COMPLETIONS, NEUTRAL_OF_MESSAGES
from headrace.server.terminals import STATUS, Terminal
from tests.docs.reading import PACKAGE, ROOT, section
from tests.served import CONTEXT, Served, decoder_table

SERVE = ROOT / "docs" / "serve.md"
WHERE = "http://127.0.0.1:8000"
_SH_FENCE = re.compile(r"^```sh\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    """The curl commands of a page's shell blocks, each with its continuation lines."""
    found = []
    for fence in _SH_FENCE.finditer(page.read_text(encoding="utf-8")):
        code = fence["code"].replace("\\\n", " ")
        found += [line.strip() for line in code.splitlines() if line.startswith("curl ")]
    return found


CASES = [(page, command) for page in (ROOT / "README.md", SERVE) for command in commands(page)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("served")
    with Served(directory, decoder_table("smollm2-135m")) as served:
        yield served


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not on PATH")
@pytest.mark.parametrize(("page", "command"), CASES, ids=lambda case: getattr(case, "stem", ""))
def test_a_curl_line_gets_what_it_asks_for(served: Served, page: Path, command: str) -> None:
    assert command.count(WHERE) == 1, f"{page.name}: {command}"
    done = subprocess.run(
        ["sh", "-c", f"{command.replace(WHERE, served.url)} -w '\\n%{{http_code}}'"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    body, _, status = done.stdout.rpartition("\n")
    assert status == "200", done.stdout
    if "/metrics" in command:
        assert body.startswith("# HELP")
    elif '"stream": true' in command:
        *events, done_event = [line.removeprefix("data: ") for line in body.split("\n") if line]
        assert done_event == "[DONE]"
        assert all(json.loads(event)["choices"] for event in events[:-1])
    else:
        assert isinstance(json.loads(body), dict)


def test_both_pages_have_curl_lines() -> None:
    assert {page.name for page, _ in CASES} == {"README.md", "serve.md"}
    paths = {command.split(WHERE)[1].split()[0] for command in commands(SERVE)}
    for path in ("models", "completions", "chat/completions"):
        assert f"/v1/{path}" in paths
    assert {"/health", "/ready", "/metrics", "/tokenize"} <= paths


def test_the_example_of_the_openai_package_runs(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("openai")
    indented = [
        line[4:]
        for line in section(SERVE, "Ask for text").splitlines()
        if line.startswith("    ") or not line
    ]
    code = "\n".join(indented)
    assert code.count(WHERE) == 1
    names: dict[str, Any] = {}
    exec(compile(code.replace(WHERE, served.url), str(SERVE), "exec"), names)
    names["client"].close()
    asked = {"model": "smollm2-135m", "prompt": "user: Name three colours.\nassistant: "}
    reply = httpx.post(f"{served.url}/tokenize", json=asked)
    num_tokens = CONTEXT - reply.json()["count"] + 1  # all that its context has room for
    assert names["chunk"].choices[0].finish_reason in ("length", "stop")
    assert 0 < len(capsys.readouterr().out) <= num_tokens


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head; names lose their backticks."""
    lines = [line for line in section(SERVE, heading).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def names(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


def test_every_path_that_is_served_is_listed_with_its_method() -> None:
    route = re.compile(r'Route\("(/[^"{]*).*methods=\["(\w+)"\]')
    files = (PACKAGE / "server").glob("*.py")
    found = [each for file in files for each in route.findall(file.read_text(encoding="utf-8"))]
    assert ("/trace/", "GET") in found
    listed = [name for cell, _ in rows("Start it") for name in sorted(names(cell))]
    told = [
        (path.rstrip("N").removesuffix("NAME"), method) for method, path in map(str.split, listed)
    ]
    assert sorted(told) == sorted(found)


RANGES = [
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "max_tokens",
    "logprobs",
    "top_logprobs",
    "group_layers",
    "deadline_s",
]


def ends(body: type, field: str) -> set[str]:
    """The least and the most that a number of a body may be, as the table has them."""
    info = inspect.type_info(body)
    assert isinstance(info, inspect.StructType)
    found: set[str] = set()
    for kind in (each.type for each in info.fields if each.encode_name == field):
        for number in kind.types if isinstance(kind, inspect.UnionType) else (kind,):
            if isinstance(number, inspect.IntType | inspect.FloatType):
                told = (number.ge, number.gt, number.le)
                found |= {
                    f"{end:g}" if end != MAX_SEED else "2^63-1" for end in told if end is not None
                }
    return found - {"1e+09"}  # 30 years are no range


@pytest.mark.parametrize("field", RANGES)
def test_the_ends_of_a_range_are_listed(field: str) -> None:
    expected = ends(CompletionBody, field) | ends(ChatBody, field)
    assert expected
    (text,) = [text for cell, _, text in rows("Fields") if field in names(cell)]
    for end in expected:
        assert re.search(rf"(?<![\d.]){re.escape(end)}\b", text), end


def test_every_field_that_is_served_is_listed_with_its_endpoints() -> None:
    listed: dict[str, set[str]] = {}
    for field, endpoints, _ in rows("Fields"):
        for name in names(field):
            assert name not in listed, name
            listed[name] = set(endpoints.split(", "))
    bodies = {"completions": CompletionBody, "chat": ChatBody, "tokenize": TokenizeBody}
    expected: dict[str, set[str]] = {}
    for endpoint, body in bodies.items():
        for name in body.__struct_fields__:
            expected.setdefault(name, set()).add(endpoint)
    assert listed == expected


def told(values: tuple[Any, ...]) -> str:
    """Values as the table has them."""
    return ", ".join(f"`{json.dumps(value)}`" for value in values) or "only `null`"


def test_every_field_that_is_taken_at_one_value_only_is_listed_with_it() -> None:
    by_endpoint: dict[str, Mapping[str, tuple[Any, ...]]] = {
        "completions": NEUTRAL_OF_COMPLETIONS,
        "chat": NEUTRAL_OF_CHAT,
        "messages": NEUTRAL_OF_MESSAGES,
    }
    expected = sorted(
        (name, endpoint, told(values))
        for endpoint, neutral in by_endpoint.items()
        for name, values in neutral.items()
    )
    listed = sorted(
        (name, endpoint, values)
        for field, endpoints, values in rows("Fields taken at one value")
        for name in names(field)
        for endpoint in endpoints.split(", ")
    )
    assert listed == expected


def test_every_way_to_end_is_listed_with_its_status() -> None:
    listed = {word: int(status) for status, cell, _ in rows("Statuses") for word in names(cell)}
    assert listed == {terminal.value: STATUS[terminal] for terminal in Terminal}
