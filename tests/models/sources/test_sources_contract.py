import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from models import catalog
from models.chats import ChatEncoder
from models.sources import Document, Message, Prompt, encoded, sample, split, unique
from models.targets.random import byte_tokenizer

ROOT = Path(__file__).parents[3]


def runs_by_default(name: str) -> bool:
    """A source without required settings needs nothing but the environment."""
    return not any(field.is_required() for field in catalog.load("sources", name).Params.model_fields.values())


def make(text: str, group: str = "g", domain: str = "chat") -> Prompt:
    return Prompt(messages=(Message(role="user", content=text),), domain=domain, group=group)


NAMES = [name for name in catalog.names("sources") if runs_by_default(name)]


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def elsewhere() -> dict[str, list[list[str]]]:
    """Source to id and group of each of its prompts, as another process makes them."""
    code = (
        "import json, sys; from models import catalog\n"
        "def of(source): return [(prompt.id, prompt.group) for prompt in source.prompts(source.Params())]\n"
        "print(json.dumps({name: of(catalog.load('sources', name)) for name in sys.argv[1:]}))"
    )
    argv = [sys.executable, "-c", code, *NAMES]
    return json.loads(subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


@pytest.fixture
def stream(name: str, default_stream: Callable[[str], list[Prompt]]) -> list[Prompt]:
    return default_stream(name)


@pytest.mark.slow
def test_a_stream_has_one_domain_several_groups_no_copies_and_ends_on_users(stream: list[Prompt]) -> None:
    assert len({prompt.id for prompt in stream}) == len(stream) > 50
    assert len({prompt.domain for prompt in stream}) == 1
    assert len({prompt.group for prompt in stream}) > 10
    for prompt in stream:
        assert prompt.messages[-1].role == "user"
        assert all(message.content.strip() for message in prompt.messages)


@pytest.mark.slow
def test_a_stream_is_the_same_elsewhere(name: str, stream: list[Prompt], elsewhere: dict[str, list[list[str]]]) -> None:
    assert elsewhere[name] == [[prompt.id, prompt.group] for prompt in stream]


@pytest.mark.slow
def test_documents_are_many_and_of_the_prompts_domain_and_groups(
    name: str, stream: list[Prompt], default_documents: Callable[[str], list[Document]]
) -> None:
    found = default_documents(name)
    assert len(found) > 50
    assert len({document.id for document in found}) == len(found)
    assert {document.domain for document in found} == {stream[0].domain}
    groups = {document.group for document in found}
    assert len(groups) > 10
    assert groups & {prompt.group for prompt in stream}


@pytest.mark.slow
def test_documents_are_split_as_prompts(
    name: str, stream: list[Prompt], default_documents: Callable[[str], list[Document]]
) -> None:
    shares = {"train": 0.7, "held_out": 0.3}
    prompts, documents = split(stream, shares, seed=1), split(default_documents(name), shares, seed=1)
    trained = {document.group for document in documents["train"]}
    assert not trained & {prompt.group for prompt in prompts["held_out"]}


def test_the_id_depends_on_the_messages_alone_and_on_where_they_end() -> None:
    def chat(*texts: str) -> Prompt:
        return Prompt(messages=tuple(Message(role="user", content=text) for text in texts), domain="chat", group="g")

    assert make("a", group="h", domain="code").id == make("a").id
    assert make("a").id == "050d8ef56e888db0b0d78ce3ce7aa59c1b25d47405bef6cc26988e90209be021"
    assert len({chat("ab").id, chat("a", "b").id, chat("a\nb").id, chat('a"], ["user', "b").id, make("a").id}) == 5


def test_a_prompt_needs_a_message_to_answer_and_a_document_some_text() -> None:
    for said in ((), (Message(role="assistant", content="hi"),)):
        with pytest.raises(ValidationError):
            Prompt(messages=said, domain="chat", group="g")
    for empty in ("", ()):
        with pytest.raises(ValidationError):
            Document(content=empty, domain="d", group="g")


def test_unique_keeps_the_first_of_each_copy_in_order() -> None:
    prompts = [make("a", "1"), make("b", "2"), make("a", "3"), make("c", "4")]
    assert [prompt.group for prompt in unique(prompts)] == ["1", "2", "4"]


def test_a_group_never_straddles_a_split_nor_changes_sides_when_data_is_added_and_nothing_is_lost() -> None:
    prompts, shares = [make(f"{i}", group=f"g{i % 40}") for i in range(400)], {"train": 0.7, "held_out": 0.3}
    parts, early = split(prompts, shares, seed=1), split(prompts[:20], shares, seed=1)
    groups = {part: {prompt.group for prompt in members} for part, members in parts.items()}
    assert not groups["train"] & groups["held_out"]
    assert sorted(prompt.id for members in parts.values() for prompt in members) == sorted(one.id for one in prompts)
    assert [prompt for prompt in parts["held_out"] if prompt in prompts[:20]] == early["held_out"]


def test_a_split_keeps_its_shares_on_average_and_another_seed_splits_otherwise() -> None:
    prompts, shares = [make(f"{i}", group=f"g{i}") for i in range(4000)], {"a": 0.5, "b": 0.3, "c": 0.2}
    parts = split(prompts, shares, seed=1)
    assert [len(parts[part]) / 4000 for part in "abc"] == pytest.approx([0.5, 0.3, 0.2], abs=0.03)
    assert split(prompts, shares, seed=1) == parts != split(prompts, shares, seed=2)


@pytest.mark.parametrize("fractions", [{}, {"a": 0.5}, {"a": 1.5, "b": -0.5}, {"a": 1.0, "b": 0.0}])
def test_shares_that_do_not_sum_to_one_and_empty_parts_are_refused(fractions: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="above 0 and sum to 1"):
        split([make("a")], fractions, seed=0)
    with pytest.raises(ValueError, match=r'part "(train|held_out)" of the split is empty: 1 items in 1 groups'):
        split([make("a")], {"train": 0.5, "held_out": 0.5}, seed=0)


def test_a_sample_is_seeded_and_does_not_depend_on_the_order() -> None:
    prompts = [make(f"{i}") for i in range(100)]
    drawn = sample(prompts, 10, seed=3)
    assert drawn == sample(prompts[::-1], 10, seed=3)
    assert drawn != sample(prompts, 10, seed=4)
    assert len({prompt.id for prompt in drawn}) == 10


@pytest.mark.parametrize("count", [-1, 3])
def test_a_sample_of_the_wrong_size_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"count must be from 0 to 2, the number of items; got {count}"):
        sample([make("a"), make("b")], count, seed=0)


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "description": None, "parameters": None}}
SHOWN = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ x }}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.reasoning }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
)


def whole(**changed: object) -> Prompt:
    """A prompt with all that a chat can have."""
    called = Message(role="assistant", tool_calls=(CALL,), reasoning="hm")
    said = Message(role="tool", content=("r", "s"), tool_call_id="1", name="f")
    fields = {"messages": (Message(role="user", content="a"), called, said), "tools": (TOOL,)}
    return Prompt(domain="d", group="g", **{**fields, "template_arguments": {"x": "y"}, **changed})


def test_all_of_a_chat_survives_json_and_belongs_to_its_id() -> None:
    prompt = whole()
    without = [whole(tools=()), whole(template_arguments={}), whole(messages=(Message(role="user", content="a"),))]
    assert len({one.id for one in (prompt, *without)}) == 4
    texts = [Document(content=content, domain="d", group="g") for content in ("a", prompt.messages)]
    assert texts[0].id != texts[1].id
    for one in (prompt, *texts):
        assert type(one).model_validate_json(one.model_dump_json()) == one


def test_all_of_a_chat_is_in_its_ids() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = SHOWN
    encoder, prompt = ChatEncoder(tokenizer), whole()
    text = '{"type": "function", "function": {"name": "f", "description": null, "parameters": null}}y'
    said = text + "<user>a<assistant>hmf<tool>r\ns"
    assert tokenizer.decode(prompt.encode(encoder)) == said
    document = Document(content=prompt.messages, tools=(TOOL,), template_arguments={"x": "y"}, domain="d", group="g")
    assert tokenizer.decode(document.encode(encoder)) == said
    assert document.id != document.model_copy(update={"tools": ()}).id
    assert Document.model_validate_json(document.model_dump_json()) == document


def test_what_a_target_cannot_read_is_left_out_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = byte_tokenizer()
    refused = "{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}"
    tokenizer.chat_template = f"{{% for m in messages %}}{refused}{{{{ m.content }}}}{{% endfor %}}"
    encoder = ChatEncoder(tokenizer)
    prompts = [make("a"), whole(), make("b" * 9, group="far")]
    assert [(one.group, len(ids)) for one, ids in encoded(prompts, encoder, 9)] == [("g", 1)]
    (line,) = caplog.messages
    assert "prompts: skipped 1 that the chat template refuses, 1 too long" in line
    assert "prompts, far: wanted less than 9 tokens" in line
    with pytest.raises(ValueError, match="no row can be used: 1 that the chat template refuses"):
        encoded([whole()], encoder)
