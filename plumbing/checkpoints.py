"""The run folder, atomic saves, resuming, and the final model."""

import glob
import json
import os
import pickle
import random
import shutil
from dataclasses import dataclass
from typing import Callable

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from plumbing.models import base_weights, load_config, merged
from utils import Optimizer, World, fail, first_line, full_tensor


def run_folder(args, script: str) -> tuple[str, str | None]:
    """The run's folder, and its newest complete checkpoint if `--resume` is to go on from one. Creates nothing.

    The default name is made of the script's, the model's and the data set's and the seed.
    """
    parts = [os.path.basename(part.rstrip("/")) for part in (script.removesuffix(".py"), args.model, args.dataset)]
    name = args.run_name or "__".join([*parts, str(args.seed)])
    folder = os.path.join(args.output_dir, name)
    if os.path.exists(folder) and not args.resume:
        fail(f"--run_name {name}: {folder} exists; go on from its last checkpoint with --resume, or take another name")
    parent = os.path.abspath(args.output_dir)
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    if not os.path.isdir(parent) or not os.access(parent, os.W_OK | os.X_OK):
        fail(f"--output_dir {args.output_dir}: {parent} is no folder that can be written to")
    checkpoints = checkpoint_folders(folder)
    if checkpoints:
        with open(os.path.join(folder, "args.json")) as file:
            about = json.load(file)
        own = os.path.basename(script)
        if about.get("script", own) != own:
            fail(f"--resume: {folder} is a run of {about['script']}")
        for flag in ("lora_rank", "lora_alpha"):
            before, now = (values.get(flag) for values in (about["args"], vars(args)))
            if None not in (before, now) and before != now:
                fail(f"--{flag} {now}: the run to resume has {before}")
    return folder, checkpoints[-1] if checkpoints else None


def checkpoint_folders(folder: str) -> list[str]:
    """The complete checkpoints of a run, oldest first. A folder has its name only once all of it is on the disk."""
    found = glob.glob(os.path.join(glob.escape(folder), "checkpoints", "step_*"))
    found = [path for path in found if path.rsplit("_", 1)[1].isdigit()]
    return sorted(found, key=lambda path: int(path.rsplit("_", 1)[1]))


def _fsync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def save_folder(folder: str, world: World, write: Callable[[str], None]) -> None:
    """Let every rank write into a folder that appears whole or not at all: written beside it, fsynced, then renamed."""
    parent, name = os.path.split(folder)
    temporary = os.path.join(parent, f".{name}.tmp")
    if world.main:
        shutil.rmtree(temporary, ignore_errors=True)
        os.makedirs(temporary)
    world.barrier()
    write(temporary)
    world.barrier()
    if world.main:
        for path, folders, files in os.walk(temporary):
            for item in (*files, *folders):
                _fsync(os.path.join(path, item))
        _fsync(temporary)
        replaced = os.path.join(parent, f".{name}.old")
        if os.path.exists(folder):
            os.rename(folder, replaced)
        os.rename(temporary, folder)
        _fsync(parent)
        shutil.rmtree(replaced, ignore_errors=True)
    world.barrier()


def save_checkpoint(
    folder: str, world: World, tokenizer, state: dict, models: dict[str, torch.nn.Module],
    optimizers: dict[str, Optimizer], keep: int,
) -> None:  # fmt: skip
    """Save `checkpoints/step_N`: a model folder for transformers and vLLM, plus what the trainer needs to go on.

    Args:
        state: what else the trainer needs (tensors and plain values); every rank adds the state of its global random
            generators. `state["step"]` names the folder.
        models: the policy as "", others in folders of their name beside it, such as "critic".
        optimizers: those of the models of the same names.
        keep: how many checkpoints stay, the newest ones; 0 keeps all.
    """

    def write(path: str) -> None:
        torch.save(random_state(), os.path.join(path, f"random_state_{world.rank}.pt"))
        pieces: dict[str, torch.Tensor] = {}
        states = {name: optimizer.state_dict() for name, optimizer in optimizers.items()}
        own = take_sharded({**state, "optimizers": states}, pieces)
        if pieces:
            write_sharded(path, pieces)
        for name, each in models.items():
            save_model(each, os.path.join(path, name), world)
        if world.main:
            tokenizer.save_pretrained(path)
            torch.save(own, os.path.join(path, "trainer_state.pt"))

    path = os.path.join(folder, "checkpoints", f"step_{state['step']}")
    # There is one already where a run is interrupted again after the same step.
    if not world.any(world.main and os.path.exists(path)):
        save_folder(path, world, write)
    if world.main and keep:
        for old in checkpoint_folders(folder)[:-keep]:
            shutil.rmtree(old)


def save_final(folder: str, world: World, model, tokenizer, source: str) -> None:
    """Save `final/`: the trained model in the number format of the model it came from. Changes `model` in place.

    A LoRA adapter is merged into it, and beside it in `final/adapter/` as peft saves it.
    """
    model.to(load_config("--model", source).dtype or torch.float32)

    def write(path: str) -> None:
        if getattr(model, "peft_config", None):
            save_model(model, os.path.join(path, "adapter"), world)
            weights = {name: merged(tensor, layer).cpu() for name, tensor, layer in base_weights(model)}
            with torch.device("meta"):
                plain = type(model)(model.config)
            if model.can_generate():
                plain.generation_config = model.generation_config
            if world.main:
                plain.save_pretrained(path, state_dict=weights)
        else:
            save_model(model, path, world)
        if world.main:
            tokenizer.save_pretrained(path)

    save_folder(os.path.join(folder, "final"), world, write)


def load_state(folder: str, world: World) -> dict:
    """Return the trainer's state of a checkpoint, and set this rank's global random generators as they were."""
    own = os.path.join(folder, f"random_state_{world.rank}.pt")
    if os.path.exists(own):  # a resumed run may have more ranks than before; nothing in it depends on these
        set_random_state(torch.load(own, weights_only=True))
    state = read_state(folder)
    del state["optimizers"]
    return state


def read_state(folder: str) -> dict:
    try:
        return torch.load(os.path.join(folder, "trainer_state.pt"), map_location="cpu", weights_only=True)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
        fail(f"--resume: {folder} cannot be read ({first_line(error)}); remove it to go on from the one before")


def load_optimizer(folder: str, name: str, module: torch.nn.Module, optimizer: Optimizer) -> None:
    """Give an optimizer of `module` the state that a checkpoint has of the one called `name`."""

    def look_up(x):
        if not isinstance(x, dict):
            return x
        return Stored(folder, x["sharded"]) if x.keys() == {"sharded"} else {key: look_up(y) for key, y in x.items()}

    optimizer.load_state_dict(look_up(read_state(folder)["optimizers"][name]))


def save_model(model: torch.nn.Module, path: str, world: World) -> None:
    """Save a model folder, from rank 0; the tensors of a sharded model are gathered there, one at a time."""
    state, done = None, {}  # tied weights, one parameter under two names, stay one tensor
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        state = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) not in done:
                full = full_tensor(tensor.detach())
                done[id(tensor)] = full.cpu() if world.main else None
            state[name] = done[id(tensor)]
    if world.main:
        model.save_pretrained(path, state_dict=state)


@dataclass
class Stored:
    """A tensor in the sharded part of a checkpoint."""

    folder: str
    key: str


def take_sharded(state, pieces: dict[str, torch.Tensor], key: str = ""):
    """Nested dicts, with each sharded tensor moved to `pieces` and {"sharded": its key there} in its place."""
    if isinstance(state, DTensor):
        pieces[key] = state
        return {"sharded": key}
    if not isinstance(state, dict):
        return state
    return {name: take_sharded(x, pieces, f"{key}.{name}" if key else str(name)) for name, x in state.items()}


def write_sharded(folder: str, tensors: dict[str, torch.Tensor]) -> None:
    """Write sharded tensors into a checkpoint, every rank its pieces."""
    import torch.distributed.checkpoint as dcp

    dcp.save(tensors, checkpoint_id=os.path.join(folder, "sharded"))


def read_sharded(folder: str, tensors: dict[str, torch.Tensor]) -> None:
    """Read into tensors, whole or sharded over any number of ranks, what `write_sharded` wrote; ranks do not meet."""
    import torch.distributed.checkpoint as dcp

    dcp.load(tensors, checkpoint_id=os.path.join(folder, "sharded"), no_dist=True)


def random_state() -> dict:
    """The state of this process's global random generators, in types that torch.load takes with weights_only."""
    kind, keys, *rest = np.random.get_state()
    state = {"python": random.getstate(), "numpy": (kind, keys.tolist(), *rest), "torch": torch.get_rng_state()}
    return {**state, "cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else state


def set_random_state(state: dict) -> None:
    """Set this process's global random generators as `random_state` found them."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
