"""The models beside the target whose word a draft learns: their directories, and what a version says of them."""

from pydantic import JsonValue

from infra.artifacts import Artifact, open_artifact
from models.core.learning.distill import Params
from models.params import BaseParams
from models.targets import describe
from tasks.prepare_target import prepare_target


def prepare_teachers(params: Params) -> list[Artifact]:
    """Build the teachers of a training, or find them again; ValueError as the methods that build targets."""
    return [prepare_target.fn(teacher.model) for teacher in params.teachers]


def teachers_in(params: BaseParams) -> dict[str, JsonValue]:
    """Return what a draft's lineage keeps: sha256 of each teacher's weights to its name and its weight in the mean."""
    assert isinstance(params, Params)  # which a recipe's fields can't say without importing torch
    cards = [describe(open_artifact(one)) for one in prepare_teachers(params)]
    return {
        card.sha256: {"name": card.name, "weight": teacher.weight}
        for card, teacher in zip(cards, params.teachers, strict=True)
    }
