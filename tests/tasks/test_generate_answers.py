"""Under which names answers are kept, which prompts become golden, and how reference prompts join each other."""

import asyncio
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from infra.artifacts import publish, staged
from models.core.learning.hidden import Sample
from models.engines import Completion
from models.engines.torch import Params, TorchEngine
from models.recipe import load_recipe
from models.sources import Message, Prompt
from tasks.generate_answers import _joining, _named, generate_answers
from tasks.prepare_text import in_turn
from tasks.stages.samples import by_domain, read_samples


def prompt(text: str, domain: str) -> Prompt:
    return Prompt(messages=(Message(role="user", content=text),), domain=domain, group=text)


def test_answers_keep_the_group_of_their_prompt_where_the_recipe_names_it_to_the_service() -> None:
    tiny, answer = load_recipe("tiny"), Sample("a", "x", [1], [2, 3, 4])
    chat = tiny.traffic["chat"]
    grouped = tiny.model_copy(update={"traffic": {"chat": chat.model_copy(update={"send_groups": True})}})
    assert _named(answer, prompt("hi", "chat"), tiny) == answer._replace(domain="chat")
    assert _named(answer, prompt("hi", "chat"), grouped) == answer._replace(domain="chat", cluster="hi")


def test_golden_prompts_take_the_domains_in_turn() -> None:
    prompts = [prompt("1", "a"), prompt("2", "a"), prompt("3", "a"), prompt("4", "b")]
    assert [one.messages[0].content for one in in_turn(by_domain(prompts))[:3]] == ["1", "4", "2"]


class Watched(TorchEngine):
    """An engine that notes what becomes of each request, in order."""

    def note(self, what: str, request_id: str) -> None:
        self.__dict__.setdefault("notes", []).append((what, request_id.rpartition("-")[2]))

    async def generate(self, prompt_ids: list[int], sampling: Any, request_id: str, *rest: Any) -> Completion:
        (on_first_token,) = rest

        def first() -> None:
            self.note("first", request_id)
            on_first_token()

        self.note("asked", request_id)
        try:
            return await super().generate(prompt_ids, sampling, request_id, first)
        finally:
            self.note("ended", request_id)


def join(target: Path, prompts: dict[str, list[int]], most: int) -> tuple[dict[str, list[int]], list[tuple[str, str]]]:
    async def run() -> tuple[dict[str, list[int]], list[tuple[str, str]]]:
        engine = await Watched.start(target, None, Params(max_model_len=64))
        try:
            answers = await _joining(engine, prompts, most, 12, "golden")
            return {name: list(one.token_ids) for name, one in answers.items()}, engine.__dict__["notes"]
        finally:
            await engine.close()

    return asyncio.run(run())


PROMPTS = {name: [5 + number, 6, 7] for number, name in enumerate("abcde")}


@pytest.mark.parametrize("most", [2, 5])
def test_a_prompt_is_asked_when_the_one_before_has_its_first_token_and_at_most_so_many_at_once(
    tiny_target: Path, most: int
) -> None:
    answers, notes = join(tiny_target, PROMPTS, most)
    assert list(answers) == list(PROMPTS)
    for before, after in pairwise(PROMPTS):
        assert notes.index(("first", before)) < notes.index(("asked", after))
    running = [sum({"asked": 1, "ended": -1}.get(what, 0) for what, _ in notes[:end]) for end in range(len(notes))]
    assert max(running) == most
    assert join(tiny_target, PROMPTS, 1)[0] == answers


def test_a_prompt_that_fails_holds_no_other_up_and_its_error_is_raised(tiny_target: Path) -> None:
    with pytest.raises(ValueError, match="the prompt has 0 tokens; wanted 1 to 63"):
        join(tiny_target, {**PROMPTS, "none": [], "last": [5]}, 1)


@pytest.mark.slow
def test_a_prompt_that_the_target_cannot_read_is_left_out_and_the_others_are_answered(
    home: Path, tiny_target: Path, tmp_path: Path
) -> None:
    refused = "{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}"
    with staged(tmp_path / "target") as directory:
        shutil.copytree(tiny_target, directory, dirs_exist_ok=True)
        (directory / "chat_template.jinja").write_text(f"{{% for m in messages %}}{refused}{{% endfor %}}")
    tiny = load_recipe("tiny")
    domain = tiny.first_domains[0]
    one, two, long = (prompt(text, domain) for text in ("one", "two", "x" * 64))
    tool = one.model_copy(update={"messages": (Message(role="tool", content="t"),)})
    with staged(tmp_path / "prompts") as directory:
        for part, prompts in {"train": [one, tool, long], "held_out": [tool, two]}.items():
            (directory / f"{part}.jsonl").write_text("".join(asked.model_dump_json() + "\n" for asked in prompts))
    few = tiny.generate.model_copy(update={"max_tokens": 4, "num_golden": 1})
    recipe = tiny.model_copy(update={"engine": Params(max_model_len=64), "generate": few})
    files = (publish(tmp_path / kind, kind) for kind in ("target", "prompts"))
    artifact = generate_answers.fn(recipe, *files)
    assert [sample.id for sample in read_samples(artifact, "train")] == [one.id]
    assert [sample.id for sample in read_samples(artifact, "held_out")] == [two.id]
