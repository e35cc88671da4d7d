"""Fetch a draft's file, which is what was announced or is not kept."""

import hashlib
import time
from pathlib import Path
from urllib.parse import urlsplit

import requests

ANSWER_S, FETCH_S = 30.0, 240.0
BLOCK = 1 << 20


def download(url: str, file: Path, size: int, sha256: str) -> None:
    """Write what a URL answers into a file; redirects are not followed.

    Args:
        url: of http or https.
        file: is made.
        size: its length in bytes.
        sha256: of its bytes, in hexadecimal.

    Raises:
        ValueError: the answer has another status, length or sum, or the transfer failed; does not tell the URL's query.
        OSError: the file can't be written.
    """
    digest, num_bytes, until_s = hashlib.sha256(), 0, time.monotonic() + FETCH_S
    try:
        answer = requests.get(
            url, stream=True, allow_redirects=False, timeout=ANSWER_S, headers={"Accept-Encoding": "identity"}
        )
        with answer, file.open("wb") as out:
            told = answer.headers.get("Content-Length")
            if answer.status_code != requests.codes.ok or told != str(size):
                raise ValueError(f"the answer is {answer.status_code} with {told} bytes, wanted 200 with {size}")
            for block in answer.iter_content(BLOCK):
                digest.update(block)
                out.write(block)
                num_bytes += len(block)
                if num_bytes > size or time.monotonic() > until_s:
                    raise ValueError(f"{num_bytes} bytes came, wanted {size} in {FETCH_S:g} s")
    except requests.RequestException as error:
        raise ValueError(f"{type(error).__name__}: {str(error).replace(urlsplit(url).query, '…')}") from None
    if digest.hexdigest() != sha256:
        raise ValueError(f"{num_bytes} bytes came with sha256 {digest.hexdigest()}, wanted {size} with {sha256}")
