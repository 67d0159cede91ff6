"""An OpenEnv server of the game of assets/guess, at the port that is given."""

import sys
from pathlib import Path

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

sys.path.insert(0, str(Path(__file__).parents[2] / "assets" / "guess"))

from game import GuessTheNumber  # noqa: E402


class Guess(Action):
    response: str


class Hint(Observation):
    text: str = ""


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=None, episode_id=None, **columns):
        self.game = GuessTheNumber()
        self.game.reset(**columns)
        return Hint()

    def step(self, action, timeout_s=None, **options):
        text, reward, done = self.game.step(action.response)
        return Hint(text=text or "", reward=reward, done=done)


app = create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=512)
uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
