"""Preflight against modules that are really missing, against fakes that are broken in each way that
a vendor's library can be, and against the real packages where they are.
"""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from headrace.engine.environments import RNGD
from headrace.engine.rngd import furiosa, geometry
from headrace.engine.rngd.preflight import MODULE, check
from headrace.engine.rngd.probes import COMPILER, FAMILIES, SETUP, Asked, probes
from headrace.errors import BackendUnavailable
from headrace.version import VERSION
from tests.unit.engine.rngd.fake_site import (
    REGISTER,
    SMI,
    TORCH,
    TORCH_FURIOSA,
    write_fake_site,
)

Install = Callable[..., Path]

TOOLCHAIN = "#!/bin/sh\n"
FURIOSA = "furiosa/torch/__init__.py"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts fakes first on the path of the children of this test, and a fake compiler on PATH."""

    def put(changed: Mapping[str, str] | None = None, *, version: str = "2026.4.0") -> Path:
        site = write_fake_site(tmp_path / "fake_site", changed, version=version)
        path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
        monkeypatch.setenv("PYTHONPATH", path)
        compiler = tmp_path / "bin" / COMPILER
        compiler.parent.mkdir()
        compiler.write_text(TOOLCHAIN)
        compiler.chmod(0o755)
        monkeypatch.setenv("PATH", f"{compiler.parent}{os.pathsep}{os.environ['PATH']}")
        return site

    return put


def unavailable(**options: object) -> BackendUnavailable:
    options = {"interpreter": sys.executable, "emulate": False, **options}
    with pytest.raises(BackendUnavailable) as caught:
        check(**options)  # type: ignore[arg-type]
    assert caught.value.vendor == "furiosa"
    assert caught.value.detail
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize("emulate", [True, False])
def test_all_is_well_with_the_fakes(install: Install, emulate: bool) -> None:
    install()
    told = check(sys.executable, emulate=emulate)
    asked = Asked(emulate=emulate)
    assert [each.probe for each in told] == [probe.name for probe in probes(asked)]
    assert all(each.state == "ok" and each.detail for each in told)


@pytest.mark.skipif(find_spec("furiosa") is not None, reason="the vendor's packages are here")
@pytest.mark.parametrize("emulate", [True, False])
def test_what_is_really_missing_is_named(emulate: bool) -> None:
    exc = unavailable(emulate=emulate)
    assert (exc.stage, exc.probe) == ("sdk_missing", "packages")
    missing = "furiosa-torch and furiosa-kernels and furiosa-smi and furiosa-tcc not installed in"
    assert missing in exc.detail
    assert "headrace rngd setup" in exc.hint


def test_an_interpreter_that_is_none(tmp_path: Path) -> None:
    exc = unavailable(interpreter=str(tmp_path / "python"))
    assert exc.stage == "sdk_missing"
    assert exc.detail == "it cannot be run: No such file or directory"


def test_an_environment_without_headrace(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(bare.stat().st_mode | stat.S_IXUSR)
    exc = unavailable(interpreter=str(bare))
    assert exc.stage == "sdk_missing"
    assert "exit status 1, after:" in exc.detail
    assert "No module named 'headrace'" in exc.detail


@pytest.mark.parametrize(
    ("changed", "stage", "probe", "detail"),
    [
        (
            {"torch/__init__.py": TORCH.replace("2.10.0", "2.13.0")},
            "torch_mismatch",
            "torch",
            "torch is 2.13.0+fake, and furiosa-torch 2026.4.0 needs 2.10.0",
        ),
        (
            {"torch/__init__.py": "raise ImportError('libcudart.so.12: cannot open')"},
            "sdk_missing",
            "torch",
            "ImportError: libcudart.so.12: cannot open",
        ),
        (
            {"numpy/__init__.py": "raise ModuleNotFoundError(\"No module named 'numpy'\")"},
            "sdk_missing",
            "numpy",
            "ModuleNotFoundError: No module named 'numpy'",
        ),
        (
            {FURIOSA: "raise OSError('undefined symbol: x')"},
            "sdk_missing",
            "import furiosa.torch",
            "OSError: undefined symbol: x",
        ),
        (
            {FURIOSA: "import os; os._exit(3)"},
            "sdk_missing",
            "import furiosa.torch",
            "the process ended with exit status 3",
        ),
        (
            {FURIOSA: "import os; print('fatal: no luck', flush=True); os.abort()"},
            "sdk_missing",
            "import furiosa.torch",
            "the process was ended by SIGABRT",
        ),
        (
            {FURIOSA: "import os, sys; sys.stderr.write('fatal: no luck\\n'); os.abort()"},
            "sdk_missing",
            "import furiosa.torch",
            "the process was ended by SIGABRT, after: fatal: no luck",
        ),
        (
            {"furiosa/torch/_register.py": "import furiosa.torch"},
            "api_missing",
            "import furiosa.torch",
            "it was imported, and torch has no device furiosa",
        ),
        (
            {FURIOSA: TORCH_FURIOSA.replace("TclModule = ", "")},
            "api_missing",
            "calls of furiosa.torch",
            "it has no TclModule",
        ),
        (
            {"furiosa/kernels/gemma4.py": "gemma4_31b_w8fa8fdkv16_txt_text_pre = None"},
            "api_missing",
            "furiosa.kernels.gemma4",
            "it has no gemma4_31b_w8fa8fdkv16_txt_full_attention, ",
        ),
        (
            {"furiosa/kernels/llama.py": "raise KeyError('x')"},
            "api_missing",
            "furiosa.kernels.llama",
            "KeyError: 'x'",
        ),
        (
            {"furiosa_smi.py": "def list_devices(): pass"},
            "api_missing",
            "import furiosa_smi",
            "it has no list_pci_devices, driver_info, CoreStatus.Occupied",
        ),
    ],
)
def test_what_is_broken_for_both_is_typed(
    install: Install, changed: dict[str, str], stage: str, probe: str, detail: str
) -> None:
    install(changed)
    exc = unavailable(emulate=True)
    assert (exc.stage, exc.probe) == (stage, probe)
    assert exc.detail.startswith(detail)


@pytest.mark.parametrize("package", ["furiosa-torch", "furiosa-kernels", "furiosa-smi"])
def test_a_package_of_no_version(install: Install, package: str) -> None:
    site = install()
    shutil.rmtree(site / f"{package.replace('-', '_')}-2026.4.0.dist-info")
    exc = unavailable(emulate=True)
    assert (exc.stage, exc.probe) == ("api_missing", "packages")
    assert exc.detail.startswith(f"{package} is of no known version")


def test_the_compiler_is_one_of_the_packages(install: Install) -> None:
    """It has no module to look for, and its version is in the keys of all that is kept."""
    site = install()
    shutil.rmtree(site / "furiosa_tcc-2026.4.0.dist-info")
    exc = unavailable(emulate=True)
    assert (exc.stage, exc.probe) == ("sdk_missing", "packages")
    assert exc.detail.startswith("furiosa-tcc not installed in ")
    of_setup = {each.partition("==")[0] for each in RNGD.requirements if "==" in each}
    assert of_setup | {"torch"} == set(furiosa.PACKAGES)


def test_an_sdk_of_another_version(install: Install) -> None:
    install(version="2027.1.0")
    exc = unavailable(emulate=True)
    assert exc.stage == "api_missing"
    assert exc.detail == "furiosa-torch is 2027.1.0, and headrace was written for 2026.4.0"


CARDLESS = SMI + "\ncards.clear()\n"
NO_SYSFS = "\ndef list_devices():\n    raise OSError('no /sys/class')\n"


@pytest.mark.parametrize(
    ("changed", "stage", "probe", "detail"),
    [
        (
            {"furiosa_smi.py": CARDLESS + "on_bus = 0\n"},
            "no_device",
            "furiosa_smi.list_devices()",
            "it is empty, and there is no card on the PCI bus",
        ),
        (
            {"furiosa_smi.py": CARDLESS},
            "driver_missing",
            "furiosa_smi.list_devices()",
            "it is empty, and there are 2 cards on the PCI bus",
        ),
        (
            {"furiosa_smi.py": SMI + NO_SYSFS},
            "driver_missing",
            "furiosa_smi.list_devices()",
            "OSError: no /sys/class, and there are 2 cards on the PCI bus",
        ),
        (
            {"furiosa_smi.py": SMI + "\ncards.pop(0)\n"},
            "no_device",
            "furiosa_smi.list_devices()",
            "furiosa:0 of 8 PEs is on npu0, and there are npu1",
        ),
        (
            {"furiosa_smi.py": SMI + "\ndef driver_info():\n    raise OSError('gone')\n"},
            "driver_missing",
            "furiosa_smi.driver_info()",
            "OSError: gone",
        ),
        (
            {"furiosa_smi.py": SMI + "\ncards[0].status = CoreStatus.Occupied\n"},
            "device_busy",
            "core_status()",
            "occupied: npu0 core 1",
        ),
        (
            {FURIOSA: TORCH_FURIOSA.replace("empty_sharded = ", "")},
            "api_missing",
            "calls of furiosa.torch",
            "it has no empty_sharded",
        ),
        (
            {FURIOSA: TORCH_FURIOSA.replace("    cache_context = None", "    pass")},
            "api_missing",
            "calls of furiosa.torch",
            "it has no config.cache_context",
        ),
        (
            {FURIOSA: TORCH_FURIOSA + "\nset_fusion(1)\n"},
            "device_busy",
            "set_fusion(8)",
            "num_fusion is already set, 1",
        ),
        (
            {
                FURIOSA: TORCH_FURIOSA + "\ndef Stream(device):\n"
                "    raise RuntimeError('HAL: librenegade.so: cannot open shared object file')\n"
            },
            "driver_missing",
            'Stream("furiosa:0")',
            "RuntimeError: HAL: librenegade.so: cannot open shared object file",
        ),
        (
            {
                FURIOSA: TORCH_FURIOSA
                + "\ndef Stream(device):\n    raise RuntimeError('not today')\n"
            },
            "no_device",
            'Stream("furiosa:0")',
            "RuntimeError: not today",
        ),
        (
            {FURIOSA: TORCH_FURIOSA + "\nimport os\ndef Stream(device):\n    os.abort()\n"},
            "no_device",
            'Stream("furiosa:0")',
            "the process was ended by SIGABRT",
        ),
    ],
)
def test_what_is_broken_for_a_card_is_typed(
    install: Install, changed: dict[str, str], stage: str, probe: str, detail: str
) -> None:
    install(changed)
    exc = unavailable()
    assert (exc.stage, exc.probe, exc.detail) == (stage, probe, detail)


def test_a_card_that_others_use_is_shared_knowingly(install: Install) -> None:
    install()
    assert unavailable(device=1).stage == "device_busy"
    told = check(sys.executable, emulate=False, device=1, share=True)
    assert "occupied, and shared: npu1 core 1" in [each.detail for each in told]


def test_a_missing_toolchain_is_found_before_torch_is_loaded(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compile that fails is remembered by the vendor's cache, so none may be tried."""
    install({"torch/__init__.py": "import os; os.abort()"})
    monkeypatch.setenv("PATH", "/nonexistent")
    exc = unavailable()
    assert (exc.stage, exc.probe) == ("toolchain_missing", COMPILER)
    assert "gcc-aarch64-linux-gnu" in exc.hint
    assert unavailable(compile=False).probe == "torch"


@pytest.mark.parametrize(
    ("changed", "probe"),
    [
        ({FURIOSA: "import os; os._exit(0)"}, "import furiosa.torch"),
        ({"torch/__init__.py": "import os; os._exit(0)"}, "torch"),
        ({"furiosa/kernels/gemma4.py": "import os; os._exit(0)"}, "furiosa.kernels.gemma4"),
    ],
)
def test_exit_status_0_is_no_success(install: Install, changed: dict[str, str], probe: str) -> None:
    install(changed)
    exc = unavailable(emulate=True)
    assert (exc.probe, exc.detail) == (probe, "the process ended with exit status 0")
    command = exc.hint.split("`")[1]
    done = subprocess.run(shlex.split(command), capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == probe  # the command of the hint shows the same


@pytest.mark.parametrize("emulate", [True, False])
def test_a_headrace_of_another_version(install: Install, tmp_path: Path, emulate: bool) -> None:
    site = install({"torch/__init__.py": "import os; os.abort()"})
    (site / "sitecustomize.py").write_text(
        "import sys, types\nother = types.ModuleType('headrace.version')\n"
        "other.VERSION = '0.0.9'\nsys.modules['headrace.version'] = other\n"
    )
    exc = unavailable(emulate=emulate)
    assert (exc.stage, exc.probe) == ("api_missing", "headrace")
    assert exc.detail == f"the source's headrace is 0.0.9, and this one is {VERSION}"


def test_the_hint_names_each_way_to_another_python() -> None:
    assert RNGD.setup in SETUP
    assert RNGD.variable in SETUP
    assert "--source-python" in SETUP


def test_a_family_is_named_as_its_model_type() -> None:
    """By which the kernels of a model are chosen where there is no torch."""
    known = {(family.model_type, family.module) for family in geometry.FAMILIES}
    assert known == {(name, name) for name in FAMILIES}


def test_what_a_library_prints_is_no_report(install: Install) -> None:
    banner = "print('furiosa', end='')\nprint('{}')\nprint('[1]', end='', flush=True)\n"
    install({"furiosa/torch/_register.py": banner + REGISTER})
    assert len(check(sys.executable, emulate=True)) == len(probes(Asked(emulate=True)))


def test_only_the_families_that_are_asked_for(install: Install) -> None:
    install({"furiosa/kernels/gemma4.py": "raise ImportError"})
    told = check(sys.executable, emulate=True, families=["llama"])
    assert told[-1].probe == "furiosa.kernels.llama"


@pytest.mark.parametrize(
    ("device", "fusion", "cards"),
    [
        (0, 1, ["npu0"]),
        (9, 1, ["npu1"]),
        (7, 4, ["npu3"]),
        (3, 8, ["npu3"]),
        (1, 16, ["npu2", "npu3"]),
        (1, 32, ["npu4", "npu5", "npu6", "npu7"]),
    ],
)
def test_which_cards_a_device_lies_on(device: int, fusion: int, cards: list[str]) -> None:
    """As the vendor's runtime names them when it cannot open one."""
    assert Asked(device=device, fusion=fusion).cards() == cards


def test_by_hand_it_prints_text(install: Install) -> None:
    install({FURIOSA: TORCH_FURIOSA.replace("TclModule = ", "")})
    done = subprocess.run(
        [sys.executable, "-m", MODULE, "--emulate"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "  ok: 2.10.0+fake" in done.stdout
    assert "  api_missing: it has no TclModule. Run: headrace rngd setup" in done.stdout


@pytest.mark.rngd_emulation
def test_the_real_packages_can_emulate(rngd_python: str) -> None:
    told = check(rngd_python, emulate=True)
    assert told[-1].probe == "furiosa.kernels.gemma4"
    assert {each.state for each in told} == {"ok"}


@pytest.mark.rngd_emulation
def test_the_real_packages_see_that_there_is_no_card(rngd_python: str) -> None:
    """The vendor's own `is_available()` is True here."""
    command = [rngd_python, "-c", "import furiosa_smi; print(furiosa_smi.list_devices())"]
    if subprocess.run(command, capture_output=True).stdout.strip() != b"[]":
        pytest.skip("there is a card here")
    exc = unavailable(interpreter=rngd_python)
    assert exc.stage in ("no_device", "driver_missing")
    assert exc.probe == "furiosa_smi.list_devices()"
