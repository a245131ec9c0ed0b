"""Preflight against modules that are really missing, and against fakes that are broken in each way
that the vendor's packages, driver and card can be.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from headrace.engine.atom import probes as atom_probes
from headrace.engine.atom import smi
from headrace.engine.atom.environment import SETUP, VARIABLE
from headrace.engine.atom.preflight import MODULE, check
from headrace.engine.atom.probes import VERSIONS, Asked, probes, torch_needed
from headrace.engine.atom.rebellions import PACKAGES
from headrace.engine.probing import is_there
from headrace.errors import BackendUnavailable
from headrace.version import VERSION
from tests.unit.engine.atom.fake_site import (
    OPTIMUM,
    REBEL,
    SMI,
    TORCH,
    printing,
    write_facts,
    write_fake_site,
    write_fake_smi,
)

Install = Callable[..., Path]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in smi.CHOOSERS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts fake packages first on the path of this test's children, and a fake tool on PATH."""

    def put(
        changed: Mapping[str, str] | None = None, *, version: str = "0.12.0", does: str = ""
    ) -> Path:
        site = write_fake_site(tmp_path / "fake_site", changed, version=version)
        path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
        monkeypatch.setenv("PYTHONPATH", path)
        write_fake_smi(tmp_path / "bin", does or printing(SMI))
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
        return site

    return put


def unavailable(**options: object) -> BackendUnavailable:
    options = {"interpreter": sys.executable, **options}
    with pytest.raises(BackendUnavailable) as caught:
        check(**options)  # type: ignore[arg-type]
    assert caught.value.vendor == "rebellions"
    assert caught.value.detail
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(("card", "sdk"), [(True, True), (True, False), (False, True)])
def test_all_is_well_with_the_fakes(install: Install, card: bool, sdk: bool) -> None:
    install()
    told = check(sys.executable, card=card, sdk=sdk)
    assert [each.probe for each in told] == [
        probe.name for probe in probes(Asked(card=card, sdk=sdk))
    ]
    found = {each.probe: each.detail for each in told}
    assert all(each.state == "ok" and each.detail for each in told)
    assert found["packages"] == "optimum-rbln 0.12.0, rebel-compiler 0.12.0, torch 2.13.0+fake"
    if card:
        assert found["rbln-smi -j"] == "driver 3.5.1, 2 cards"
        card_found = "rbln0, RBLN-CA25, 0000:51:00.0, 0.0 of 15.7 GiB used"
        assert found["card of device 0"] == card_found
        assert found["contexts of device 0"] == "nobody uses it"
        assert found["rebel.get_npu_name(0)"] == "RBLN-CA25"
    assert ("torch" in found) == ("import optimum.rbln" in found) == sdk


@pytest.mark.skipif(is_there("rebel"), reason="the vendor's packages are here")
def test_what_is_really_missing_is_named() -> None:
    exc = unavailable()
    assert (exc.stage, exc.probe) == ("sdk_missing", "packages")
    assert "rebel-compiler not installed in" in exc.detail
    assert exc.hint == SETUP


@pytest.mark.skipif(is_there("rebel"), reason="the vendor's packages are here")
def test_without_rebel_compiler_nothing_of_optimum_is_imported(install: Install) -> None:
    """Its import fails in the middle: No module named 'rebel'."""
    site = install({"optimum/rbln/__init__.py": "import os; os.abort()"})
    for path in (site / "rebel").iterdir():
        path.unlink()
    (site / "rebel").rmdir()
    exc = unavailable()
    assert (exc.stage, exc.probe) == ("sdk_missing", "packages")
    assert exc.detail.startswith("rebel-compiler not installed in ")


@pytest.mark.parametrize("package", ["optimum-rbln", "rebel-compiler"])
@pytest.mark.parametrize("version", ["0.11.0.post1", "0.13.0", "0.120.0", "1.12.0"])
def test_an_sdk_of_another_version(install: Install, package: str, version: str) -> None:
    site = install()
    write_facts(site, package, version, ["torch==2.13.0+cpu"])
    exc = unavailable()
    assert (exc.stage, exc.probe, exc.hint) == ("api_missing", "packages", VERSIONS)
    assert exc.detail == f"{package} is {version}, and headrace was written for 0.12"


def test_a_later_patch_of_the_same_version(install: Install) -> None:
    install(version="0.12.1.post2")
    assert check(sys.executable)[1].detail.startswith("optimum-rbln 0.12.1.post2, ")


def test_a_package_of_no_version(install: Install) -> None:
    (install() / "rebel_compiler.dist-info" / "METADATA").unlink()
    exc = unavailable()
    assert (exc.stage, exc.probe) == ("api_missing", "packages")
    assert exc.detail.startswith("rebel-compiler is of no known version")


@pytest.mark.parametrize(
    ("needs", "stage", "detail"),
    [
        (
            ["torch==2.12.0+cpu"],
            "torch_mismatch",
            "torch is 2.13.0+fake, and optimum-rbln 0.12.0 needs 2.12.0+cpu",
        ),
        (["torchvision==1"], "api_missing", "optimum-rbln requires no torch, and not one"),
        (["torch>=2.13"], "api_missing", "optimum-rbln requires torch>=2.13, and not one"),
        (["torch==2.13.*"], "api_missing", "optimum-rbln requires torch==2.13.*, and not one"),
        (
            ["torch==2.13.0; os_name == 'x'", "torch==2.12.0; os_name == 'y'"],
            "api_missing",
            "optimum-rbln requires torch==2.13.0; os_name == 'x' and torch==2.12.0; os_name",
        ),
    ],
)
def test_the_torch_that_it_needs_is_read_and_not_guessed(
    install: Install, needs: list[str], stage: str, detail: str
) -> None:
    """Before torch is imported."""
    site = install({"torch/__init__.py": "import os; os.abort()"})
    write_facts(site, "optimum-rbln", "0.12.0", needs)
    exc = unavailable()
    assert (exc.stage, exc.probe) == (stage, "packages")
    assert exc.detail.startswith(detail)


def test_a_torch_that_says_another_version_than_it_was_installed_as(install: Install) -> None:
    install({"torch/__init__.py": TORCH.replace("2.13.0", "2.10.0")})
    exc = unavailable()
    assert (exc.stage, exc.probe) == ("torch_mismatch", "torch")
    assert exc.detail == "torch is 2.10.0+fake, and optimum-rbln 0.12.0 needs 2.13.0+cpu"


REBEL_FILE = "rebel/__init__.py"
OPTIMUM_FILE = "optimum/rbln/__init__.py"


@pytest.mark.parametrize(
    ("changed", "stage", "probe", "detail"),
    [
        (
            {"numpy/__init__.py": "raise ModuleNotFoundError(\"No module named 'numpy'\")"},
            *("sdk_missing", "numpy", "ModuleNotFoundError: No module named 'numpy'"),
        ),
        (
            {"torch/__init__.py": "raise ImportError('libc10.so: cannot open')"},
            *("sdk_missing", "torch", "ImportError: libc10.so: cannot open"),
        ),
        (
            {REBEL_FILE: "raise FileNotFoundError('Could not find librbln.so')"},
            *("sdk_missing", "import rebel", "FileNotFoundError: Could not find librbln.so"),
        ),
        (
            {REBEL_FILE: "import os; os.abort()"},
            *("sdk_missing", "import rebel", "the process was ended by SIGABRT"),
        ),
        (
            {REBEL_FILE: REBEL.replace("def device_count", "def count")},
            *("api_missing", "calls of rebel", "it has no device_count"),
        ),
        (
            {"rebel/kv_cache.py": "def aligned(numel): pass\n"},
            *("api_missing", "calls of rebel", "it has no kv_cache.aligned_tensor"),
        ),
        (
            {"rebel/kv_cache.py": "raise ImportError('gone')\n"},
            *("api_missing", "calls of rebel", "ImportError: gone"),
        ),
        (
            {OPTIMUM_FILE: "import transformers_of_another_version"},
            "sdk_missing",
            "import optimum.rbln",
            "ModuleNotFoundError: No module named 'transformers_of_another_version'",
        ),
        (
            {OPTIMUM_FILE: "import os; os._exit(0)"},
            *("sdk_missing", "import optimum.rbln", "the process ended with exit status 0"),
        ),
        (
            {OPTIMUM_FILE: OPTIMUM.replace("from_pretrained", "load")},
            "api_missing",
            "calls of optimum.rbln",
            "it has no RBLNAutoModelForCausalLM.from_pretrained",
        ),
    ],
)
def test_what_is_broken_in_the_packages_is_typed(
    install: Install, changed: dict[str, str], stage: str, probe: str, detail: str
) -> None:
    install(changed)
    exc = unavailable(card=False)
    assert (exc.stage, exc.probe, exc.detail) == (stage, probe, detail)


def test_an_import_that_hangs_is_ended_and_named(install: Install) -> None:
    install({REBEL_FILE: "import time; time.sleep(60)"})
    exc = unavailable(card=False, timeout_s=2.0)
    assert (exc.stage, exc.probe) == ("sdk_missing", "import rebel")
    assert exc.detail == "it hung, and was ended after 2 s"


NO_CARD = '{"KMD_version": "3.5.1", "devices": [], "contexts": []}'


@pytest.mark.parametrize(
    ("does", "stage", "probe", "detail"),
    [
        (
            "echo cannot open /dev/rsd0 >&2; exit 1",
            *("driver_missing", "rbln-smi -j"),
            "it ended with exit status 1: cannot open /dev/rsd0",
        ),
        (
            "echo hello",
            *("api_missing", "rbln-smi -j"),
            "rbln-smi printed something else: hello (JSON is malformed: "
            "invalid character (byte 0))",
        ),
        (
            printing(NO_CARD),
            *("no_device", "rbln-smi -j", "it lists no card, and the kernel has none"),
        ),
        (
            printing(SMI.replace("RBLN-CA25", "RBLN-CR13")),
            *("no_device", "card of device 0"),
            "it is RBLN-CR13, and headrace was written for RBLN-CA*: others keep the rows of a "
            "sliding window in another order",
        ),
        (
            printing(SMI.replace('"npu": 1, "pid"', '"npu": 0, "pid"')),
            *("device_busy", "contexts of device 0", "rbln0: used by python3 (pid 4711, 3.5GiB)"),
        ),
        (
            printing(SMI.replace('"npu": 0', '"npu": 1')),
            *("device_busy", "contexts of device 0"),
            "rbln0, or rbln1, which rbln-smi gives the same number: used by python3 (pid 4711, "
            "3.5GiB)",
        ),
    ],
)
def test_what_the_tool_says_against_a_card_is_typed(
    install: Install, does: str, stage: str, probe: str, detail: str
) -> None:
    """Before any module of the vendor's is imported."""
    install({REBEL_FILE: "import os; os.abort()"}, does=does)
    exc = unavailable()
    assert (exc.stage, exc.probe, exc.detail) == (stage, probe, detail)


@pytest.mark.parametrize(
    ("changed", "probe", "detail"),
    [
        (
            REBEL.replace("return index < len(names)", "return False"),
            "rebel.npu_is_available(0)",
            "it is false, and rebel.device_count() is 2",
        ),
        (
            REBEL.replace("return names[index] if index < len(names) else None", "return None"),
            *("rebel.get_npu_name(0)", "it is None"),
        ),
        (
            REBEL.replace("RBLN-CA25", "RBLN-CR03"),
            "rebel.get_npu_name(0)",
            "it is RBLN-CR03, and headrace was written for RBLN-CA*: others keep the rows of a "
            "sliding window in another order",
        ),
        (
            f"{REBEL}\ndef npu_is_available(index):\n    raise RuntimeError('no driver')\n",
            *("rebel.npu_is_available(0)", "RuntimeError: no driver"),
        ),
    ],
)
@pytest.mark.parametrize("sdk", [True, False])
def test_what_the_runtime_says_against_a_card_is_typed(
    install: Install, changed: str, probe: str, detail: str, sdk: bool
) -> None:
    """Before optimum.rbln is imported, which takes seconds."""
    install({REBEL_FILE: changed, OPTIMUM_FILE: "import os; os.abort()"})
    exc = unavailable(sdk=sdk)
    assert (exc.stage, exc.probe, exc.detail) == ("no_device", probe, detail)


def test_a_card_that_others_use_is_shared_knowingly(install: Install) -> None:
    install()
    exc = unavailable(device=1)
    assert (exc.stage, exc.probe) == ("device_busy", "contexts of device 1")
    told = {each.probe: each.detail for each in check(sys.executable, device=1, share=True)}
    assert told["contexts of device 1"] == "shared with python3 (pid 4711, 3.5GiB)"
    assert told["rebel.get_npu_name(1)"] == "RBLN-CA25"


def test_a_driver_whose_cards_the_tool_does_not_see(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_fake_smi(tmp_path / "bin", printing(NO_CARD))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "class" / "rbln0").mkdir(parents=True)
    monkeypatch.setattr(smi, "_CLASS", tmp_path / "class")
    with pytest.raises(BackendUnavailable, match="and the kernel has rbln0") as caught:
        atom_probes._driver(Asked())
    assert caught.value.stage == "driver_missing"


def test_a_headrace_of_another_version(install: Install) -> None:
    site = install({REBEL_FILE: "import os; os.abort()"})
    (site / "sitecustomize.py").write_text(
        "import sys, types\nother = types.ModuleType('headrace.version')\n"
        "other.VERSION = '0.0.9'\nsys.modules['headrace.version'] = other\n"
    )
    exc = unavailable(card=False)
    assert (exc.stage, exc.probe) == ("api_missing", "headrace")
    assert exc.detail == f"the decoder's headrace is 0.0.9, and this one is {VERSION}"


def test_by_hand_it_shows_the_same(install: Install) -> None:
    install({OPTIMUM_FILE: OPTIMUM.replace("from_pretrained", "load")})
    command = [sys.executable, "-m", MODULE, "--device=1", "--share"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "card of device 1\n  ok: rbln1, RBLN-CA25, " in done.stdout
    said = "  api_missing: it has no RBLNAutoModelForCausalLM.from_pretrained. Name a Python with"
    assert done.stdout.splitlines()[-1].startswith(said)


def test_the_hints_name_each_way_to_another_python() -> None:
    for hint in (SETUP, VERSIONS):
        assert VARIABLE in hint
        assert "--decoder-python" in hint


def test_the_packages_whose_versions_count_are_looked_for() -> None:
    assert {*atom_probes.PACKAGES, "torch"} == set(PACKAGES)


@pytest.mark.skipif(not is_there("optimum.rbln"), reason="no optimum-rbln here")
def test_the_real_optimum_says_which_torch_it_needs() -> None:
    assert torch_needed().partition("+")[0].count(".") == 2
