"""Which targets, drafts and engines go together, told off configuration files."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from models.compatibility import Finding, findings, require_compatible
from models.recipe import Recipe, load_recipe, parse_recipe
from models.targets import target_config
from tests.models.families import CAUSAL, MULTIMODAL, write_family

VLLM: dict[str, Any] = {"name": "vllm", "max_model_len": 256}
TORCH: dict[str, Any] = {"name": "torch", "max_model_len": 256}
TRAFFIC = {"source": {"name": "synthetic"}, "num_train": 8, "num_held_out": 8, "num_requests": 8}
HEAD = {"name": "eagle3", "vocab_size": 64}
NO_STATES = {"gpt2", "gemma", "gemma2", "gemma3_text"}  # vLLM's classes of them hand out none
UNSHARED = {"gpt_neox"}  # whose embedding vLLM finds under no name that it knows
MODEL = {"name": "lm", "num_layers": 1}
LLAMA = {"llama", "qwen3"}


def recipe_of(path: Path, draft: dict[str, Any], engine: dict[str, Any], **tables: Any) -> Recipe:
    said = {"target": {"name": "pretrained", "path": str(path)}, "traffic": {"x": TRAFFIC}, "distill": {}}
    return parse_recipe({"name": "mine", **said, "draft": draft, "engine": engine, **tables}, "mine.toml")


def faults(recipe: Recipe) -> dict[str, str]:
    return {one.part: one.found for one in findings(recipe) if not one.ok}


@pytest.mark.parametrize("model_type", [*CAUSAL, *MULTIMODAL])
def test_a_family_goes_with_the_drafts_that_can_read_it(model_type: str, tmp_path: Path) -> None:
    target, text = write_family(model_type, tmp_path), MULTIMODAL.get(model_type, model_type)
    reference, lookup, head, model = (
        faults(recipe_of(target, *one))
        for one in (({"name": "suffix"}, TORCH), ({"name": "ngram"}, VLLM), (HEAD, VLLM), (MODEL, VLLM))
    )
    assert lookup == {}
    assert [*reference] == ([] if text in LLAMA else ["engine"])
    assert [*head] == (["engine"] if text in NO_STATES | UNSHARED else [])
    told = "has no embed_tokens; choose" if text in UNSHARED else "hands out none (it has no SupportsEagle3); choose"
    assert all(told in fault for fault in head.values())
    assert [*model] == ([] if text in LLAMA else ["draft"])
    assert all(f"Llama's layout, llama, mistral, qwen2, qwen3; got '{text}'" in fault for fault in model.values())


@pytest.mark.parametrize(
    ("model_type", "fault"),
    [
        ("llama", ""),
        ("gpt2", "vLLM runs GPT2LMHeadModel as transformers' GPT2Model, which has no embed_tokens; choose a family"),
        ("gemma2", "as transformers' Gemma2Model, which scales it in its Gemma2TextScaledWordEmbedding; choose"),
    ],
)
def test_transformers_own_class_takes_a_head_whose_embedding_is_the_targets(
    model_type: str, fault: str, tmp_path: Path
) -> None:
    engine = {**VLLM, "extra": {"model_impl": "transformers"}}
    found = faults(recipe_of(write_family(model_type, tmp_path), HEAD, engine))
    assert fault in found.get("engine", "")
    assert [*found] == (["engine"] if fault else [])


def test_what_fits_is_told_of_each_part(tiny_target: Path) -> None:
    said = list(findings(recipe_of(tiny_target, HEAD, VLLM)))
    assert said == [
        Finding("target", True, "llama, 2 layers of 128, 259 tokens"),
        Finding("chat template", True, "there is one"),
        Finding("draft", True, "family eagle3, K 3"),
        Finding("engine", True, "vllm runs LlamaForCausalLM, 256 tokens at most"),
    ]


@pytest.mark.parametrize(
    ("draft", "engine", "part", "fault"),
    [
        ({"name": "eagle3", "vocab_size": 4096}, VLLM, "draft", "vocab_size must be 1 to 259, the target's; got 4096"),
        ({**HEAD, "aux_layers": [1, 3]}, VLLM, "draft", r"aux_layers must ascend within 0 to 2; got \[1, 3\]"),
        ({**MODEL, "num_layers": 2}, VLLM, "draft", "num_layers must be 1 to 1, less than the target's; got 2"),
        (HEAD, {**VLLM, "max_model_len": 4096}, "engine", "max_model_len is 4096; the target reads 2048 tokens"),
    ],
)
def test_a_size_that_the_target_has_not_is_told(
    draft: dict[str, Any], engine: dict[str, Any], part: str, fault: str, tiny_target: Path
) -> None:
    recipe = recipe_of(tiny_target, draft, engine)
    assert faults(recipe).keys() == {part}
    with pytest.raises(ValueError, match=fault):
        require_compatible(recipe, target_config(tiny_target))


def test_no_weight_is_read(tiny_target: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_target, tmp_path / "copy"))
    (copy / "model.safetensors").write_bytes(b"no weights at all")
    assert not faults(recipe_of(copy, HEAD, VLLM))


def test_a_target_at_fault_is_the_only_fault(tmp_path: Path) -> None:
    assert faults(recipe_of(write_family("t5", tmp_path / "t5"), HEAD, VLLM)).keys() == {"target"}
    assert faults(recipe_of(tmp_path / "none", HEAD, VLLM)).keys() == {"target"}


def test_a_template_that_refuses_a_message_is_told(tiny_target: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ raise_exception('no chats here') }}")
    target = {"name": "pretrained", "path": str(tiny_target), "chat_template": str(tmp_path / "own.jinja")}
    assert "no chats here" in faults(recipe_of(tiny_target, HEAD, VLLM, target=target))["chat template"]


def test_a_draft_that_writes_its_own_answers_wants_a_target_that_the_reference_engine_runs(tmp_path: Path) -> None:
    writes = {"answers": {"name": "on_policy"}, "loss": {"name": "forward_kl"}}
    recipe = recipe_of(write_family("phi", tmp_path), HEAD, VLLM, distill=writes)
    assert "model_type is 'phi'; this forward pass knows llama" in faults(recipe)["draft"]


@pytest.mark.parametrize("name", ["tiny", "full-chain-tiny"])
def test_recipes_that_need_nothing_have_no_fault(name: str) -> None:
    assert not faults(load_recipe(name))
