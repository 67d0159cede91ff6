"""The bundled game (assets/guess), which `bash scripts/demo.sh environment` trains on."""

import re

from guess.game import GuessTheNumber
from helpers import ROOT, read_lines

HIGHER = ("higher ", 0.0, False)
LOWER = ("lower ", 0.0, False)
NONE = ("no number ", 0.0, False)
WON = (None, 1.0, True)
LOST = (None, 0.0, True)
GAMES = {  # guesses at 50, and what the game answers to each
    ("52", "44", " 50\n"): [LOWER, HIGHER, WON],
    ("", "fifty", "1", "99", "51"): [NONE, NONE, HIGHER, LOWER, LOST],
    ("1", "2", "3", "4", "50"): [HIGHER, HIGHER, HIGHER, HIGHER, WON],
}


def test_what_the_game_answers():
    for guesses, answers in GAMES.items():
        game = GuessTheNumber()
        assert game.reset(prompt="37-67:", secret=50) is None
        assert [game.step(guess) for guess in guesses] == answers


def test_the_rows_of_the_bundled_files():
    """All 31 secrets of each range of two digits; those of a tenth of the ranges are held out."""
    train, test = (
        read_lines(ROOT / "assets/guess" / f"{name}.jsonl") for name in ("train", "test")
    )
    games = {(row["prompt"], row["secret"]) for row in train + test}
    assert len(games) == len(train + test)
    assert games == {(f"{low}-{low + 30}:", low + i) for low in range(20, 61) for i in range(31)}
    held_out = {row["prompt"] for row in test}
    assert len(held_out) == 6 and not held_out & {row["prompt"] for row in train}


def test_the_rows_that_say_the_rules():
    """Of scripts/train/grpo_agent_7b.sh, whose model does not know the game."""
    rows = read_lines(ROOT / "assets/guess/rules.jsonl")
    for row in rows:
        low, high = map(int, re.findall(r"\d+", row["prompt"]))
        assert low <= row["secret"] <= high == low + 30 and "five guesses" in row["prompt"]
    assert len({row["prompt"] for row in rows}) == len(rows) == 400  # so --eval_share has some
    assert "assets/guess/rules.jsonl" in (ROOT / "scripts/train/grpo_agent_7b.sh").read_text()
