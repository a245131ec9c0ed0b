"""The dashboard and the alarms ask only for what a server exposes, by labels that it has."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from headrace.server import label_words as words
from headrace.server.terminals import STATUS, Terminal
from tests.unit.server import happenings

DEPLOY = Path(__file__).parents[3] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "headrace.json"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
ALERT_TESTS = DEPLOY / "prometheus" / "alerts_test.yml"

_SELECTOR = re.compile(r"\b((?:headrace|process)_\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)(=~|!=|!~|=)"([^"]*)"')
_AGGREGATION = re.compile(r"\b(?:by|on) \(([^)]*)\)")

VALUES: dict[tuple[str, str], set[str]] = {
    ("headrace_requests", "endpoint"): set(words.ENDPOINTS),
    ("headrace_requests", "terminal"): {each.value for each in Terminal},
    ("headrace_requests", "status"): {*map(str, STATUS.values())},
    ("headrace_handoffs", "outcome"): set(words.OUTCOMES),
    ("headrace_progress_rejects", "reason"): set(words.REJECTS),
    ("headrace_sources", "state"): set(words.SOURCE_STATES),
    ("headrace_transfer_tail_seconds", "route"): set(words.ROUTES),
    ("headrace_kv_import_time_seconds", "route"): set(words.ROUTES),
}


def yaml_of(path: Path) -> Any:
    return importlib.import_module("yaml").safe_load(path.read_text(encoding="utf-8"))


@cache
def exposed() -> dict[str, set[str]]:
    """Every sample of a server that has seen one of each event, with its labels."""
    metrics = happenings.metrics()
    for event in happenings.one_of_each():
        metrics.take(event)
    found: dict[str, set[str]] = {}
    for family in metrics._on.registry.collect():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@cache
def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


def panels() -> list[dict[str, Any]]:
    return [each for each in dashboard()["panels"] if each["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml_of(ALERTS)["groups"] for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str]]:
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for rule in rules():
        yield rule["alert"], rule["expr"]


def mistakes(expression: str) -> list[str]:
    """What of an expression no server exposes."""
    found, labels = [], {"instance", "job"}
    for name, matchers in _SELECTOR.findall(expression):
        if name not in exposed():
            found.append(name)
            continue
        labels |= exposed()[name]
        family = re.sub(r"_(total|bucket|count|sum)$", "", name)
        for label, _, value in _MATCHER.findall(matchers):
            if label not in exposed()[name] | {"instance", "job"}:
                found.append(f"{name}{{{label}}}")
            known = VALUES.get((family, label))
            if known is not None and "$" not in value:
                every = "|".join(sorted(known))
                parts = value.split("|")
                found += [part for part in parts if not re.search(rf"\b{part}\b", every)]
    for group in _AGGREGATION.findall(expression):
        found += [label for label in re.split(r",\s*", group) if label not in labels]
    return found


@pytest.mark.parametrize(("title", "expression"), list(expressions()))
def test_every_expression_asks_for_what_is_exposed(title: str, expression: str) -> None:
    assert _SELECTOR.search(expression), title
    assert mistakes(expression) == []
    assert expression.count("(") == expression.count(")")


@pytest.mark.parametrize(
    "expression",
    [
        "rate(headrace_nothing_total[5m])",
        'headrace_lanes{source="torch"}',
        "sum by (route) (headrace_lanes)",
        'headrace_requests_total{terminal="queue-fulll"}',
        'headrace_handoffs_total{outcome=~"corrupt|mal-formed"}',
        'headrace_sources{state="in-service"}',
    ],
)
def test_what_is_not_exposed_is_found(expression: str) -> None:
    assert len(mistakes(expression)) == 1


def test_the_dashboard_is_whole() -> None:
    board = dashboard()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels():
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["title"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
    names = [variable["name"] for variable in board["templating"]["list"]]
    assert names == ["datasource", "instance", "decoder", "model"]
    for variable in board["templating"]["list"][1:]:
        assert mistakes(variable["definition"]) == []
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(panels())))
    assert used == {*names, "__rate_interval"}
    rows = [each["title"] for each in board["panels"] if each["type"] == "row"]
    assert rows == [
        "Traffic and errors",
        "Time to first token and token time",
        "Queue",
        "Transfer",
        "Owners",
        "Routes and fallbacks",
        "The server's process",
    ]


def test_no_panel_covers_another() -> None:
    taken = dict[tuple[int, int], str]()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


def test_all_that_only_headrace_has_is_on_the_dashboard() -> None:
    drawn = json.dumps(panels())
    for name in exposed():
        base = re.sub(r"_(bucket|count|sum)$", "", name)
        if base.startswith("headrace_") and base not in LEFT_OUT:
            assert base in drawn, base


LEFT_OUT = {
    "headrace_request_time_per_output_token_seconds",  # the time between tokens is drawn
}


def test_alarms_say_what_they_mean_and_how_urgent_they_are() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["alert"].startswith("Headrace")
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"].endswith(".")


def test_the_operators_guide_says_what_to_do_about_each_alarm() -> None:
    guide = (DEPLOY.parent / "docs" / "operate.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| (Headrace\w+) \|", guide, re.M) == [rule["alert"] for rule in rules()]


def test_each_alarm_is_tried_as_firing_and_as_silent() -> None:
    tried: dict[str, set[bool]] = {}
    for scene in yaml_of(ALERT_TESTS)["tests"]:
        for each in scene["alert_rule_test"]:
            tried.setdefault(each["alertname"], set()).add(bool(each["exp_alerts"]))
    assert tried == {rule["alert"]: {True, False} for rule in rules()}


def test_prometheus_itself_finds_that_alarms_fire_as_they_should() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: it comes with Prometheus")
    for command in (["check", "rules", ALERTS.name], ["test", "rules", ALERT_TESTS.name]):
        done = subprocess.run(
            [promtool, *command],
            cwd=ALERTS.parent,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
