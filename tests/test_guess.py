"""The bundled game (assets/guess), which `bash scripts/demo.sh environment` trains on."""

import json

from helpers import ROOT, read_lines
from make_models import GuessTheNumber, game_rows

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
    rows = {
        split: read_lines(ROOT / "assets" / "guess" / f"{split}.jsonl")
        for split in ("train", "test")
    }
    for split in rows:
        assert sorted(map(json.dumps, rows[split])) == sorted(map(json.dumps, game_rows(split)))
    assert not {row["prompt"] for row in rows["train"]} & {row["prompt"] for row in rows["test"]}
