"""Checkpoints, the final model, and what is loaded of a checkpoint.

Imports plumbing.run.files (folders that are whole), plumbing.models.lora and plumbing.models.loading.
"""

import contextlib
import glob
import os
import pickle
import random
import warnings
from typing import Callable

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from plumbing.models.loading import load_config, read_tokenizer, vocabulary_difference
from plumbing.models.lora import base_weights, merged
from plumbing.run.files import remove_folder, save_folder
from utils import Optimizer, World, fail, first_line

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # dcp's, where `no_dist` asks for just that

GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)  # tensor by tensor, to the memory of rank 0
ALLOW_MISSING = StateDictOptions(strict=False)  # a parameter that has had no gradient has no state


def checkpoint_folders(folder: str) -> list[str]:
    """Return the complete checkpoints of a run, oldest first. A folder has its name only once all of it is on disk."""
    found = glob.glob(os.path.join(glob.escape(folder), "checkpoints", "step_*"))
    found = [path for path in found if path.rsplit("_", 1)[1].isdigit()]
    return sorted(found, key=lambda path: int(path.rsplit("_", 1)[1]))


def save_checkpoint(
    folder: str, world: World, tokenizer, state: dict, models: dict[str, torch.nn.Module],
    optimizers: dict[str, Optimizer], keep: int,
) -> None:  # fmt: skip
    """Save `checkpoints/step_N`: a model folder for transformers and vLLM, plus what the trainer needs to go on.

    Args:
        state: the trainer's tensors and plain values; `state["step"]` names the folder.
        models: the policy as "", others by the names of their folders within the checkpoint, such as "critic".
        optimizers: of the models of the same names.
        keep: number of checkpoints that stay, the newest ones; 0 keeps all.
    """

    def write(path: str, on_main: Callable) -> None:
        for name, model in models.items():
            save_model(model, os.path.join(path, name), on_main)
        for name, optimizer in optimizers.items():
            if optimizer.adam.state:  # else torch would make an update to get one
                tensors = trained_state(models[name], optimizer)
                dcp.save(tensors, checkpoint_id=os.path.join(path, name, "optimizer"), no_dist=world.size == 1)
        random_states = world.all_gather([random_state()])

        def write_state() -> None:
            tokenizer.save_pretrained(path)
            for rank, saved in enumerate(random_states):
                torch.save(saved, os.path.join(path, f"random_state_{rank}.pt"))
            counters = {name: optimizer.state_dict() for name, optimizer in optimizers.items()}
            torch.save({**state, "optimizers": counters}, os.path.join(path, "trainer_state.pt"))

        on_main(write_state)

    path = os.path.join(folder, "checkpoints", f"step_{state['step']}")
    # There is one already where a run is interrupted again after the same step.
    if not world.any(world.main and os.path.exists(path)):
        save_folder(path, world, write, with_checksums=True)
    if world.main and keep:
        for old in checkpoint_folders(folder)[:-keep]:
            remove_folder(old)


def save_final(folder: str, world: World, model, tokenizer, source: str) -> None:
    """Save `final/`: the trained model in the number format of the model it came from. Changes `model` in place.

    A LoRA adapter is merged into it, and saved in `final/adapter/` by peft, too.
    """
    model.to(load_config("--model", source).dtype or torch.float32)

    def write(path: str, on_main: Callable) -> None:
        if getattr(model, "peft_config", None):
            save_model(model, os.path.join(path, "adapter"), on_main)
            save_merged(model, path, world, on_main)
        else:
            save_model(model, path, on_main)
        on_main(lambda: tokenizer.save_pretrained(path))

    save_folder(os.path.join(folder, "final"), world, write)


def save_model(model, path: str, on_main: Callable) -> None:
    """Save a model folder from rank 0, where the weights are gathered; that of a model with an adapter is peft's.

    Args:
        on_main: lets rank 0 write, see `plumbing.run.files.save_folder`.
    """
    weights = get_model_state_dict(model, options=GATHERED)
    for name in model.all_tied_weights_keys:  # gathered twice, transformers would not see that it is tied
        weights.pop(name, None)
    on_main(lambda: model.save_pretrained(path, state_dict=weights))


def save_merged(model, path: str, world: World, on_main: Callable) -> None:
    """Save a model folder with the adapter merged into the weights, which stay as they are."""
    weights = {}
    for name, tensor, layer in base_weights(model):
        full = merged(tensor, layer)
        weights[name] = full.cpu() if world.main else None
    with torch.device("meta"):
        plain = type(model)(model.config)
    if model.can_generate():
        plain.generation_config = model.generation_config
    on_main(lambda: plain.save_pretrained(path, state_dict=weights))


def trained_state(model, optimizer: Optimizer) -> dict:
    """Return the state that `dcp` saves by the names of parameters, and loads in place, whatever the sharding.

    Of a model with an adapter the weights that train are in there, too: peft's folder lacks a head that trains.
    """
    state = {"adam": get_optimizer_state_dict(model, optimizer.adam)}
    if getattr(model, "peft_config", None):
        state["weights"] = {name: x.detach() for name, x in model.named_parameters() if x.requires_grad}
    return state


def load_checkpoint(
    folder: str, world: World, tokenizer, models: dict[str, torch.nn.Module], optimizers: dict[str, Optimizer]
) -> dict:
    """Load what `save_checkpoint` has saved, but for the models' folders, and return its `state`.

    This sets the optimizers, the weights of an adapter that trains, and this rank's global random generators. Neither
    the number of ranks nor the sharding need be those of the run that saved it. End the run for what does not fit.
    """
    if difference := vocabulary_difference(tokenizer, read_tokenizer("--resume", folder)):
        fail(f"--resume: --model has another tokenizer than {folder}, whose vocabulary {difference}")
    with readable(folder):
        state = torch.load(os.path.join(folder, "trainer_state.pt"), map_location="cpu", weights_only=True)
        counters = state.pop("optimizers")
        for name, optimizer in optimizers.items():
            optimizer.load_state_dict(counters[name])
    for name, optimizer in optimizers.items():
        load_optimizer(folder, name, models[name], optimizer)
    path = os.path.join(folder, f"random_state_{world.rank}.pt")
    if os.path.exists(path):  # a resumed run may have more ranks than before; nothing in it depends on these
        with readable(folder):
            set_random_state(torch.load(path, weights_only=True))
    return state


def load_optimizer(folder: str, name: str, model, optimizer: Optimizer) -> None:
    """Load the state of Adam that a checkpoint has for the model called `name`, and the weights of its adapter."""
    path = os.path.join(folder, name, "optimizer")
    if not os.path.isdir(path):  # saved before the first update
        return
    with readable(folder):
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        state = trained_state(model, optimizer)
        adam = state["adam"]["state"]
        state["adam"]["state"] = {key: adam[key] for key in adam if f"adam.state.{key}.step" in saved}
        dcp.load(state, checkpoint_id=path, no_dist=True)
    set_optimizer_state_dict(model, optimizer.adam, state["adam"], options=ALLOW_MISSING)


@contextlib.contextmanager
def readable(folder: str):
    """End the run if what this context reads of a checkpoint, which is as it was saved, does not fit the run."""
    try:
        yield
    except (dcp.api.CheckpointException, RuntimeError, OSError, EOFError, KeyError, pickle.UnpicklingError) as error:
        if isinstance(error, dcp.api.CheckpointException):
            ((error, _),) = error.failures.values()
        reason = f"{folder} cannot be loaded ({first_line(error)})"
        fail(f"--resume: {reason}; is it from another script, or --model not what it was?")


def random_state() -> dict:
    """Return the state of this process's global random generators, in types that torch.load takes with weights_only."""
    kind, keys, *rest = np.random.get_state()
    state = {"python": random.getstate(), "numpy": (kind, keys.tolist(), *rest), "torch": torch.get_rng_state()}
    return {**state, "cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else state


def set_random_state(state: dict) -> None:
    """Set this process's global random generators to what `random_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
