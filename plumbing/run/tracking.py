"""Where --track sends a run to, beside its own files: Weights & Biases or TensorBoard.

Imports plumbing.run.files and plumbing.run.resume (where the run begins).
"""

import os
import shutil
import uuid
from dataclasses import asdict

from plumbing.run.files import replace_file
from plumbing.run.resume import Origin
from utils import fail, first_line


class Wandb:
    """A run in Weights & Biases; a resumed one goes on under its id. `url` is its address there."""

    def __init__(self, origin: Origin, args):
        """Begin it in the run's folder, which is there; leave no new folder if that fails."""
        import wandb

        id_file = os.path.join(origin.folder, "wandb_run_id.txt")
        if not origin.checkpoint or not os.path.exists(id_file):
            replace_file(id_file, uuid.uuid4().hex)
        with open(id_file) as file:
            run_id = file.read()
        try:
            self.run = wandb.init(
                project=args.wandb_project, name=os.path.basename(origin.folder), id=run_id, resume="allow",
                dir=origin.folder, config=asdict(args), settings=wandb.Settings(silent=True),
            )  # fmt: skip
        except wandb.Error as error:
            if not origin.exists:
                shutil.rmtree(origin.folder)
            fail(f"--track wandb: Weights & Biases does not start ({first_line(error)})")
        self.url = self.run.url

    @staticmethod
    def check() -> None:
        """End the run if the package is not installed, or has no login, which it needs unless WANDB_MODE says so."""
        try:
            import wandb
        except ImportError:
            fail("--track wandb: the package wandb is not installed (pip install wandb)")
        try:
            wandb.login()
        except wandb.Error as error:
            fail(f"--track wandb: {first_line(error)} WANDB_MODE=offline needs no login")

    def metrics(self, row: dict) -> None:
        """Log the numbers of a row of metrics.jsonl."""
        self.run.log({name: x for name, x in row.items() if x is not None}, step=row["step"])

    def histogram(self, name: str, values: list[int], step: int) -> None:
        """Log how values are spread; to be followed by the step's metrics."""
        import wandb

        self.run.log({name: wandb.Histogram(values)}, step=step, commit=False)

    def table(self, rows: list[dict], step: int) -> None:
        """Log samples; to be followed by the step's metrics."""
        import wandb

        table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self.run.log({"samples": table}, step=step, commit=False)

    def close(self, **summary) -> None:
        """End it, with what is to stand in its summary."""
        self.run.summary.update(summary)
        self.run.finish()


class TensorBoard:
    """The files of a run in its folder tensorboard/; what a resumed run does again is shown once."""

    url = None

    def __init__(self, origin: Origin, args):
        """Begin them in the run's folder, which is there."""
        from torch.utils.tensorboard import SummaryWriter

        step = int(origin.checkpoint.rpartition("_")[2]) if origin.checkpoint else 0
        self.writer = SummaryWriter(os.path.join(origin.folder, "tensorboard"), purge_step=step or None)
        self.writer.add_text("args", as_table([{"flag": name, "value": x} for name, x in asdict(args).items()]), step)

    @staticmethod
    def check() -> None:
        """End the run if the package is not installed."""
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError:
            fail("--track tensorboard: the package tensorboard is not installed (pip install tensorboard)")

    def metrics(self, row: dict) -> None:
        """Log the numbers of a row of metrics.jsonl."""
        for name, x in row.items():
            if x is not None and name != "step":
                self.writer.add_scalar(name, x, row["step"])
        self.writer.flush()

    def histogram(self, name: str, values: list[int], step: int) -> None:
        """Log how values are spread."""
        import numpy as np

        self.writer.add_histogram(name, np.array(values), step)

    def table(self, rows: list[dict], step: int) -> None:
        """Log samples."""
        self.writer.add_text("samples", as_table(rows), step)

    def close(self, **summary) -> None:
        """End them, with texts to be shown."""
        for name, text in summary.items():
            self.writer.add_text(name, text)
        self.writer.close()


TRACKERS = {"wandb": Wandb, "tensorboard": TensorBoard}


def as_table(rows: list[dict]) -> str:
    """Return rows of the same columns as a table in Markdown."""
    cell = lambda x: str(x).replace("|", "\\|").replace("\n", "<br>")
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)
