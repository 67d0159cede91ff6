"""The built-in tasks: problems that are generated, the same on every machine.

BUILT_IN has the names that --dataset knows; the function of such a name makes `size` rows of a
split, of the task that follows the name in "reasoning_gym:TASK". reward_model.py reads
arithmetic_pairs for arithmetic.
"""

import functools
import json
import os
import random
import zlib

import yaml

import utils

BUILT_IN = {  # rows of each split
    "arithmetic": {"train": 20_000, "test": 1_000},
    "arithmetic_pairs": {"train": 20_000, "test": 1_000},
    "instructions": {"train": 4_000, "test": 100},
    "reasoning_gym": {"train": 5_000, "test": 500},
}


def is_in(split: str, prompt: str) -> bool:
    """Return whether a split has a prompt: a tenth of all prompts, chosen by a hash, are those of
    "test", and no others are.
    """
    return (zlib.crc32(prompt.encode()) % 10 == 0) == (split == "test")


def arithmetic(_: str, split: str, size: int) -> list[dict]:
    """Return `size` random problems of 3-digit addition, the same on every machine.

    A row is {"prompt": "737+361=", "answer": "1098", "solution":
    what `worked_addition` gives}.
    """
    numbers = random.Random(f"arithmetic {split}")
    rows: list[dict] = []
    while len(rows) < size:
        first = numbers.randint(100, 999)
        second = numbers.randint(100, 999)
        prompt = f"{first}+{second}="
        if is_in(split, prompt):
            solution = worked_addition(prompt, 0.0, random.Random(0))
            rows.append({"prompt": prompt, "answer": str(first + second), "solution": solution})
    return rows


def worked_addition(prompt: str, noise: float, numbers: random.Random) -> str:
    """Return the worked answer to a prompt of `arithmetic`, column by column and with the carries.

    For "737+361=" it is "7+1+0=8 3+6+0=9 7+3+0=10 #### 1098".

    Args:
        noise: probability with which a column gets a wrong digit, which the final answer repeats.
        numbers: where the mistakes come from.
    """
    first, second = prompt.removesuffix("=").split("+")
    columns = []
    answer = ""
    carry = 0
    for a, b in zip(reversed(first), reversed(second)):
        next_carry, digit = divmod(int(a) + int(b) + carry, 10)
        if numbers.random() < noise:
            digit = (digit + numbers.randint(1, 9)) % 10
        columns.append(f"{a}+{b}+{carry}={next_carry or ''}{digit}")
        answer = f"{digit}{answer}"
        carry = next_carry
    return f"{' '.join(columns)} #### {carry or ''}{answer}"


def arithmetic_pairs(task: str, split: str, size: int) -> list[dict]:
    """Return preference pairs for `arithmetic`: the worked answer, and the same with wrong digits.

    `subset` is how many of the three columns are wrong.
    """
    numbers = random.Random(f"pairs {split}")
    pairs = []
    for row in arithmetic(task, split, size):
        chosen = rejected = worked_addition(row["prompt"], 0.0, numbers)
        while rejected == chosen:
            rejected = worked_addition(row["prompt"], 0.3, numbers)
        wrong = sum(a[4:] != b[4:] for a, b in zip(chosen.split()[:3], rejected.split()))
        pairs.append(
            {
                "prompt": row["prompt"],
                "chosen": chosen,
                "rejected": rejected,
                "subset": f"{wrong} wrong",
            }
        )
    return pairs


@functools.cache
def instruction_parts() -> dict:
    """Return what prompts of `instructions` are made of."""
    with open(os.path.join(utils.ROOT, "assets/instructions.yaml")) as file:
        return yaml.safe_load(file)


def instructions(kind: str, split: str, size: int) -> list[dict]:
    """Return `size` random prompts that ask for a short text under a constraint whose fulfilment a
    program checks, the same on every machine.

    "Describe trees to a child. Do not use any commas. Write at least 25 words." Each prompt asks for
    a least number of words, too: without it the shortest answer is the safest one, and a policy
    learns to say little.

    A row is {"prompt": text, "answer": the constraints as the reward ifeval
    reads them}.

    Args:
        kind: of assets/instructions.yaml; "" for all of them but `unseen`.
    Raises:
        ValueError: if there is no such kind.
    """
    parts = instruction_parts()
    if kind and kind not in parts["kinds"]:
        raise ValueError(f"there is no kind {kind!r} but {', '.join(parts['kinds'])}")
    numbers = random.Random(f"instructions {kind} {split}")
    kinds = [kind] if kind else [name for name in parts["kinds"] if name != parts["unseen"]]
    rows: dict[str, dict] = {}
    while len(rows) < size:
        ask = numbers.choice(parts["asks"]).format(numbers.choice(parts["topics"]))
        constraint = json.dumps(parts["kinds"][numbers.choice(kinds)])
        count = str(numbers.choice((2, 3)))
        constraint = constraint.replace('"COUNT"', count).replace("COUNT", count)
        for name, word in zip(("FIRST", "SECOND"), numbers.sample(parts["words"], 2)):
            constraint = constraint.replace(name, word)
        said, name, arguments = json.loads(constraint)
        length = numbers.choice(parts["lengths"])
        prompt = f"{ask} {said} Write at least {length} words."
        if is_in(split, prompt):
            words = {"num_words": length, "relation": "at least"}
            answer = {
                "instruction_id": [name, "length_constraints:number_words"],
                "kwargs": [arguments, words],
            }
            rows[prompt] = {"prompt": prompt, "answer": answer}
    return list(rows.values())


def reasoning_gym(task: str, split: str, size: int) -> list[dict]:
    """Return `size` generated problems of a reasoning_gym task; training and test ones come from
    different seeds.

    The column "reasoning_gym", [task, size, seed, index], is what generates the problem again: the
    scorer needs it.
    """
    seed = {"train": 1, "test": 2}[split]
    entries = reasoning_gym_dataset(task, size, seed)
    return [
        {
            "prompt": entry["question"],
            "answer": entry["answer"],
            "reasoning_gym": [task, size, seed, index],
        }
        for index, entry in enumerate(entries)
    ]


@functools.cache
def reasoning_gym_dataset(task: str, size: int, seed: int):
    """Return the problems of a reasoning_gym task, which score answers, too."""
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=size, seed=seed)
