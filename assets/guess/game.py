"""The environment of `bash scripts/demo.sh environment`: find one of 31 numbers with five guesses.

    prompt "37-67:"   then in turns, for 50: "52" "lower " "44" "higher " "48" "higher " "50"

Who halves the range with each guess always finds it: 31 = 2**5 - 1.
"""


class GuessTheNumber:
    """Tells after each guess where the number lies. The reward is 1 where it is found and 0 where
    it is not.
    """

    def reset(self, secret: int, **columns) -> None:
        """Begin a game; nothing is added to the prompt."""
        self.secret = secret
        self.guesses_left = 5

    def step(self, response: str) -> tuple[str | None, float, bool]:
        """Return the answer to a guess, the reward, and whether the game is over."""
        self.guesses_left -= 1
        try:
            guess = int(response)
        except ValueError:
            guess = None
        if guess == self.secret:
            return None, 1.0, True
        if self.guesses_left == 0:
            return None, 0.0, True
        if guess is None:
            return "no number ", 0.0, False
        return "higher " if guess < self.secret else "lower ", 0.0, False
