"""Make assets/tiny and assets/guess: the small language models that the demos and the tests train.

    python assets/make_models.py tiny
    python assets/make_models.py guess

Both are Qwen2 models with the configuration and the tokenizer of assets/tiny, pretrained from
scratch by next-token prediction on the demonstrations of a careless teacher: 2 layers of width 64,
with 2 heads of 32 channels, which vLLM's attention on CPUs supports, and a token a byte, so that no
text is unknown and decoding gives back what was encoded. A model learns both the method and the
carelessness: greedy decoding is nearly always right, a sample at temperature 1 less than half of
the time. That is a base for reinforcement learning: right answers are frequent enough to be
reinforced, and there is much to gain. No pretraining problem is among the held-out ones.

1. tiny does 3-digit addition column by column (units, tens, hundreds, each with its carry). In a
   quarter of the columns the teacher writes a wrong digit.

       prompt "737+361="   response "7+1+0=8 3+6+0=9 7+3+0=10 #### 1098" and the end-of-sequence token

2. guess plays the game of assets/guess/game.py on the rows of train.jsonl beside it, {"prompt":
   "37-67:", "secret": 50}. The model guesses a number, the game answers "higher " or "lower ", and
   so on for at most five guesses. The teacher halves the range: first the middle, then 8, 4,
   2 and 1 up or down from the last guess, which finds any number. But in a third of the turns the
   guess is random.

       37-67:52<eos>lower 44<eos>higher 48<eos>higher 50<eos>

Each takes about 3 minutes on one core; two runs on one machine wrote the same bytes. Held-out
success: tiny 1.00 greedy and 0.41 sampled, guess 1.00 and 0.38.
"""

import json
import random
import sys
from pathlib import Path
from typing import Literal

import torch
import tyro
from tqdm import tqdm
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer, set_seed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from guess.game import GuessTheNumber

from plumbing.data.tasks import arithmetic, worked_addition
from plumbing.rollout.batch import collate

ASSETS = Path(__file__).resolve().parent
IGNORE = -100  # transformers' label of the positions that carry no loss
STEPS = 1500  # updates
BATCH_SIZE = 128  # demonstrations per update; each is used once
SEED = 1  # of the weights and of the teacher's mistakes
# Probability that the teacher writes a wrong digit, or guesses blindly.
NOISE = {"tiny": 0.24, "guess": 0.35}


def make_batch(demonstrations: list[list[str]], tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and labels, both (N, L), padded on the right; labels of what the teacher
    wrote.

    Args:
        demonstrations: texts in turns: what is given, what the teacher wrote, what is given after
            that, and so on.
    """
    rows = []
    for prompt, *texts in demonstrations:
        turns = [tokenizer.encode(text) for text in texts]
        written = [turn % 2 == 0 for turn, tokens in enumerate(turns) for _ in tokens]
        rows.append((tokenizer.encode(prompt), sum(turns, []), written))
    input_ids, written = collate(rows, "cpu")
    return input_ids, input_ids.masked_fill(~written, IGNORE)


def pretrain(demonstrations: list[list[str]]) -> Qwen2ForCausalLM:
    """Return a model that was trained from scratch on demonstrations, each used once."""
    tokenizer = Qwen2Tokenizer.from_pretrained(ASSETS / "tiny")
    model = Qwen2ForCausalLM(Qwen2Config.from_pretrained(ASSETS / "tiny"))
    model.generation_config = GenerationConfig.from_pretrained(ASSETS / "tiny")
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    warmup = STEPS // 10
    for step in tqdm(range(STEPS), "pretraining"):
        input_ids, labels = make_batch(demonstrations[step * BATCH_SIZE :][:BATCH_SIZE], tokenizer)
        # No attention mask: the padding is on the right, where causal attention does not look.
        model(input_ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 3e-3 * min(
            (step + 1) / warmup, (STEPS - step) / (STEPS - warmup)
        )
        optimizer.step()
        optimizer.zero_grad()
    return model


# ---- the game ------------------------------------------------------------------------------------


def careless_game(row: dict, noise: float, numbers: random.Random) -> list[str]:
    """Return a game of the teacher as texts in turns: the prompt, a guess with its <eos>, its
    answer, and so on.
    """
    low = int(row["prompt"].split("-")[0])
    game = GuessTheNumber()
    texts = [row["prompt"]]
    game.reset(**row)
    guess = low + 15
    for step in (8, 4, 2, 1, 0):
        if numbers.random() < noise:
            guess = numbers.randint(low, low + 30)
        answer, _, done = game.step(str(guess))
        texts.append(f"{guess}<eos>")
        if done:
            break
        texts.append(answer)
        guess += step if answer == "higher " else -step
    return texts


# ---- the command ---------------------------------------------------------------------------------


def main(name: tyro.conf.Positional[Literal["tiny", "guess"]]) -> None:
    """Make a model, which replaces that in assets/."""
    folder = ASSETS / name
    numbers = random.Random(SEED)
    count = STEPS * BATCH_SIZE
    if name == "tiny":
        prompts = [row["prompt"] for row in arithmetic("", "train", count)]
        demonstrations = [
            [prompt, worked_addition(prompt, NOISE[name], numbers) + "<eos>"] for prompt in prompts
        ]
    else:
        lines = sorted((folder / "train.jsonl").read_text().splitlines())
        games = map(json.loads, numbers.choices(lines, k=count))
        demonstrations = [careless_game(row, NOISE[name], numbers) for row in games]
    # Another number adds floats in another order, so it may give other weights.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    set_seed(SEED)
    model = pretrain(demonstrations)
    model.save_pretrained(folder)
    print(f"wrote {folder}: {model.num_parameters():,} parameters")


if __name__ == "__main__":
    tyro.cli(main)
