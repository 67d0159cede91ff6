"""The bundled game (assets/guess) and its base, which `bash scripts/demo.sh environment` trains."""

import json
import random

from helpers import ROOT, read_lines
from make_models import IGNORE, GuessTheNumber, careless_game, game_rows, make_batch, make_tokenizer

HIGHER, LOWER, NONE = ("higher ", 0.0, False), ("lower ", 0.0, False), ("no number ", 0.0, False)
WON, LOST = (None, 1.0, True), (None, 0.0, True)
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
    rows = {split: read_lines(ROOT / "assets" / "guess" / f"{split}.jsonl") for split in ("train", "test")}
    for split in rows:
        assert sorted(map(json.dumps, rows[split])) == sorted(map(json.dumps, game_rows(split)))
    assert not {row["prompt"] for row in rows["train"]} & {row["prompt"] for row in rows["test"]}


def test_the_teacher_wins_every_game_but_for_carelessness():
    numbers, rows = random.Random(0), game_rows("train") + game_rows("test")
    assert all(careless_game(row, 0.0, numbers)[-1] == str(row["secret"]) for row in rows)
    assert careless_game({"prompt": "37-67:", "secret": 50}, 0.0, numbers) == [
        "37-67:", "52", "lower ", "44", "higher ", "48", "higher ", "50",
    ]  # fmt: skip
    games = [careless_game(row, 0.35, numbers) for row in rows]
    assert 0.35 < sum(game[-1] == str(row["secret"]) for game, row in zip(games, rows)) / len(rows) < 0.45
    assert all(guess.isdecimal() and len(guess) == 2 for game in games for guess in game[1::2])


def test_only_what_the_teacher_wrote_has_a_loss():
    tokenizer = make_tokenizer()
    input_ids, labels = make_batch([["3-4:", "3", "no ", "4"], ["5:", "6"]], tokenizer)
    assert tokenizer.batch_decode(input_ids) == ["3-4:3<eos>no 4<eos>", "5:6<eos>" + 7 * "<pad>"]
    assert [tokenizer.decode(row[row != IGNORE]) for row in labels] == ["3<eos>4<eos>", "6<eos>"]
