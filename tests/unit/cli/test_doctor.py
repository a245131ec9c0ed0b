from __future__ import annotations

import json
import mmap
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App, CycloptsError

from headrace import memory
from headrace.backends.load import DECODERS, SOURCES
from headrace.cli import imports
from headrace.cli.doctor import Probe, Report, _backend, doctor
from headrace.cli.findings import Finding
from headrace.cli.imports import ImportResult, Imports
from headrace.engine import capacity, models
from headrace.engine.atom import environment
from headrace.engine.environments import RNGD
from headrace.errors import Refused

# The package gives this name to the command, so that an import statement would find the function.
cli = import_module("headrace.cli.doctor")

app = App(name="headrace")
app.command(doctor)


def call(*arguments: str) -> object:
    return app(
        ["doctor", *arguments],
        exit_on_error=False,
        print_error=False,
        result_action="return_value",
    )


class Told(Imports):
    """What the child would have said, without a child; `errors` by module."""

    def __init__(self, **errors: str) -> None:
        super().__init__()
        facts: dict[str, dict[str, Any]] = {
            "torch": {"version": "9.9", "threads": 3},
            "transformers": {"version": "8.8"},
            "cuda": {"devices": []},
        }
        self._results = {
            module: ImportResult(module, errors.get(module.rpartition(".")[2], ""), facts[module])
            if module in facts and module not in errors
            else ImportResult(module, errors.get(module.rpartition(".")[2], ""))
            for module in imports.modules()
        }


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    for variable in (RNGD.variable, environment.VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes every doctor of this test hear these import errors."""

    def tell(**errors: str) -> None:
        monkeypatch.setattr(cli, "Imports", lambda: Told(**errors))

    return tell


def find(name: str) -> Finding:
    report: Report = cli.examine()
    return next(finding for finding in report.findings if finding.name == name)


def test_doctor_says_that_the_cpu_path_can_run(
    told: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    told()
    assert call() == 0
    lines = capsys.readouterr().out.splitlines()
    names = {line[:14].strip() for line in lines}
    assert {"cpu", "memory", "shared memory", "pidfd", "control socket", "python"} <= names
    assert {f"source {name}" for name in SOURCES} | {f"decoder {name}" for name in DECODERS} < names
    assert lines[-1].startswith("the CPU path can run")
    assert "run: headrace models pull smollm2-135m" in "\n".join(lines)


def test_doctor_says_what_to_install_in_full(
    told: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(name: str) -> str:
        raise cli.PackageNotFoundError(name)

    monkeypatch.setattr(cli, "version", version)
    missing = "ModuleNotFoundError: No module named 'torch'"
    told(torch=missing, cpu=missing)
    assert call() == 1
    shown = capsys.readouterr().out
    assert "pip install 'headrace[cpu]'" in shown  # and not eaten as markup
    assert "cannot run here yet: torch, source torch, decoder cpu" in shown


def test_json_is_one_object(told: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    told()
    assert call("--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["cpu_path"] is True
    found = {finding["name"]: finding for finding in report["findings"]}
    assert found["cpu"]["facts"]["usable"] == len(os.sched_getaffinity(0))
    assert found["torch"]["facts"] == {"version": "9.9", "threads": 3, "cuda": []}
    assert found["memory"]["facts"]["available_nbytes"] > 0


@pytest.mark.parametrize("arguments", [["--yaml"], ["twice"], ["--no-json"]])
def test_wrong_arguments_are_the_parsers_errors(arguments: list[str]) -> None:
    with pytest.raises(CycloptsError):
        call(*arguments)


@pytest.mark.parametrize(
    ("error", "found", "advice"),
    [
        (OSError(13, "denied"), "PermissionError: [Errno 13] denied", "do this"),
        (Refused("said why.\nmore"), "said why.", ""),
        (RuntimeError(), "RuntimeError: no reason given", "do this"),
    ],
)
def test_a_probe_that_raises_becomes_a_line(error: Exception, found: str, advice: str) -> None:
    def look() -> Finding:
        raise error

    assert cli._try(Probe("x", look, "do this")) == Finding("x", "failed", found, advice)


def test_what_costs_comfort_does_not_fail_the_cpu_path(
    told: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    told(replay="ImportError: broken")
    monkeypatch.setattr(cli, "_MEMINFO", Path("/no/such/file"))
    report = cli.examine()
    assert report.cpu_path
    verdict, _, others = report.verdict.partition("; see also: ")
    assert verdict == "the CPU path can run"
    assert {"memory", "source replay"} <= set(others.split(", "))


def test_a_vendor_environment_never_fails_the_cpu_path(told: Callable[..., None]) -> None:
    told()
    report = cli.examine()
    assert report.cpu_path
    found = {finding.name: finding.status for finding in report.findings}
    vendors = ["source rngd", "rngd card", "decoder atom", "atom card"]
    assert {name: found[name] for name in vendors} == dict.fromkeys(vendors, "note")
    elsewhere = {"headrace.backends.rngd", "headrace.backends.atom"}
    assert not elsewhere & set(imports.modules())


def test_what_is_needed_fails_the_cpu_path(
    told: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memfd(*arguments: object) -> int:
        raise OSError(38, "Function not implemented")

    told()
    monkeypatch.setattr(os, "memfd_create", no_memfd)
    report = cli.examine()
    assert not report.cpu_path
    assert report.verdict.endswith("cannot run here yet: shared memory")


def test_another_system_is_told(told: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_release() -> dict[str, str]:
        raise OSError

    told()
    monkeypatch.setattr(platform, "system", lambda: "Plan9")
    monkeypatch.setattr(platform, "freedesktop_os_release", no_release)
    finding = find("system")
    assert (finding.status, finding.found[:24]) == ("failed", "a system without os-rele")


def test_a_cpu_without_a_name_is_told_by_its_kind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cpuinfo").write_text("processor: 0\n")
    monkeypatch.setattr(cli, "_CPUINFO", tmp_path / "cpuinfo")
    assert cli._cpu().facts["model"] == platform.machine()


@pytest.mark.parametrize(
    ("membership", "files", "limits"),
    [
        ("0::/a/b\n", {"memory.max": "max", "a/memory.max": "9", "a/b/memory.max": "7"}, [9, 7]),
        ("4:cpu,memory:/a\n1:name=x:/\n", {"memory/a/memory.limit_in_bytes": "5"}, [5]),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, []),
        ("0::/../gone\n", {}, []),
        (None, {}, []),
    ],
)
def test_cgroup_limits(
    membership: str | None,
    files: dict[str, str],
    limits: list[int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if membership is not None:
        (tmp_path / "cgroup").write_text(membership)
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(f"{text}\n")
    monkeypatch.setattr(cli, "_OWN_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(cli, "_CGROUP_ROOT", tmp_path / "fs")
    assert list(cli._cgroup_limits()) == limits


def test_short_memory_and_its_limit_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "available_nbytes", lambda: 10_000_000)
    monkeypatch.setattr(cli, "_cgroup_limits", lambda: iter([20_000_000, 30_000_000]))
    finding = cli._memory()
    assert finding.status == "note"
    assert finding.found.endswith("cgroup limit 20.0 MB")
    monkeypatch.setattr(capacity, "available_nbytes", lambda: 1 << 40)
    assert cli._memory().status == "ok"


def test_two_mappings_that_differ_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def another(fd: int, nbytes: int) -> memory.Slab:
        os.close(fd)
        return memory.Slab.create(nbytes)

    monkeypatch.setattr(cli.Slab, "attach", another)
    assert cli._shared_memory().status == "failed"


def test_a_kernel_without_populate_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "MADV_POPULATE_WRITE", 9999)
    finding = cli._prefault()
    assert (finding.status, finding.found[-16:]) == ("note", "Invalid argument")
    assert mmap.PAGESIZE <= cli.SLAB_NBYTES


@pytest.mark.parametrize(("mode", "status"), [("never", "note"), ("madvise", "ok")])
def test_huge_page_modes(mode: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "hugepages", lambda: memory.HugePages(mode, "never", 2))
    finding = cli._huge_pages()
    assert (finding.status, finding.facts["num_reserved"]) == (status, 2)


def test_a_pidfd_that_tells_nothing_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    readable, writable = os.pipe()
    os.close(writable)  # hung up, and so "dead" from the start
    monkeypatch.setattr(os, "pidfd_open", lambda pid: readable)
    monkeypatch.setattr(cli.signal, "pidfd_send_signal", lambda *arguments: None)
    assert cli._pidfd().status == "failed"


def test_a_broken_torch_is_not_called_missing() -> None:
    finding = cli._torch(Told(torch="OSError: libfoo.so"))
    assert finding.status == "failed"
    assert finding.found.endswith("is installed, but: OSError: libfoo.so")
    assert "import torch" in finding.advice
    assert cli._transformers(Told(transformers="ImportError: x")).status == "failed"


def test_cuda_is_told_apart_from_torch() -> None:
    assert cli._torch(Told(cuda="RuntimeError: driver")).found.endswith("CUDA RuntimeError: driver")
    both = Told()
    assert both._results is not None
    both._results["cuda"] = ImportResult("cuda", facts={"devices": ["A", "B"]})
    assert cli._torch(both).found == "9.9, 3 threads, A, B"


def test_pulled_models_are_named(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    statuses = [
        models.ModelStatus(model, model.name == "smollm2-135m", cache, 1)
        for model in cli.BUILTIN_MODELS.values()
    ]
    monkeypatch.setattr(models, "list_models", lambda: statuses)
    assert cli._models().found == f"smollm2-135m in {cache}"


def as_child(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Runs `script` in place of the child's own."""
    real = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        return real([command[0], "-c", script], **options)

    monkeypatch.setattr(subprocess, "run", run)


FIRST = imports.modules()[0]


def test_a_child_that_crashes_is_told_by_what_it_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    line = json.dumps({"module": FIRST})
    as_child(
        monkeypatch, f"import os; print('banner'); print('''{line}''', flush=True); os.abort()"
    )
    told = Imports()
    second = imports.modules()[1]
    assert told.result(FIRST).error == ""
    assert told.result("torch").error == f"importing {second}: signal 6"


def test_a_child_that_exits_is_told_by_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    as_child(monkeypatch, "raise SystemExit(3)")
    assert Imports().result("torch").error == f"importing {FIRST}: exit status 3"


def test_a_child_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "IMPORTS_TIMEOUT_S", 0.3)
    as_child(monkeypatch, "import threading; threading.Event().wait()")
    assert "not known: it took more than" in Imports().result("torch").error


def test_the_child_tells_each_module(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(imports, "modules", lambda: ["torch", "cuda", "json", "no_such_module"])
    imports.tell_imports()
    told = list(imports._results_in(capsys.readouterr().out.encode().splitlines()))
    assert [result.module for result in told] == ["torch", "cuda", "json", "no_such_module"]
    assert told[0].facts["threads"] >= 1
    assert [bool(result.error) for result in told] == [False, False, False, True]


def test_a_real_child_imports_every_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "IMPORTS_TIMEOUT_S", 120.0)  # whatever else this machine does
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    told = Imports()
    assert {module: told.result(module).error for module in imports.modules()} == dict.fromkeys(
        imports.modules(), ""
    )


@pytest.mark.parametrize(
    ("devices", "told"), [([], "there is no CUDA device here"), (["a GPU"], "available")]
)
def test_cuda_is_available_where_there_is_a_device_to_run_it_on(
    devices: list[str], told: str
) -> None:
    imports = Imports()
    imports._results = {
        "headrace.backends.cuda": ImportResult("headrace.backends.cuda"),
        "cuda": ImportResult("cuda", facts={"devices": devices}),
    }
    finding = _backend(imports, "decoder cuda", "headrace.backends.cuda:open")
    assert (finding.status, told in finding.found) == ("ok", True)
