"""`python -m tests.drills.headers PORT`: a stranger without a key, who never finishes the headers of its requests.

It says "held" when 1,000 half-open connections get a byte a second each, and "sent" after 200 MB of headers.
"""

import asyncio
import itertools
import sys
from contextlib import suppress

NUM_HELD = 1000
HEADER_BYTES = 200 * 10**6
HEAD = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"
PART = b"X-Padding: " + b"x" * 16000 + b"\r\n"
PAUSE_S = 0.005


async def hold(port: int, opened: asyncio.Semaphore) -> None:
    """Send a byte a second, on a new connection when one was cut."""
    for number in itertools.count():
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD)
            if number == 0:
                opened.release()
            while not writer.is_closing():
                await asyncio.sleep(1.0)
                writer.write(b"x")
                await writer.drain()
        await asyncio.sleep(0.1)


async def pour(port: int) -> None:
    """Send headers until all are sent, each connection as many as it takes."""
    sent = 0
    while sent < HEADER_BYTES:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD)
            while not reader.at_eof() and not writer.is_closing():
                writer.write(PART)
                await writer.drain()
                sent += len(PART)
                await asyncio.sleep(PAUSE_S)
            writer.close()


async def main(port: int) -> None:
    opened = asyncio.Semaphore(0)
    holders = [asyncio.create_task(hold(port, opened)) for _ in range(NUM_HELD)]
    for _ in holders:
        await opened.acquire()
    print("held", flush=True)
    await asyncio.gather(*(pour(port) for _ in range(8)))
    print("sent", flush=True)
    await asyncio.gather(*holders)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
