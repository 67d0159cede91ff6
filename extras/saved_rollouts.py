"""Rollouts in files: --save_rollouts writes them, --rollouts_from trains on them.

A rollout has two files in `rollouts/` of the run's folder, named by its key: rollout_1_3 is that of
seed 1 and step 3. NAME.jsonl has a line for each response, NAME.safetensors what else is stored of
its tokens: (N, T) by name, 0 after a response's end.
"""

import json
import math
import os
from types import SimpleNamespace

import numpy as np
from safetensors.torch import load_file, save_file

from plumbing.models.sharding import model_device
from plumbing.rollout.batch import Batch, Sample
from plumbing.run.log import read_args
from utils import as_user_error


class FileSampler(SimpleNamespace):
    """A Sampler for `collect` that saves its rollouts, or with --rollouts_from reads saved ones.
    What `collect` makes of samples and scores is made anew: flags may change it.

    It has the fields of the Sampler, which is `sampler`; `folder` is that of the run.
    """

    def rollout(self, rows: list, per_prompt: int, key: tuple, greedy: bool = False) -> Batch:
        """See `Sampler.rollout`; raise a UserError if a saved rollout is missing, or of other
        prompts or token ids. What only metrics of conversations read is not saved.
        """
        path = f"{self.args.rollouts_from or self.folder}/rollouts/{'_'.join(map(str, key))}"
        asked = [row for row in rows for _ in range(per_prompt + greedy)]
        if not self.args.rollouts_from:
            batch = self.sampler.rollout(rows, per_prompt, key, greedy)
            if self.world.main:
                save(path, asked, batch)
            return batch
        with as_user_error(f"--rollouts_from {path}"):
            tensors = load_file(f"{path}.safetensors")
            lines = [json.loads(line) for line in open(f"{path}.jsonl")]
            # Without those of --advantage remax, if another one reads them.
            chosen = [i for i, line in enumerate(lines) if greedy or not line.get("greedy")]
            if greedy > lines[-1].get("greedy", False) or (
                [lines[i].pop("asked") for i in chosen] != [row["query"] for row in asked]
            ):
                raise ValueError(
                    "is of other prompts, or without greedy responses; --dataset, --shuffle, --rollout_batch_size, "
                    "--group_size, the prompts' template and the tokenizer have to be those of the run that saved it"
                )
            if not getattr(self.args, "turn_rewards", False):
                tensors.pop("turn_rewards", None)
            else:  # they are times the weight of their source
                saved = read_args(self.args.rollouts_from)["args"]
                same = [saved[x] == [*getattr(self.args, x)] for x in ("reward", "reward_weights")]
                if not {"turn_rewards", "turns"} <= {*tensors} or not all(same):
                    raise ValueError(
                        "--turn_rewards, --reward and --reward_weights have to be those of the run that saved it"
                    )
        read = [Sample(outputs={}, **lines[i]) for i in chosen]
        for i, x, row in zip(chosen, read, asked):
            x.row = row | x.row
            x.response = np.array(x.response, np.int32)
            x.outputs = {name: of[i, : len(x.response)].numpy() for name, of in tensors.items()}
            # A source that did not score them has given no score.
            x.scores = dict.fromkeys(self.reward_sources.sources, math.nan) | x.scores
        return Batch.from_samples(read, model_device(self.model))


def save(path: str, asked: list, batch: Batch) -> None:
    """Save a rollout of some rows."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    names = {name for x in batch.samples for name in x.outputs}
    # Times 1.0: the mask as numbers. Turn rewards stay float64.
    save_file({name: 1.0 * batch.tokens[name] for name in names}, f"{path}.safetensors")
    with open(f"{path}.jsonl", "w") as file:
        for row, x in zip(asked, batch.samples):
            line = {
                "asked": row["query"],
                "row": {name: x.row[name] for name in ("prompt", "query")},  # an agent's are others
                "response": x.response.tolist(),
                "text": x.text,
                "stopped": x.stopped,
                "greedy": x.greedy,
                "scores": {name: score for name, score in x.scores.items() if math.isfinite(score)},
                "starts": list(x.starts),
            }
            print(json.dumps(line), file=file)
