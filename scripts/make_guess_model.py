"""Make assets/guess: a small language model for the game in assets/guess/game.py, and the rows of the game.

    python scripts/make_guess_model.py

A row is {"prompt": "37-67:", "secret": 50}. The model guesses a number, the game answers "higher " or "lower ", and so
on for at most five guesses:

    37-67:52<eos>lower 44<eos>higher 48<eos>higher 50<eos>

The model is that of scripts/make_tiny_model.py, pretrained from scratch on games of a careless teacher. He means to
halve the range: first the middle, then 8, 4, 2 and 1 up or down from the last guess, which finds any number. But in a
third of the turns he guesses blindly. So greedy decoding wins nearly always, and sampling at temperature 1 less than
half of the games. None of the held-out ranges (test.jsonl) is pretrained on.

It takes as long as that script. Success in the held-out games: 1.00 greedy, 0.38 sampled.
"""

import dataclasses
import json
import random
import sys
import zlib
from pathlib import Path

import torch
from make_tiny_model import PretrainingArgs, check, pretrain

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "assets/guess"))
from game import GuessTheNumber

from plumbing import command_line
from plumbing.flags import Share

LOWEST = range(20, 61)  # so that all guesses have two digits
STEPS = (8, 4, 2, 1)  # how far from the last guess the next one is, after the first


@dataclasses.dataclass
class Args(PretrainingArgs):
    output_dir: Path = Path("assets/guess")
    """folder to write; files of an earlier run in it are replaced"""
    noise: Share = 0.35
    """probability that a guess of the teacher is any of the 31 numbers"""


def game_rows(split: str) -> list[dict]:
    """Return all games of a split; "test" has a tenth of the ranges, chosen by a hash, and "train" the others."""
    rows = []
    for low in LOWEST:
        prompt = f"{low}-{low + 30}:"
        held_out = zlib.crc32(prompt.encode()) % 10 == 0
        if held_out == (split == "test"):
            rows += [{"prompt": prompt, "secret": secret} for secret in range(low, low + 31)]
    return rows


def careless_game(row: dict, noise: float, numbers: random.Random) -> list[str]:
    """Return a game of the teacher as texts in turns: the prompt, a guess, its answer, the next guess, and so on."""
    low, game, texts = int(row["prompt"].split("-")[0]), GuessTheNumber(), [row["prompt"]]
    game.reset(**row)
    guess = low + 15
    for step in (*STEPS, 0):
        if numbers.random() < noise:
            guess = numbers.randint(low, low + 30)
        answer, _, done = game.step(str(guess))
        texts.append(str(guess))
        if done:
            break
        texts.append(answer)
        guess += step if answer == "higher " else -step
    return texts


@torch.no_grad()
def success(model, tokenizer, rows: list[dict], do_sample: bool) -> float:
    """Return the share of games that the model wins."""
    # top_k=0: transformers would otherwise sample from the 50 likeliest tokens only
    decoding = dict(do_sample=True, temperature=1.0, top_k=0) if do_sample else dict(do_sample=False)
    won, playing = 0.0, []
    for row in rows:
        game = GuessTheNumber()
        game.reset(**row)
        playing.append((row["prompt"], game))
    while playing:
        queries = tokenizer([text for text, _ in playing], return_tensors="pt", padding=True)
        outputs = model.generate(**queries, **decoding, max_new_tokens=8)
        guesses = tokenizer.batch_decode(outputs[:, queries["input_ids"].shape[1] :])
        going_on = []
        for (text, game), guess in zip(playing, guesses):
            guess = guess.replace("<pad>", "")
            answer, reward, done = game.step(guess.removesuffix("<eos>"))
            won += reward
            if not done:
                going_on.append((text + guess + answer, game))
        playing = going_on
    return won / len(rows)


def main(args: Args) -> None:
    check(args)
    numbers, rows = random.Random(args.seed), {split: game_rows(split) for split in ("train", "test")}
    drawn = numbers.choices(rows["train"], k=args.steps * args.batch_size)
    model, tokenizer = pretrain([careless_game(row, args.noise, numbers) for row in drawn], args)
    for split, games in rows.items():
        numbers.shuffle(games)
        with open(args.output_dir / f"{split}.jsonl", "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in games)
    print(f"success in {len(rows['test'])} held-out games:")
    print(f"  greedy                    {success(model, tokenizer, rows['test'], do_sample=False):.3f}")
    print(f"  sampled at temperature 1  {success(model, tokenizer, rows['test'] * 10, do_sample=True):.3f}")


if __name__ == "__main__":
    main(command_line.parse_ungrouped(Args))
