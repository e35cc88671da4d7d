"""Choose prompts, domain by domain."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from infra.artifacts import Artifact
from infra.client import Chat
from models import catalog
from models.recipe import Traffic
from models.sources import Prompt, digest, draw_parts, named, sample, split
from tasks.stages import cached_step, content_of, task

PARTS = ("train", "held_out", "requests")


@task
def select_data(traffic: Mapping[str, Traffic], seed: int) -> Artifact:
    """Write each part's prompts of all domains to `<part>.jsonl`; an artifact of kind "prompts"."""

    def make(directory: Path, _: Path) -> None:
        chosen = [choose_prompts(domain, table, seed) for domain, table in traffic.items()]
        for part in PARTS:
            lines = [prompt.model_dump_json() + "\n" for parts in chosen for prompt in parts.get(part, [])]
            (directory / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")

    params = {"seed": seed, "traffic": {domain: content_of(table) for domain, table in traffic.items()}}
    return cached_step("prompts", "prompts", params, make)


def choose_prompts(domain: str, traffic: Traffic, seed: int) -> dict[str, list[Prompt]]:
    """Return part to prompts, under the recipe's name of the domain; ValueError if the source has too few.

    Parts share no group.
    """
    prompts = catalog.load("sources", traffic.source.name).prompts(named(traffic.source, domain))
    return draw_parts(prompts, traffic.sizes(), domain, seed)


def choose_more(domain: str, traffic: Traffic, seed: int, part: str, count: int | None = None) -> list[Prompt]:
    """Return more prompts of one part than the recipe has: its own first, then others of the same groups.

    No group of another part is among them; ValueError if the part's groups hold fewer than `count`, None for all.
    """
    sizes = traffic.sizes()
    prompts = catalog.load("sources", traffic.source.name).prompts(named(traffic.source, domain))
    found = split(prompts, {name: size / sum(sizes.values()) for name, size in sizes.items()}, seed)[part]
    count = len(found) if count is None else count
    if len(found) < count:
        raise ValueError(f'domain "{domain}" has {len(found)} prompts for {part}, got {count} to ask for')
    return [prompt.model_copy(update={"domain": domain}) for prompt in sample(found, count, seed)]


def as_chats(prompts: Iterable[Prompt], traffic: Mapping[str, Traffic] | None = None) -> list[Chat]:
    """Return prompts as they are sent to a service, with the hash of their group where the domain's table wants it."""
    named = {domain for domain, table in (traffic or {}).items() if table.send_groups}
    return [
        Chat(
            one.id,
            one.domain,
            [message.as_openai() for message in one.messages],
            digest(one.group) if one.domain in named else "",
            one.fields(),
        )
        for one in prompts
    ]


def read_prompts(directory: Path, part: str) -> list[Prompt]:
    """Read one part of a "prompts" directory."""
    lines = (directory / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()
    return [Prompt.model_validate_json(line) for line in lines]
