"""The installed vLLM has all that redraft uses of it, and another one in which something was renamed does not."""

import ast
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.compat.__main__ import installed, main
from tests.compat.check import fault
from tests.compat.tree import Function, Tree
from tests.compat.uses import Sources

INSTALLED = installed()
SOURCES = Sources()
USES = SOURCES.uses()
RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
PROPOSER = "vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer"
Plant = Callable[[str, str, str], Path]


def faults(tree: Tree, symbol: str = "") -> set[str]:
    return {fault(use, tree, INSTALLED) for use in USES if symbol in ("", use.symbol)} - {""}


@pytest.fixture(scope="module")
def partial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of those files of vLLM's that are read to find what is used."""
    read = {"vllm/_version.py"}

    def content(name: str) -> bytes:
        read.add(name)
        return INSTALLED.read(name)

    faults(Tree(INSTALLED.names, content))
    folder = tmp_path_factory.mktemp("vllm")
    for name in read:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(INSTALLED.read(name))
    return folder


@pytest.fixture
def plant(partial: Path, tmp_path: Path) -> Plant:
    """Copies that, with a text changed in a file; what moves to another file leaves the old one."""

    def planted(file: str, old: str, new: str) -> Path:
        folder = Path(shutil.copytree(partial, tmp_path / "planted"))
        path = folder / "vllm" / file
        if new.endswith(".py"):
            path.rename(path.with_name(new))
        else:
            text = path.read_text()
            assert old in text
            path.write_text(text.replace(old, new))
        return folder

    return planted


@pytest.mark.slow
def test_the_installed_release_has_all_that_is_used() -> None:
    assert faults(INSTALLED) == set()


@pytest.mark.parametrize(
    "symbol",
    [
        f"{RUNNER}._prepare_inputs",  # replaced
        f"{RUNNER}.effective_drafter_max_model_len",  # required by a constant's name
        f"{PROPOSER}.net_num_new_slots_per_request",  # set
        "vllm.v1.core.sched.scheduler.Scheduler.update_draft_token_ids",  # overridden
        "vllm.v1.core.kv_cache_utils.KVCacheBlock.ref_cnt",  # read
        "vllm.envs.VLLM_USE_V2_MODEL_RUNNER",  # a variable
        "vllm.v1.sample.rejection_sampler.expand_kernel",  # a dotted string
        "vllm.plugins",  # a group of plugins
        "vllm.tool_parsers",  # read as text
    ],
)
def test_each_kind_of_use_is_found_in_the_sources(symbol: str) -> None:
    assert symbol in {use.symbol for use in USES}


SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
LINEAR = "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm"
RENAMED = [
    ("v1/core/sched/scheduler.py", "class Scheduler(", "class Planner(", SCHEDULER, "gone"),
    ("v1/core/sched/scheduler.py", "def update_draft_token_ids(", "def take(", f"{SCHEDULER}.update_draft_token_ids",
     "gone"),
    ("model_executor/layers/utils.py", "def dispatch_cpu_unquantized_gemm", "def dispatch", LINEAR, "gone"),
    ("v1/worker/gpu_model_runner.py", "num_scheduled_tokens: np.", "counts: np.", f"{RUNNER}._prepare_inputs",
     "takes (scheduler_output, counts), not (scheduler_output, num_scheduled_tokens)"),
    ("v1/worker/gpu_model_runner.py", "self.effective_drafter_max_model_len", "self.longest",
     f"{RUNNER}.effective_drafter_max_model_len", "gone"),
    ("model_executor/layers/attention/attention.py", "self.head_size_v", "self.value_size",
     "vllm.model_executor.layers.attention.Attention.head_size_v", "gone"),
    ("v1/spec_decode/llm_base_proposer.py", "", "base.py", PROPOSER,
     "moved to vllm.v1.spec_decode.base.SpecDecodeBaseProposer"),
    ("v1/spec_decode/llm_base_proposer.py", "common_attn_metadata: Common", "metadata: Common", f"{PROPOSER}.propose",
     "has no common_attn_metadata"),
    ("utils/system_utils.py", "key: str, value: str)", "key: str, value: str, scope: str)",
     "vllm.utils.system_utils.set_env_var", "takes (key, value, scope), and wants scope"),
    ("envs.py", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_MODEL_RUNNER", "vllm.envs.VLLM_USE_V2_MODEL_RUNNER", "gone"),
    ("plugins/__init__.py", "vllm.endpoint_plugins", "vllm.routes", "vllm.plugins", "has no vllm.endpoint_plugins"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "old", "new", "symbol", "told"), RENAMED, ids=[one[3][5:] for one in RENAMED])
def test_what_is_renamed_or_moved_is_told(plant: Plant, file: str, old: str, new: str, symbol: str, told: str) -> None:
    assert faults(Tree.of(plant(file, old, new)), symbol) == {told}


@pytest.mark.slow
def test_what_only_costs_speed_is_off_and_what_is_needed_fails(
    plant: Plant, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = plant("compilation/wrapper.py", "def aot_compile(", "def compile_ahead(")
    assert main(copy) == 0
    assert "patches/compiled.py" in capsys.readouterr().out
    attention = copy / "vllm" / "model_executor" / "layers" / "attention" / "attention.py"
    attention.write_text(attention.read_text().replace("kv_sharing_target_layer_name", "shared_with"))
    assert main(copy) == 1  # no start notices that, and each layer would fail
    assert "Attention.kv_sharing_target_layer_name" in capsys.readouterr().out.splitlines()[-1]
    changed = copy / "vllm" / "utils" / "ompmultiprocessing.py"
    changed.write_text(changed.read_text().replace("def configure_omp_envs(", "def configure("))
    with zipfile.ZipFile(wheel := tmp_path / "vllm.whl", "w") as packed:
        for file in copy.rglob("*.py"):
            packed.write(file, file.relative_to(copy).as_posix())
    assert main(wheel) == 1
    assert "OMPProcessManager.configure_omp_envs" in capsys.readouterr().out


def test_every_method_that_overrides_one_of_vllms_says_so() -> None:
    silent = set()
    for node in (node for tree in SOURCES.trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        ours = SOURCES.classes.get(node.name)
        for method in node.body if ours is not None else ():
            if isinstance(method, Function) and method.name not in ours.overridden:
                found = INSTALLED.find(f"{ours.base}.{method.name}")
                if found is not None and isinstance(found.node, Function):
                    silent.add(f"{node.name}.{method.name}")
    assert silent == {"InstrumentedLLM.__del__", "EngineEnded.__init__"}  # which vLLM never calls with arguments
