import pytest

from models.sources import Prompt
from models.sources.synthetic import Params, prompts


def words(stream: list[Prompt]) -> set[str]:
    text = " ".join(message.content.lower() for prompt in stream for message in prompt.messages)
    return {word.strip("?:,.") for word in text.split()}


def test_count_and_groups_are_as_asked() -> None:
    stream = prompts(Params(count=50, num_groups=7, domain="a"))
    assert len(stream) == 50
    assert [prompt.group for prompt in stream[:8]] == [f"a:{i}" for i in (0, 1, 2, 3, 4, 5, 6, 0)]
    assert {prompt.domain for prompt in stream} == {"a"}


def test_a_longer_stream_begins_with_the_shorter_one() -> None:
    assert prompts(Params(count=60))[:30] == prompts(Params(count=30))


@pytest.mark.parametrize("other", [Params(domain="b"), Params(domain="a", word_seed=1)], ids=["domain", "word_seed"])
def test_another_domain_or_seed_speaks_other_words(other: Params) -> None:
    template = words(prompts(Params(domain="x"))) & words(prompts(Params(domain="y")))
    mine, theirs = words(prompts(Params(domain="a"))) - template, words(prompts(other)) - template
    assert len(mine & theirs) < 0.1 * len(mine)


def test_more_prompts_than_the_grammar_can_say_are_refused() -> None:
    with pytest.raises(ValueError, match="count is 500, but 3 words make only some"):
        prompts(Params(count=500, num_words=3))
