"""What an answer tells of its steps, by the outputs that a scheduler would send, and vLLM's own detokenizer."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.output_processor import RequestOutputCollector

from models.core.evaluation.acceptance import UNDRAFTED
from models.engines import Completion
from models.engines.vllm import Params
from models.engines.vllm.fields import STEP, THROUGHPUT, DraftOptions, PlannedThroughput
from models.engines.vllm.patches.outputs import Steps
from models.engines.vllm.tap import _Tap, is_seeded, tells_of_draft
from models.targets.random import byte_tokenizer

TOKENIZER = byte_tokenizer()
IDS = TOKENIZER.encode("abcdefghijkl", add_special_tokens=False)
PLANNED = PlannedThroughput(num_draft_tokens=1, why="pays", tokens_per_s=2.0, plain_tokens_per_s=1.0)
# Tokens of each step, and what the scheduler tells of it; the first ones are the prefill's.
OUTPUTS: list[tuple[list[int], dict[str, Any]]] = [
    (IDS[:1], {THROUGHPUT: PLANNED.model_dump()}),
    (IDS[1:4], {STEP: [0, 3, *IDS[1:3], 99]}),
    (IDS[4:5], {STEP: [UNDRAFTED, 1]}),
    (IDS[5:9], {STEP: [4, 4, *IDS[5:8]]}),
]


def engine() -> Any:
    return SimpleNamespace(rules=Params().rules, draft_version="1", speculating=True, throughput=None, speeds={})


def output(token_ids: list[int], reason: str | None = None, prompt: Sequence[int] = (1, 2), **more: Any) -> Any:
    """Return an output of vLLM's as far as it is read."""
    answer = SimpleNamespace(**{"token_ids": token_ids, "logprobs": None, "finish_reason": reason, **more})
    return SimpleNamespace(prompt_token_ids=prompt, outputs=[answer], kv_transfer_params=None, metrics=None)


def told(
    kind: RequestOutputKind, merged: int, stop: list[str], num_outputs: int
) -> tuple[Completion, PlannedThroughput | None]:
    """Return the completion of an answer of which so many outputs have come."""
    sampling = SamplingParams(max_tokens=40, stop=stop, output_kind=kind)
    sampling.stream_interval = merged
    processor, queue = Steps(TOKENIZER, log_stats=False), RequestOutputCollector(kind, "one")
    asked: dict[str, Any] = dict.fromkeys(("mm_features", "pooling_params", "lora_request", "cache_salt"))
    request = EngineCoreRequest(
        **asked,
        request_id="one",
        external_req_id="one",
        prompt_token_ids=[5],
        sampling_params=sampling,
        arrival_time=0.0,
        data_parallel_rank=None,
    )
    processor.add_request(request, "", None, 0, queue)
    tap = _Tap("one", sampling, DraftOptions("head"), seen_by := engine())
    for token_ids, params in OUTPUTS[:num_outputs]:
        output = EngineCoreOutput(request_id="one", new_token_ids=[*token_ids], kv_transfer_params={**params})
        processor.process_outputs([output], 0.0, None)
        if (seen := queue.get_nowait()) is not None:
            tap.see(seen)
            assert seen.kv_transfer_params is None  # it would go out to the client
    return tap.completion(), seen_by.throughput


@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize("merged", [1, 3])
def test_an_answer_cut_by_a_stop_string_tells_its_steps_and_no_token_behind_it_is_accepted(
    kind: RequestOutputKind, merged: int
) -> None:
    one, throughput = told(kind, merged, ["fg"], len(OUTPUTS))
    assert (one.finish_reason, list(one.token_ids)) == ("stop", IDS[:7])
    assert (one.drafted, one.accepted, one.matches) == ((3, 0, 3), (2, 0, 2), (0, UNDRAFTED, 4))
    assert one.drafted_ids == ((*IDS[1:3], 99), (), (*IDS[5:8],))
    assert throughput == PLANNED
    assert one.trace("").drafted == (3, 3)


@pytest.mark.parametrize(("merged", "num_tokens", "num_steps"), [(1, 5, 2), (3, 4, 1)])
def test_a_client_that_went_away_is_told_of_with_the_steps_of_the_tokens_that_it_was_sent(
    merged: int, num_tokens: int, num_steps: int
) -> None:
    one, _ = told(RequestOutputKind.DELTA, merged, [], 3)
    assert (one.finish_reason, len(one.token_ids)) == (None, num_tokens)
    assert one.drafted == (3, 0)[:num_steps]


def test_a_seed_decides_where_tokens_are_drawn_and_one_token_or_a_grammar_tells_of_no_draft() -> None:
    assert [is_seeded(SamplingParams(seed=seed, temperature=t)) for seed, t in ((1, 0.5), (1, 0), (None, 1))] == [
        True,
        False,
        False,
    ]
    free, probe = SamplingParams(max_tokens=2), SamplingParams(max_tokens=1)
    form = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(regex="a+"))
    assert [tells_of_draft(one) for one in (free, probe, form)] == [True, False, False]


def test_a_stream_copies_neither_its_prompt_nor_its_answer_with_each_delta() -> None:
    copied: list[int] = []

    class Counted(list[int]):
        def __iter__(self) -> Iterator[int]:
            copied.append(len(self))
            return super().__iter__()

    sampling = SamplingParams(max_tokens=40, output_kind=RequestOutputKind.DELTA)
    tap, prompt = _Tap("one", sampling, DraftOptions("head"), engine()), Counted(range(100))
    answer = tap.token_ids
    for token in IDS:
        tap.see(output([token], prompt=prompt))
    assert (copied, tap.token_ids) == ([100], IDS)
    assert tap.token_ids is answer


def test_of_an_answer_that_vllm_drafted_by_itself_vllms_own_counts_are_told() -> None:
    params = SamplingParams(max_tokens=8, temperature=0)
    tap = _Tap("a", params, DraftOptions("head"), engine())
    counted = SimpleNamespace(per_step_drafted=[3, 3], per_step_accepted=[2, 0])
    tap.see(output([4, 5, 6, 7, 8], "length", spec_decode_metrics=counted))
    found = tap.completion()
    assert (found.drafted, found.accepted, found.drafted_ids) == ((3, 3), (2, 0), ())
    assert found.trace("code").accepted == (2, 0)


@pytest.mark.parametrize(("num", "gaps"), [(1, ()), (2, (0.5,))])
def test_how_far_a_token_was_ahead_is_told_where_two_were_asked_for(num: int, gaps: tuple[float, ...]) -> None:
    sampling = SamplingParams(max_tokens=8, logprobs=num, output_kind=RequestOutputKind.DELTA)
    tap = _Tap("a", sampling, DraftOptions("head"), engine())
    said = {4: SimpleNamespace(logprob=-1.0, rank=1), 5: SimpleNamespace(logprob=-1.5, rank=2)}
    tap.see(output([4], logprobs=[said]))
    assert tap.completion().gaps == gaps
