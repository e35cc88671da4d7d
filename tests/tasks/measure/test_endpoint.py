"""Who asks the service that is measured."""

from pathlib import Path

from infra.keys import keys_path, read_keys
from infra.settings import Settings
from models.recipe import load_recipe
from services.fair_queue import FairQueue
from tasks.measure.endpoint import Endpoint, forgetful, undivided


def test_whoever_asks_as_another_has_a_key_of_its_own_and_the_one_before_is_revoked(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    endpoint = Endpoint(load_recipe("tiny"), settings)
    sent = []
    for _ in range(3):
        endpoint.ask_as_another()
        keys = [key for key in read_keys(keys_path(settings)) if key.name.startswith("bench-")]
        assert [key.accepted for key in keys] == [False] * len(sent) + [True]
        assert keys[-1].role == "operator"
        sent.append(keys[-1].sha256)
    assert len(set(sent)) == 3
    endpoint.__exit__()
    assert not any(key.accepted for key in read_keys(keys_path(settings)) if key.name.startswith("bench-"))


def test_a_forgetful_recipe_looks_up_what_a_request_says_itself_and_nothing_else() -> None:
    recipe = load_recipe("smollm2-cpu")
    assert recipe.engine.lookup.remembered > 0
    changed = forgetful(recipe)
    assert changed.engine.lookup == recipe.engine.lookup.model_copy(update={"remembered": 0})
    assert changed.model_copy(update={"engine": recipe.engine}) == recipe


def test_an_undivided_service_answers_as_many_requests_of_one_key_as_the_engine_has_sequences() -> None:
    recipe = load_recipe("smollm2-cpu")
    most = recipe.engine.max_num_seqs
    divided, whole = (FairQueue(one.serve.limits, most, 1024).per_key for one in (recipe, undivided(recipe)))
    assert divided < whole == most
