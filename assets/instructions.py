"""Prompts that ask for a short text under a constraint whose fulfilment a program checks: some of
IFEval's constraints (arXiv:2311.07911), which the reward ifeval reads.

"Describe trees to a child. Do not use any commas. Write at least 25 words." Each prompt asks
for a least number of words, too: without it the shortest answer is the safest one, and a policy
learns to say little.
"""

import random
import zlib

ASKS = (
    "Write a short paragraph about {}.",
    "Tell me something about {}.",
    "Describe {} to a child.",
    "Write a few sentences about {}.",
    "Give me some advice about {}.",
    "Write a short note to a friend about {}.",
)
TOPICS = (
    "apples, astronomy, autumn, a bakery, bees, bicycles, a birthday party, a boat trip, books, bread, "
    "bridges, butterflies, camping, a castle, cats, cheese, chess, a city park, clouds, coffee, cooking, "
    "courage, a cousin, dancing, the desert, dinosaurs, a doctor, dogs, dreams, drums, ducks, elephants, "
    "exercise, a farm, fishing, football, forests, friendship, frogs, a garden, glass, gold, a grandmother, "
    "grapes, a hat, hills, honesty, honey, horses, a hotel, ice, insects, an island, a journey, kindness, "
    "kites, a lake, learning to swim, a library, a lighthouse, a lost key, magnets, a map, a market, "
    "mirrors, money, the moon, mountains, museums, music, a neighbor, the night sky, oceans, an old clock, "
    "owls, painting, patience, pencils, penguins, photography, pianos, pilots, planets, potatoes, rain, "
    "a restaurant, rice, rivers, robots, roses, sand, a school trip, ships, shoes, sleep, snow, soup, "
    "spiders, spring, stones, a storm, summer, tea, teachers, a tiger, towers, trains, trees, a village, "
    "volcanoes, walking, water, whales, wind, winter, wolves"
).split(", ")
WORDS = "river golden window quiet morning people little garden bright travel simple music".split()
LENGTHS = (15, 20, 25)  # the least number of words


def draw(kind: str, numbers: random.Random) -> tuple[str, str, dict]:
    """Return a constraint of a kind: what the prompt says, its name in IFEval and its arguments."""
    count = numbers.choice((2, 3))
    first, second = numbers.sample(WORDS, 2)
    return {
        "no_comma": ("Do not use any commas.", "punctuation:no_comma", {}),
        "json": ("Answer with valid JSON only.", "detectable_format:json_format", {}),
        "short": (
            "Use less than 40 words.",
            "length_constraints:number_words",
            {"num_words": 40, "relation": "less than"},
        ),
        "keywords": (
            f"Use the words {first} and {second}.",
            "keywords:existence",
            {"keywords": [first, second]},
        ),
        "forbidden": (
            f"Do not use the words {first} and {second}.",
            "keywords:forbidden_words",
            {"forbidden_words": [first, second]},
        ),
        "frequency": (
            f"Use the word {first} at least {count} times.",
            "keywords:frequency",
            {"keyword": first, "frequency": count, "relation": "at least"},
        ),
        "bullets": (
            f"Answer with exactly {count} bullet points such as * This is a point.",
            "detectable_format:number_bullet_lists",
            {"num_bullets": count},
        ),
        "title": (
            "Start with a title in double angular brackets such as <<my title>>.",
            "detectable_format:title",
            {},
        ),
        "highlights": (
            f"Highlight at least {count} parts of your answer such as *highlighted part*.",
            "detectable_format:number_highlighted_sections",
            {"num_highlights": count},
        ),
        "postscript": (
            "At the end add a postscript that starts with P.S.",
            "detectable_content:postscript",
            {"postscript_marker": "P.S."},
        ),
        "placeholders": (
            f"Use at least {count} placeholders in square brackets such as [name].",
            "detectable_content:number_placeholders",
            {"num_placeholders": count},
        ),
        "quotation": (
            "Put double quotation marks around your whole answer.",
            "startend:quotation",
            {},
        ),
    }[kind]


KINDS = (
    "no_comma json short keywords forbidden frequency bullets title highlights postscript "
    "placeholders quotation"
).split()
UNSEEN = "frequency"  # the kind that no training prompt has


def instructions(kind: str, split: str, size: int) -> list[dict]:
    """Return `size` random prompts, the same on every machine.

    A tenth of all prompts, chosen by a hash, is held out: "test" draws from that tenth only and
    "train" never does. A row is {"prompt": text, "answer": the constraints as the reward ifeval
    reads them}.

    Args:
        kind: one of KINDS; "" for all of them but UNSEEN.
    Raises:
        ValueError: if there is no such kind.
    """
    if kind and kind not in KINDS:
        raise ValueError(f"there is no kind {kind!r} but {', '.join(KINDS)}")
    numbers = random.Random(f"instructions {kind} {split}")
    kinds = [kind] if kind else [name for name in KINDS if name != UNSEEN]
    rows: dict[str, dict] = {}
    while len(rows) < size:
        ask = numbers.choice(ASKS).format(numbers.choice(TOPICS))
        said, name, arguments = draw(numbers.choice(kinds), numbers)
        length = numbers.choice(LENGTHS)
        prompt = f"{ask} {said} Write at least {length} words."
        if (zlib.crc32(prompt.encode()) % 10 == 0) == (split == "test"):
            words = {"num_words": length, "relation": "at least"}
            answer = {
                "instruction_id": [name, "length_constraints:number_words"],
                "kwargs": [arguments, words],
            }
            rows[prompt] = {"prompt": prompt, "answer": answer}
    return list(rows.values())
