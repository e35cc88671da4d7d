"""Under which names answers are kept, and which prompts become golden."""

from models.learning.hidden import Sample
from models.recipe import load_recipe
from models.sources import Message, Prompt
from tasks.generate_answers import _across_domains, _named


def prompt(text: str, domain: str) -> Prompt:
    return Prompt(messages=(Message(role="user", content=text),), domain=domain, group=text)


def test_answers_keep_the_group_of_their_prompt_where_the_recipe_names_it_to_the_service():
    tiny, answer = load_recipe("tiny"), Sample("a", "x", [1], [2, 3, 4])
    chat = tiny.traffic["chat"]
    grouped = tiny.model_copy(update={"traffic": {"chat": chat.model_copy(update={"send_groups": True})}})
    assert _named(answer, prompt("hi", "chat"), tiny) == answer._replace(domain="chat")
    assert _named(answer, prompt("hi", "chat"), grouped) == answer._replace(domain="chat", cluster="hi")


def test_golden_prompts_take_the_domains_in_turn():
    prompts = [prompt("1", "a"), prompt("2", "a"), prompt("3", "a"), prompt("4", "b")]
    assert [one.messages[0].content for one in _across_domains(prompts, 3)] == ["1", "4", "2"]
