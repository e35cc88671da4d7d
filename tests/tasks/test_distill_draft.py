from pathlib import Path

from models.drafts import retrieval
from models.hidden import Sample
from tasks.distill_draft import untrained

SAMPLES = [Sample("1", "code", [3, 4], [5, 6]), Sample("2", "chat", [7], [8, 9])]


def test_a_new_store_holds_the_answers_for_training_and_a_refresh_adds_no_clients_text(
    tiny_target: Path, tmp_path: Path
) -> None:
    draft = untrained(retrieval.Params(), None, tiny_target, SAMPLES)
    assert draft.store.texts == [[3, 4, 5, 6], [7, 8, 9]]
    retrieval.save(draft, tmp_path)
    later = [Sample("3", "code", [10], [11, 12])]
    assert untrained(retrieval.Params(), tmp_path, tiny_target, later).store.texts == draft.store.texts
