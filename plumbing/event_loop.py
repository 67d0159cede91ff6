"""Coroutines side by side, of which none outlives the call, and an event loop in a thread."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any


async def run_all(calls: Iterable[Coroutine], ended: Callable[[], bool]) -> None:
    """Run coroutines side by side; once one of them raises, or `ended` returns true, cancel those
    that are left.
    """
    tasks = list(map(asyncio.ensure_future, calls))
    results = asyncio.gather(*tasks)
    try:
        while not results.done() and not ended():
            await asyncio.wait([results], timeout=0.1)
        if results.done():
            results.result()  # raises what one of them has raised
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(results, *tasks, return_exceptions=True)


class EventLoop:
    """An event loop in a thread of its own. All threads may use it."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def start(self, work: Coroutine) -> Future:
        """Begin a coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine) -> Any:
        """Return what a coroutine returns."""
        return self.start(work).result()
