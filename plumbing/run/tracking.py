"""Where --track sends a run, in addition to its files: Weights & Biases, or trackio, which has the same functions."""

import importlib
import os
from dataclasses import asdict

from plumbing.run.resume import Origin
from utils import loading

PROJECT = "rl-on-language-models"  # unless the variable WANDB_PROJECT names another one


def check(name: str) -> None:
    """Exit with code 2 if the library is not installed, or if it requires a login and there is none."""
    with loading(f"--track {name}"):
        library = importlib.import_module(name)
        if name == "wandb":
            library.login()  # WANDB_MODE=offline requires none


class Tracker:
    """A run in the library named by --track; a resumed run continues there. `url` is its address, if it has one."""

    def __init__(self, origin: Origin, args):
        """Begin the run; its folder exists."""
        with loading(f"--track {args.track}"):
            self.library = importlib.import_module(args.track)
            # Weights & Biases continues the run of an id, trackio that of a name.
            options = {"id": origin.run_id, "dir": origin.folder} if args.track == "wandb" else {}
            self.run = self.library.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT), name=os.path.basename(origin.folder),
                config=asdict(args), resume="allow", **options,
            )  # fmt: skip
        self.url = getattr(self.run, "url", None)

    def metrics(self, row: dict) -> None:
        """Log the numbers of a row of metrics.jsonl."""
        self.library.log({name: x for name, x in row.items() if x is not None}, step=row["step"])

    def table(self, rows: list[dict], step: int) -> None:
        """Log samples of the same columns."""
        table = self.library.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self.library.log({"samples": table}, step=step)

    def close(self) -> None:
        """End the run."""
        self.library.finish()
