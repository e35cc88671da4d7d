"""The whole service, as `python -m services.main` starts it: Ray Serve, vLLM, a registry; asked by the stock client."""

import re
import time
from contextlib import suppress

import httpx
import openai
import pytest

from infra.home import ray_folder
from infra.keys import ROLES, add_key, revoke_key
from infra.processes import wait_until
from infra.querylog import CapturedFiles, QueryLog
from models.core.learning.captured import read
from models.targets import describe
from tests.drills.load import Client, Load, quiet_answers
from tests.infra.rows import erase
from tests.world import KEY, MAX_TOKENS, MODEL, PROMPTS, World, ask, stream_text

pytestmark = pytest.mark.engine

NUM_SWAPS = 4
NUM_CLIENTS = 4


def test_the_stock_client_chats_streams_and_lists_models(client: openai.OpenAI) -> None:
    whole = ask(client, PROMPTS[0])
    text, finish, usage = stream_text(client, PROMPTS[0])
    assert whole.choices[0].message.content == text
    assert finish in ("length", "stop")
    assert usage["redraft"]["steps"] > 0
    assert whole.usage.model_extra["redraft"]["drafted"] > 0
    assert not [name for name, value in usage["redraft"].items() if isinstance(value, list)]
    theirs = whole.model_extra["metrics"]["speculative_decoding"]  # vLLM's own shape
    assert theirs["num_draft_tokens"] == whole.usage.model_extra["redraft"]["drafted"]
    assert [model.id for model in client.models.list().data] == ["target"]
    completion = client.completions.create(model="target", prompt="one two", max_tokens=8, temperature=0)
    assert completion.choices[0].finish_reason == "length"


def test_only_what_was_consented_to_is_logged(client: openai.OpenAI, world: World) -> None:
    ask(client, "secret of none", store=False, extra_headers={"X-Redraft-Log": "full"})
    named = {"X-Redraft-Group": "secret-of-a-group"}
    ask(client, "secret of metadata", extra_headers=named)
    full = {"X-Redraft-Log": "full", "X-Redraft-Domain": "mail"}
    ask(client, "mail me at ada@example.org", extra_headers=full | named)
    ask(client, "mail me at ada@example.org", extra_headers=full)
    row, without = world.wait_for_rows("mail", 2)
    assert "[EMAIL]" in str(row.prompt)
    assert (len(str(row.group)), without.group) == (64, None)
    stored = b"".join(file.read_bytes() for file in world.querylog.parent.glob("queries.db*"))
    assert b"secret of" not in stored
    assert b"secret-of" not in stored + (world.home / "service.log").read_bytes()
    assert b"ada@example.org" not in stored


def test_a_chat_that_two_models_answer_in_turn_says_so_and_is_in_no_log(client: openai.OpenAI, world: World) -> None:
    domain = {"X-Redraft-Domain": "in-turn", "X-Redraft-Log": "full"}
    for method in ("spec_reason", "speculative_thinking"):
        answer = ask(client, PROMPTS[0], extra_headers={**domain, "X-Redraft-Reasoning": method})
        assert (answer.usage.redraft["lossless"], answer.usage.redraft["reasoning"]) == (False, method)
        assert answer.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="X-Redraft-Reasoning is for /v1/chat/completions"):
        client.completions.create(model=MODEL, prompt="x", extra_headers={"X-Redraft-Reasoning": "spec_reason"})
    ask(client, PROMPTS[1], extra_headers=domain)
    [row] = world.wait_for_rows("in-turn", 1)
    assert PROMPTS[1] in row.prompt
    assert world.status()["acceptance"]["in-turn"]["requests"] == 1


def test_rays_own_folder_which_it_opens_to_everybody_is_closed_again(world: World) -> None:
    folder = ray_folder(world.home)
    assert any(path.is_dir() for path in folder.iterdir())

    def is_closed() -> bool:
        found = [path for path in (folder, *folder.rglob("*")) if not path.is_symlink()]
        with suppress(FileNotFoundError):  # Ray removes what it no longer needs
            return not any(path.lstat().st_mode & 0o077 for path in found)
        return False

    wait_until(is_closed, 60, None, "the end of what others may do with it")


def test_an_erasure_reaches_the_recent_answers_in_the_services_memory(client: openai.OpenAI, world: World) -> None:
    log, told = QueryLog(world.querylog), world.home / "service.log"

    def forgotten(number: int) -> int:
        """Return how many tokens of recent answers the service forgot for an erasure."""
        said = re.compile(f"erasure {number}: forgot ([0-9]+) tokens")
        wait_until(lambda: said.search(told.read_text()) is not None, 60, None, f"erasure {number} to be noticed")
        [num_tokens] = said.findall(told.read_text())
        return int(num_tokens)

    for prompt in PROMPTS[:4]:
        ask(client, prompt, user="erin", extra_headers={"X-Redraft-Log": "full"})
    assert forgotten(erase(log, "a hash").number) > MAX_TOKENS
    assert forgotten(erase(log, "a hash").number) == 0
    log.close()


def test_hidden_states_are_written_for_rows_that_may_be_trained_on_as_they_were_served_and_for_no_others(
    client: openai.OpenAI, world: World
) -> None:
    files, full = CapturedFiles(world.querylog), {"X-Redraft-Log": "full", "X-Redraft-Domain": "captured"}
    before = {file.name for file in files.folder.iterdir()}
    ask(client, "only counted")
    ask(client, "mail me at bob@example.org", extra_headers=full)
    ask(client, "two answers", n=2, temperature=1.0, extra_headers=full)
    ask(client, "kept as it is", extra_headers=full)
    row = world.wait_for_rows("captured", 2)[-1]
    assert "kept as it is" in str(row.prompt)
    wait_until(files.path_of(row.id).exists, 60, None, "its states")
    assert {file.name for file in files.folder.iterdir()} - before == {files.path_of(row.id).name}
    card = describe(world.target)
    found = read(files.path_of(row.id), card.sha256, (1, 2), [*(row.prompt_ids or ()), *(row.completion_ids or ())])
    assert len(found.states) + found.first == len(row.prompt_ids or ()) + len(row.completion_ids or ()) - 1
    assert files.path_of(row.id).stat().st_mode & 0o077 == files.folder.stat().st_mode & 0o077 == 0
    assert world.status()["captured"]["not wanted"] >= 1


def test_drafts_are_swapped_while_clients_ask_and_no_answer_changes(world: World) -> None:
    before = world.status()["swaps"]
    with Load(world.url, quiet_answers(world), [Client()] * NUM_CLIENTS) as load:
        for number in range(NUM_SWAPS):
            world.registry.promote("draft", version := world.versions[(number + 1) % 2])
            world.wait_for_draft(version)
    assert load.ended_well(), load.outcomes
    assert world.status()["swaps"] - before >= NUM_SWAPS


def test_a_draft_that_accepts_less_than_it_promised_is_put_back(world: World, client: openai.OpenAI) -> None:
    good = world.status()["draft_version"]
    liar = world.register(2, golden_tau="3.9")
    world.registry.promote("draft", liar)
    assert "promised 3.9" in world.wait_for_refusal(liar)
    world.wait_for("put back", lambda status: status["draft_version"] == good and status["speculating"])
    # The registry is told after the weights were put back.
    wait_until(lambda: world.champion() != liar, 60, None, "another champion")
    assert stream_text(client, PROMPTS[0])[1] is not None


def test_the_log_says_at_the_start_which_model_runner_serves(world: World) -> None:
    log = (world.home / "service.log").read_text()
    assert "vLLM's model runner is V1, vllm.v1.worker.cpu_model_runner.CPUModelRunner" in log


def test_a_request_with_a_seed_and_a_temperature_is_drafted_for_and_says_the_same_without(
    world: World, client: openai.OpenAI
) -> None:
    before, ways, num_equal = world.status()["seeded"], ("head", "off"), 0
    for seed in range(4):
        drafted, plain = (
            ask(client, PROMPTS[1], seed=seed, temperature=0.8, extra_headers={"X-Redraft-Speculation": way})
            for way in ways
        )
        assert [one.usage.model_extra["redraft"]["drafted"] > 0 for one in (drafted, plain)] == [True, False]
        num_equal += drafted.choices[0].message.content == plain.choices[0].message.content
    assert num_equal >= 3  # a near tie may fall the other way
    assert world.status()["seeded"] == before


def test_what_asks_whether_the_service_lives_is_never_drawn_to_judge(world: World, client: openai.OpenAI) -> None:
    domain = {"X-Redraft-Domain": "probed"}
    for _ in range(40):
        client.completions.create(model="target", prompt="hi", max_tokens=1, extra_headers=domain)
    for prompt in PROMPTS[:4]:
        ask(client, prompt, extra_headers=domain)
    assert world.status()["acceptance"]["probed"]["requests"] == 4  # a domain's first four are drawn


def test_off_acts_whatever_becomes_of_a_new_draft(world: World, client: openai.OpenAI) -> None:
    def turn(on: bool) -> tuple[str, bool]:
        """Switch, and return what is answered and whether it was drafted for."""
        url = f"{world.url}/redraft/speculation"
        httpx.post(url, json={"on": on}, headers=world.operator, timeout=60, trust_env=False).raise_for_status()
        again, _, usage = stream_text(client, PROMPTS[1])
        return again, usage["redraft"]["drafted"] > 0

    text = stream_text(client, PROMPTS[1])[0]
    for number in range(4):
        version = world.versions[(number + 1) % 2]
        world.registry.promote("draft", version)
        time.sleep(0.25 * number)  # before it is looked at, loaded, on probation, or serves
        assert not turn(on=False)[1]
        turn(on=True)
        world.wait_for_draft(version)
        world.wait_for("its proof", lambda status: status["speculating"] and status["proof"] is not None)
    assert [turn(on) for on in (False, True)] == [(text, False), (text, True)]


def test_metrics_count_requests_and_swaps(world: World) -> None:
    text = httpx.get(f"{world.url}/metrics", headers=world.operator, timeout=60, trust_env=False).text
    assert "redraft_mean_accepted_length" in text
    assert "vllm:" in text


def test_each_role_reaches_its_own_paths_and_a_key_is_made_and_revoked_while_the_service_runs(world: World) -> None:
    file = world.home / "keys.json"
    made = {role: add_key(file, f"a-{role}", role) for role in ROLES}
    paths = ("/v1/models", "/metrics", "/redraft/status", "/redraft/dashboard")
    chat = {"model": "target", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}

    def asked(role: str) -> list[int]:
        with httpx.Client(headers={"Authorization": f"Bearer {made[role]}"}, trust_env=False, timeout=60) as client:
            found = [client.get(world.url + path) for path in paths]
            detail = {"X-Redraft-Detail": "steps"}
            found.append(client.post(f"{world.url}/v1/chat/completions", json=chat, headers=detail))
        return [answer.status_code for answer in found]

    assert asked("client") == [200, 403, 403, 403, 403]
    assert asked("scraper") == [403, 200, 403, 403, 403]
    assert asked("operator") == [200] * 5
    page = httpx.get(world.url + paths[-1], auth=("me", made["operator"]), trust_env=False)
    assert page.headers["content-type"].startswith("text/html")
    assert f"<title>target: draft {world.status()['draft_version']}</title>" in page.text
    for role in ROLES:
        revoke_key(file, f"a-{role}")
        assert asked(role) == [401] * 5
    kept = [entry.read_bytes() for entry in world.home.rglob("*") if entry.is_file() and entry.suffix != ".safetensors"]
    assert not [key for key in (*made.values(), KEY) if any(key.encode() in content for content in kept)]
