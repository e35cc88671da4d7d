"""`python -m tests.drills.flood URL KEY MODEL`: several clients of one key, who ask without a pause for much at once.

It says "floods" once it had as many answers as it has clients, and "wrong STATUS" if it gets anything but 200 and 429.
"""

import itertools
import sys
import threading

import httpx

FLOODERS = 6
PROMPTS = [" ".join(f"{word} of {number}" for word in range(30)) for number in range(4)]


def flood(url: str, key: str, model: str, answered: "itertools.count[int]") -> None:
    """Ask for as long as the process lives."""
    body = {"model": model, "prompt": PROMPTS, "n": 2, "max_tokens": 64, "temperature": 1.0}
    with httpx.Client(headers={"Authorization": f"Bearer {key}"}, timeout=60, trust_env=False) as client:
        while True:
            status = client.post(f"{url}/v1/completions", json=body).status_code
            if status == httpx.codes.OK and next(answered) == FLOODERS:
                print("floods", flush=True)
            elif status not in (httpx.codes.OK, httpx.codes.TOO_MANY_REQUESTS):
                print(f"wrong {status}", flush=True)


if __name__ == "__main__":
    answered = itertools.count(1)
    clients = [threading.Thread(target=flood, args=(*sys.argv[1:], answered)) for _ in range(FLOODERS)]
    for client in clients:
        client.start()
