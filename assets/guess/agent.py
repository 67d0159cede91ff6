"""The agent of `bash scripts/demo.sh agent`, which plays game.py and asks for guesses by HTTP."""

import json
import urllib.request

from game import GuessTheNumber


def play(base_url: str, prompt: str, secret: int) -> float:
    """Return the reward of a game."""
    game = GuessTheNumber()
    game.reset(secret)
    messages = [{"role": "user", "content": prompt}]
    done = False
    while not done:
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        with urllib.request.urlopen(f"{base_url}/chat/completions", body) as answer:
            message = json.load(answer)["choices"][0]["message"]
        observation, reward, done = game.step(message["content"])
        messages += [message, {"role": "user", "content": observation}]
    return reward
