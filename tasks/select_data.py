"""Choose prompts, domain by domain."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from infra.artifacts import Artifact
from infra.client import Chat
from models import catalog
from models.recipe import Traffic
from models.sources import Prompt, draw_parts
from tasks.stages import local_content, produce
from tasks.stages.task import task

PARTS = ("train", "held_out", "requests")


@task
def select_data(traffic: Mapping[str, Traffic], seed: int) -> Artifact:
    """Write each part's prompts of all domains to `<part>.jsonl`; an artifact of kind "prompts"."""

    def make(directory: Path, _: Path) -> None:
        chosen = [choose_prompts(domain, table, seed) for domain, table in traffic.items()]
        for part in PARTS:
            lines = [prompt.model_dump_json() + "\n" for parts in chosen for prompt in parts.get(part, [])]
            (directory / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")

    return produce(
        stage="prompts",
        kind="prompts",
        params={"seed": seed, "traffic": {domain: _content(table) for domain, table in traffic.items()}},
        inputs={},
        code=(__name__, *(f"models.sources.{table.source.name}" for table in traffic.values())),
        make=make,
    )


def choose_prompts(domain: str, traffic: Traffic, seed: int) -> dict[str, list[Prompt]]:
    """Return part to prompts, under the recipe's name of the domain; parts share no group.

    Raises:
        ValueError: the source has too few prompts.
    """
    prompts = catalog.load("sources", traffic.source.name).prompts(traffic.source)
    return draw_parts(prompts, traffic.sizes(), domain, seed)


def as_chats(prompts: Iterable[Prompt]) -> list[Chat]:
    """Return prompts as they are sent to a service."""
    return [Chat(one.id, one.domain, [message.model_dump() for message in one.messages]) for one in prompts]


def read_prompts(directory: Path, part: str) -> list[Prompt]:
    """Read one part of a "prompts" directory."""
    lines = (directory / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()
    return [Prompt.model_validate_json(line) for line in lines]


def _content(traffic: Traffic) -> dict[str, object]:
    """Return what the prompts depend on, files of this machine included."""
    return {**traffic.model_dump(mode="json"), **local_content(getattr(traffic.source, "path", ""))}
