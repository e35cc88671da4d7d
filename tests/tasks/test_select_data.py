"""Choosing prompts: sizes, sides and refusals."""

import json
import re

import pytest

from infra.consent import GROUP
from models.recipe import Traffic
from models.sources import Message, Prompt, dataset
from models.sources.synthetic import Params
from models.stages import Text
from tasks.measure.specbench import as_questions
from tasks.prepare_text import choose_documents
from tasks.select_data import as_chats, choose_more, choose_prompts

TRAFFIC = Traffic(source=Params(count=300, num_groups=60), num_train=20, num_held_out=10, num_requests=30)


def test_parts_have_the_wanted_sizes_the_recipes_domain_and_no_common_group():
    parts = choose_prompts("chat", TRAFFIC, seed=0)
    assert {part: len(prompts) for part, prompts in parts.items()} == {"train": 20, "held_out": 10, "requests": 30}
    assert {prompt.domain for prompts in parts.values() for prompt in prompts} == {"chat"}
    groups = [{prompt.group for prompt in prompts} for prompts in parts.values()]
    assert sum(map(len, groups)) == len(set.union(*groups))


def test_a_domain_without_training_has_no_such_part():
    assert "train" not in choose_prompts("chat", TRAFFIC.model_copy(update={"num_train": 0}), seed=0)


def test_too_few_prompts_are_told_with_how_they_split_and_numbers_that_fit():
    with pytest.raises(ValueError, match='"chat" has 300 prompts in 60 groups, .*train .* \\(500 wanted\\)') as error:
        choose_prompts("chat", TRAFFIC.model_copy(update={"num_train": 500}), seed=0)
    fitting = dict(re.findall(r"(num_\w+) = (\d+)", str(error.value)))
    assert fitting.keys() == {"num_train", "num_held_out", "num_requests"}
    parts = choose_prompts("chat", TRAFFIC.model_copy(update={key: int(n) for key, n in fitting.items()}), seed=0)
    assert {f"num_{part}": str(len(prompts)) for part, prompts in parts.items()} == fitting
    assert (int(fitting["num_held_out"]), int(fitting["num_requests"])) == (TRAFFIC.num_held_out, TRAFFIC.num_requests)
    assert int(fitting["num_train"]) > 150
    with pytest.raises(ValueError, match="No numbers fit so few groups"):
        choose_prompts("chat", TRAFFIC.model_copy(update={"source": Params(count=3, num_groups=1)}), seed=0)


def test_the_recipes_name_is_the_domain_of_rows_that_name_none(tmp_path):
    file = tmp_path / "asked.jsonl"
    rows = [{"messages": [{"role": "user", "content": str(n)}]} for n in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = dataset.Params(path=str(file))
    traffic = Traffic(source=source, num_train=8, num_held_out=4, num_requests=4)
    parts = choose_prompts("support", traffic, seed=0)
    assert {prompt.domain for prompts in parts.values() for prompt in prompts} == {"support"}
    documents = choose_documents("support", Text(source=source, num_train=8, num_held_out=4), seed=0)
    assert {document.domain for chosen in documents.values() for document in chosen} == {"support"}


def test_more_prompts_of_a_part_begin_with_the_recipes_own_and_stay_out_of_the_other_parts():
    parts = choose_prompts("chat", TRAFFIC, seed=0)
    more = choose_more("chat", TRAFFIC, 0, "requests", 90)
    assert more[:30] == parts["requests"]
    assert len({prompt.id for prompt in more}) == 90
    assert {prompt.domain for prompt in more} == {"chat"}
    others = {prompt.group for part in ("train", "held_out") for prompt in parts[part]}
    assert not others & {prompt.group for prompt in more}
    with pytest.raises(ValueError, match='domain "chat" has .* prompts for requests, got 300 to ask for'):
        choose_more("chat", TRAFFIC, 0, "requests", 300)


def test_chats_have_one_group_where_prompts_have_if_the_recipe_says_so_and_a_service_takes_its_name():
    prompts = choose_prompts("chat", TRAFFIC, seed=0)["requests"]
    prompts.append(prompts[0].model_copy(update={"group": "Ger\u00e4te und Zubeh\u00f6r " * 40}))
    chats = as_chats(prompts, {"chat": TRAFFIC.model_copy(update={"send_groups": True})})
    assert len({one.group for one in prompts}) == len({chat.group for chat in chats})
    assert len({(one.group, chat.group) for one, chat in zip(prompts, chats, strict=True)}) < len(prompts)
    assert all(re.fullmatch(GROUP, chat.group) for chat in chats)
    for silent in (as_chats(prompts), as_chats(prompts, {"chat": TRAFFIC})):
        assert {chat.group for chat in silent} == {""}


def test_a_chat_is_sent_with_its_tools_and_calls_and_template_arguments():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tool = {"type": "function", "function": {"name": "f"}}
    turns = (Message(role="user", content=("a", "b")), Message(role="assistant", tool_calls=(call,)))
    turns += (Message(role="tool", content="r", tool_call_id="1"),)
    arguments = {"enable_thinking": False}
    prompt = Prompt(messages=turns, tools=(tool,), template_arguments=arguments, domain="d", group="g")
    (chat,) = as_chats([prompt])
    assert json.loads(json.dumps(chat.messages)) == [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "r", "tool_call_id": "1"},
    ]
    assert chat.fields == {"tools": [tool], "chat_template_kwargs": arguments}
    with pytest.raises(ValueError, match="a prompt of d has tools, chat_template_kwargs, which no question has"):
        as_questions([prompt])
