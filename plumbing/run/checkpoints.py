"""Checkpoints and the final model: what a run saves, and what it loads to resume."""

import os
import shutil
import warnings
from pathlib import Path
from typing import Callable

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, VIDEO_PROCESSOR_NAME

from plumbing.models.config import base_of, find_file
from plumbing.models.loading import load_model
from plumbing.models.sharding import base_weights
from plumbing.models.tokenizer import check_can_read
from utils import Optimizer, World, as_user_error, first_line, full_tensor, say

# dcp warns of this although `no_dist` asks for it.
warnings.filterwarnings("ignore", "torch.distributed is disabled")

# Gather tensor by tensor, to the CPU memory of rank 0.
GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)
PROCESSOR_FILES = (IMAGE_PROCESSOR_NAME, VIDEO_PROCESSOR_NAME, PROCESSOR_NAME)
# A parameter that has had no gradient has no state.
ALLOW_MISSING = StateDictOptions(strict=False)


def checkpoint_folders(folder: str) -> list[str]:
    """Return the complete checkpoints of a run, oldest first. A checkpoint gets its name once all of
    it is written.
    """
    paths = map(str, Path(folder, "checkpoints").glob("step_[0-9]*"))
    return sorted(paths, key=lambda path: int(path.rpartition("_")[2]))


def save_checkpoint(
    folder: str,
    world: World,
    tokenizer: PreTrainedTokenizerBase,
    state: dict,
    models: dict[str, torch.nn.Module],
    optimizers: dict[str, Optimizer],
    keep: int,
) -> None:
    """Save `checkpoints/step_N`: a model folder for transformers and vLLM, plus what the trainer
    needs to continue.

    Args:
        state: the trainer's tensors and plain values; `state["step"]` is N.
        models: the policy as "", other models by the names of their folders in the checkpoint, such
            as "critic".
        optimizers: by the names of their models. Without any, only the policy is saved, as
            `checkpoints/best`.
        keep: how many of the newest checkpoints stay; 0 keeps all.
    """

    def write(path: str) -> None:
        for name, model in models.items():
            if optimizers or name == "":
                save_model(model, f"{path}/{name}", world)
        for name, optimizer in optimizers.items():
            if optimizer.adam.state:  # without a state, torch would make an update to get one
                tensors = trained_state(models[name], optimizer)
                dcp.save(
                    tensors,
                    checkpoint_id=f"{path}/{name}/optimizer",
                    no_dist=world.size == 1,
                )
        world.on_main(save_tokenizer, tokenizer, path)
        world.on_main(torch.save, state, f"{path}/trainer_state.pt")

    name = f"step_{state['step']}" if optimizers else "best"
    path = f"{folder}/checkpoints/{name}"
    # The checkpoint exists already if a run is interrupted twice after the same step.
    if not optimizers or not world.any(world.main and os.path.exists(path)):
        save_folder(path, world, write)
    if world.main and keep:
        for old in checkpoint_folders(folder)[:-keep]:
            replace_folder(old)


def best_value(folder: str, metric: str) -> float:
    """Return what an evaluation gave for the model in `checkpoints/best`; -inf if there is none, or
    if that evaluation has no such metric.
    """
    path = f"{folder}/checkpoints/best/trainer_state.pt"
    state = torch.load(path, map_location="cpu") if os.path.exists(path) else {"results": {}}
    value = state["results"].get(metric)
    return -torch.inf if value is None else value


def save_final(
    folder: str,
    world: World,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
) -> None:
    """Save `final/`: the trained model, in the number format of --model.

    A LoRA adapter is merged into the model, and is also saved by peft, in `final/adapter/`.

    Args:
        source: --model.
    """

    def write(path: str) -> None:
        if getattr(model, "peft_config", None):
            save_model(model, f"{path}/adapter", world)
            world.on_main(save_tokenizer, tokenizer, f"{path}/adapter")
        save_like(source, model, path, world)
        world.on_main(save_tokenizer, tokenizer, path)

    save_folder(f"{folder}/final", world, write)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Save a tokenizer, and the files of what else reads a model's input, such as images."""
    tokenizer.save_pretrained(path)
    source = base_of(tokenizer.name_or_path)
    for name in PROCESSOR_FILES:
        if file := source and find_file(source, name):
            shutil.copy(file, path)


def save_model(model: PreTrainedModel, path: str, world: World) -> None:
    """Gather a model's weights on rank 0, and save a model folder there. A model with an adapter
    saves only the adapter, in peft's form.
    """
    weights = get_model_state_dict(model, options=GATHERED)
    # Gathering makes two tensors of tied weights, which transformers would not see as tied.
    for name in model.all_tied_weights_keys:
        weights.pop(name, None)
    world.on_main(model.save_pretrained, path, state_dict=weights)


@torch.no_grad()
def save_like(source: str, model: PreTrainedModel, path: str, world: World) -> None:
    """Save a model folder that differs from the model `source` only in the weights that have trained.

    An adapter's change d is added to the weights W of `source` in float64, and the sum is rounded
    once, to the format of W. A printed line says how much of d the rounding loses.
    """
    loaded: list = []  # filled on rank 0: what `on_main` returns is sent to the other ranks
    scalar = not model.can_generate()
    world.on_main(
        lambda: loaded.append(load_model("--model", source, "auto", torch.device("cpu"), scalar))
    )
    weights = loaded[0].state_dict() if world.main else {}
    parameters = model.named_parameters(remove_duplicate=False)
    trained = {name for name, parameter in parameters if parameter.requires_grad}
    lost = change = 0.0  # sums of squares
    for name, tensor, layer in base_weights(model):
        if layer is None and name not in trained:
            continue
        new = full_tensor(layer.get_delta_weight("default") if layer else tensor)
        if not world.main:
            continue
        new = new.cpu()
        if layer:
            change += new.double().square().sum().item()
            new = weights[name].double() + new
            lost += (new - weights[name].copy_(new)).square().sum().item()
        weights[name].copy_(new)
    if change:
        say(
            f"final/: the adapter's change d is merged into weights W in {loaded[0].dtype}: rounding loses "
            f"{(lost / change) ** 0.5:.2g} of it, |saved - (W + d)| / |d|; final/adapter has all of it"
        )
    if world.main:
        loaded[0].config = model.config  # reward_model.py writes to it
    world.on_main(lambda: loaded[0].save_pretrained(path))


def trained_state(model: PreTrainedModel, optimizer: Optimizer) -> dict:
    """Return the state that `dcp` saves by the names of parameters, with any sharding, and loads in
    place.

    For a model with an adapter, the state includes the weights that train: peft's folder lacks a
    head that trains.
    """
    state = {"adam": get_optimizer_state_dict(model, optimizer.adam)}
    if getattr(model, "peft_config", None):
        state["weights"] = {
            name: x.detach() for name, x in model.named_parameters() if x.requires_grad
        }
    return state


def load_checkpoint(
    folder: str,
    tokenizer: PreTrainedTokenizerBase,
    models: dict[str, torch.nn.Module],
    optimizers: dict[str, Optimizer],
) -> dict:
    """Load what `save_checkpoint` has saved, except the models' folders: set the optimizers and the
    weights of an adapter that trains, and return `state`.

    The number of ranks and the sharding may have changed since. Raises a UserError for a checkpoint
    of another model, tokenizer or script.
    """
    check_can_read("--resume", folder, tokenizer)
    with as_user_error(f"--resume {folder}"):
        state = torch.load(f"{folder}/trainer_state.pt", map_location="cpu", weights_only=True)
        for name, optimizer in optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
            load_optimizer(f"{folder}/{name}/optimizer", models[name], optimizer)
    return state


def load_optimizer(path: str, model: PreTrainedModel, optimizer: Optimizer) -> None:
    """Load Adam's state of a model from a checkpoint, and the weights of the model's adapter. The
    learning rate and other flags of Adam are not loaded.
    """
    if not os.path.isdir(path):  # the checkpoint was saved before the first update
        return
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state = trained_state(model, optimizer)
    flags = state["adam"].pop("param_groups")
    adam = state["adam"]["state"]
    # A parameter that has had no gradient has no state in the checkpoint. dcp gives the entries
    # these names.
    state["adam"]["state"] = {key: adam[key] for key in adam if f"adam.state.{key}.step" in saved}
    try:
        dcp.load(state, checkpoint_id=path, no_dist=True)
    except dcp.api.CheckpointException as failed:  # a BaseException
        raise RuntimeError(first_line(next(iter(failed.failures.values()))[0])) from failed
    state["adam"]["param_groups"] = flags
    set_optimizer_state_dict(model, optimizer.adam, state["adam"], options=ALLOW_MISSING)


def save_folder(folder: str, world: World, write: Callable[[str], None]) -> None:
    """Save a folder that appears complete or not at all: write it under another name, and rename it.

    Args:
        write: called on all ranks with the path to write to.
    """
    parent, name = os.path.split(folder)
    temporary = f"{parent}/.{name}.tmp"

    def begin() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        os.makedirs(temporary)

    world.on_main(begin)
    write(temporary)
    world.barrier()
    world.on_main(replace_folder, folder, temporary)


def replace_folder(folder: str, new: str = "") -> None:
    """Put another folder in the place of a folder, or remove it. For its readers all files go at
    once, as it is renamed first; a kill while they are deleted loses nothing of the new one.
    """
    parent, name = os.path.split(folder)
    removed = f"{parent}/.{name}.old"
    shutil.rmtree(removed, ignore_errors=True)  # left by a kill
    if os.path.exists(folder):
        os.rename(folder, removed)
    if new:
        os.rename(new, folder)
    shutil.rmtree(removed, ignore_errors=True)
