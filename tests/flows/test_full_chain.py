"""Every stage of flow `build` once, by the command line, and the target and draft of it served and answering."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import openai
import pytest
import torch

from infra.home import config_path
from infra.processes import answers, wait_until
from infra.settings import load_settings
from models.core.checkpoints.loading import load_model, read_tensors
from tests.flows.conftest import Cli, registry_of

pytestmark = pytest.mark.engine
STAGES = ("text", "select", "pretrain", "shrink", "prune", "finetune", "quantize")


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Cli, str]:
    """A home with the finished tiny chain, and what the build said."""
    # Serve's controller looks as often as by default; ours looks seldom, which the service's start would wait for.
    cli = Cli(tmp_path_factory.mktemp("chain") / "home", RAY_SERVE_CONTROL_LOOP_INTERVAL_S="0.1")
    return cli, cli.run("build", "--recipe", "full-chain-tiny")


def made(cli: Cli, stage: str) -> Path:
    """Return the one directory of a stage."""
    [directory] = (cli.home / "artifacts" / stage).glob("[0-9a-f]*")
    return directory


def test_every_stage_is_made_once_and_leaves_a_directory_that_loads(chain) -> None:
    cli, output = chain
    for stage in STAGES:
        assert output.count(f"{stage}: made, ") == 1, output
    for stage in STAGES[2:]:
        assert load_model(made(cli, stage)).config.num_hidden_layers == (3 if stage == "pretrain" else 2)
        assert (made(cli, stage) / "chat_template.jinja").is_file()
    assert list((cli.home / "artifacts" / "work").iterdir()) == []


@pytest.mark.parametrize("stage", ["finetune", "quantize", "complete_target"])
def test_two_of_four_weights_stay_zero_to_the_end(chain, stage: str) -> None:
    tensors = read_tensors(made(chain[0], stage))
    layers = [tensor for name, tensor in tensors.items() if name.endswith("_proj.weight")]
    assert len(layers) == 14
    assert all(int((weight.unflatten(1, (-1, 4)) == 0).sum(-1).min()) >= 2 for weight in layers)


def test_the_served_target_is_the_quantized_one_and_the_draft_was_made_for_it(chain) -> None:
    registry = registry_of(chain[0].home)
    target, draft = registry.champion("target"), registry.champion("draft")
    assert draft.tags["target_sha256"] == target.tags["target_sha256"]
    assert draft.tags["quantization"] == "gptq"
    config = json.loads((made(chain[0], "complete_target") / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert json.loads(draft.tags["tau"])["chat"] > 1


def test_states_of_a_quantized_target_are_taken_from_its_decoder_alone(chain) -> None:
    model = load_model(made(chain[0], "quantize"))
    tokens = torch.arange(3, 40)[None]
    with torch.inference_mode():
        whole = model(input_ids=tokens, output_hidden_states=True, use_cache=False).hidden_states[-1]
        assert torch.equal(model.model(input_ids=tokens, use_cache=False).last_hidden_state, whole)


@pytest.fixture
def service(chain) -> Iterator[str]:
    """The URL of the service of the chain's home, while it runs."""
    cli, file = chain[0], config_path(load_settings({"REDRAFT_HOME": str(chain[0].home)}))
    process = cli.start("serve", "--recipe", "full-chain-tiny")

    def url() -> str:
        return f"http://127.0.0.1:{json.loads(file.read_text())['serve']['port']}"

    def is_up() -> bool:
        assert process.poll() is None, process.communicate()[0]
        with suppress(FileNotFoundError, ValueError):  # its settings are not written yet
            return answers(f"{url()}/health")
        return False

    try:
        wait_until(is_up, 300, None, "the service")
        yield url()
    finally:
        process.terminate()
        process.communicate(timeout=90)


def test_the_chains_target_and_draft_are_served_and_answer(service: str) -> None:
    client = openai.OpenAI(base_url=f"{service}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "Tell me about it."}]
    answer = client.chat.completions.create(model="target", messages=messages, max_tokens=16, temperature=0)
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.model_extra["redraft"]["drafted"] > 0
