import asyncio
import concurrent.futures

LIMIT = asyncio.Semaphore(1)


def one(response):
    return float(len(response))


def pool(prompts, responses, **columns):  # PicklingError at the trial call
    with concurrent.futures.ProcessPoolExecutor(2) as executor:
        return list(executor.map(one, responses))


async def limited(
    prompts, responses, **columns
):  # passes the trial call, then "bound to a different event loop"
    async def ask(response):
        async with LIMIT:
            await asyncio.sleep(0.01)
            return one(response)

    return list(await asyncio.gather(*map(ask, responses)))


def trl(completions, **columns):  # with 15_turns_column.jsonl it gets the file's turns
    return [float("4" in str(completion)) for completion in completions]
