"""vLLM's own endpoint as a baseline: how it is started, how it drafts, and that it leaves no process behind."""

import os
from pathlib import Path

import httpx
import pytest

from infra.processes import answers
from infra.settings import load_settings
from models import catalog
from models.core.drafting.draft_families import family_of
from models.recipe import load_recipe
from models.sources import Message, Prompt
from tasks.measure import demonstration
from tasks.measure.baselines import encoder, open_baselines
from tasks.measure.cells import answers_of
from tasks.measure.stock import Stock, as_flags, by_batch_size
from tasks.select_data import choose_prompts
from tests.tasks.measure.test_demonstration import demonstrated


def test_arguments_are_written_as_vllms_command_line_takes_them():
    arguments = {"max_num_seqs": 4, "enable_lora": True, "prefix_caching": False, "names": ["a", "b"], "c": {"d": 1}}
    assert as_flags(arguments) == [
        *("--max-num-seqs", "4", "--enable-lora", "--no-prefix-caching"),
        *("--names", "a", "b", "--c", '{"d": 1}'),
    ]


@pytest.mark.parametrize(("most", "last"), [(64, [17, 64, 0]), (8, [17, 17, 0])])
def test_vllms_static_table_drafts_less_where_more_sequences_run(most: int, last: list[int]) -> None:
    given = {"method": "eagle3", "num_speculative_tokens": 3}
    table = {"num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 16, 1], last]}
    assert by_batch_size(given, most) == given | table


def test_a_recipe_of_another_engine_has_no_vllm_to_be_compared_with(tiny_target, tmp_path):
    engine = catalog.parse("engines", {"name": "torch", "num_draft_tokens": 2, "max_model_len": 64})
    other = load_recipe("tiny").model_copy(update={"engine": engine})
    with pytest.raises(ValueError, match="recipe tiny has engine torch, wanted vllm"):
        Stock(other, load_settings({"REDRAFT_HOME": str(tmp_path)}), tiny_target)


@pytest.mark.engine
def test_it_gives_the_targets_output_tells_its_steps_is_timed_once_and_leaves_no_process(
    tiny_target, tiny_draft, tmp_path, monkeypatch
):
    """The demonstration times it on the prompts that the service was asked, and ends it."""
    monkeypatch.setattr(demonstration, "NUM_TIMED", 2)
    recipe = load_recipe("tiny")
    extra = {"compilation_config": {"mode": 0}, "block_size": 32}  # it need not be fast here; short prompts are cached
    recipe = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"dtype": "float32", "extra": extra})})
    speculation = {**family_of(tiny_draft).vllm_config(tiny_draft), "num_speculative_tokens": 2}
    prompt = Prompt(messages=(Message(role="user", content="what is 3 times 4?"),), domain="chat", group="g")
    before = descendants(os.getpid())
    begun = Stock(recipe, load_settings({"REDRAFT_HOME": str(tmp_path)}), tiny_target, speculation)
    begun.begin()
    assert begun.runs
    assert not answers(f"{begun.url}/health")  # whoever began it does something else meanwhile
    begun.start()  # and only waits for the rest
    try:
        assert len(descendants(os.getpid()) - before) > 2  # a guard, the endpoint, its engine
        (answer,) = begun.ask([prompt])
        long = prompt.model_copy(update={"messages": (Message(role="user", content="3 times 4 is 12, " * 10),)})
        begun.ask([long])
        hits = [_hits_of(begun, long)]
        begun.forget()
        hits.append(_hits_of(begun, long))
        demonstrated(recipe, tiny_target, tmp_path, begun).time_stock()
        assert not begun.runs
    finally:
        begun.stop()
    assert hits[0] > 0
    assert hits[1] == 0
    assert descendants(os.getpid()) <= before
    assert not answers(f"{begun.url}/health")
    rows = answers_of(tmp_path, demonstration.STOCK)
    held_out = [choose_prompts(name, recipe.traffic[name], recipe.seed)["held_out"] for name in ("chat", "code")]
    assert [row["prompt_id"] for row in rows] == [prompt.id for of_domain in held_out for prompt in of_domain[:2]]
    assert all(row["status"] == "ok" and row["num_tokens"] > 1 for row in rows)
    demonstrated(recipe, tiny_target, tmp_path, begun).time_stock()  # there is nothing left to be asked
    assert answers_of(tmp_path, demonstration.STOCK) == rows
    assert not begun.runs
    alone = open_baselines(tiny_target, tiny_draft, "float32", num_draft_tokens=2, max_model_len=256)["transformers"]
    assert answer.status == "ok"
    assert answer.token_ids == alone(encoder(tiny_target)(prompt), recipe.generate.max_tokens).token_ids
    assert len(answer.arrival_ms) == answer.num_tokens
    assert sum(answer.drafted_per_step) > 0


def descendants(pid: int) -> set[int]:
    """Return the processes below one."""
    tasks = Path(f"/proc/{pid}/task")
    children = {int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()}
    return children.union(*map(descendants, children))


def _hits_of(stock: Stock, prompt: Prompt) -> float:
    """Ask, and return how many tokens the prefix cache had."""

    def total() -> float:
        lines = httpx.get(f"{stock.url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total"))

    before = total()
    (answer,) = stock.ask([prompt])
    assert answer.status == "ok"
    return total() - before
