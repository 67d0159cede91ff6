"""Coroutines side by side, of which none outlives the call."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable


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
