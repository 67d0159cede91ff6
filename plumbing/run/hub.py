"""The repository of a run's model on the Hugging Face hub: made at the start, pushed to at the end; --push_to_hub.

What is pushed is the run's final/, into which the model card and the files that it refers to are put first. So
`hf upload REPOSITORY final/` pushes the same.
Imports plumbing.run.files and plumbing.run.model_card.
"""

import os
import re
import shlex
import shutil

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id

from plumbing.run.files import replace_file, writing
from plumbing.run.model_card import address, model_card
from utils import fail, first_line

WEIGHTS = "*.safetensors*"  # and their index


def open_repository(args, run_name: str) -> str:
    """Make the repository, unless it is there, and return its id, owner/name; for rank 0 alone.

    End the run if it could not be pushed to at the end: no token, a wrong name, no right to write.
    """
    name = args.hub_model_id or run_name
    named = f"--hub_model_id {name}" if args.hub_model_id else f"--push_to_hub as {name} (without --hub_model_id)"
    if constants.is_offline_mode():
        fail("--push_to_hub: the variable HF_HUB_OFFLINE, or TRANSFORMERS_OFFLINE, forbids to ask the hub; unset it")
    api = HfApi()
    try:
        validate_repo_id(name)
        api.whoami()
        made = api.create_repo(name, private=args.hub_private_repo or None, exist_ok=True)
        api.auth_check(made.repo_id, write=True)
        public = args.hub_private_repo and not api.repo_info(made.repo_id).private
    except HFValidationError as error:
        fail(f"{named}: takes name or owner/name ({first_line(error)})")
    except LocalTokenNotFoundError:
        fail("--push_to_hub: there is no token of the hub; hf auth login stores one, the variable HF_TOKEN holds one")
    except Exception as error:  # the hub's client raises many unrelated types
        fail(f"{named}: cannot be pushed to ({reason(error)}); hf auth whoami says whose token this is")
    if public:
        fail(f"--hub_private_repo: {address(made.repo_id)} is there already, and public")
    return made.repo_id


def reason(error: BaseException) -> str:
    """Return why the hub, or the way to it, refused: the status and the words of its answer, if there was one."""
    while getattr(error, "response", None) is None and error.__cause__ is not None:
        error = error.__cause__  # "Error while uploading ..." is raised from what happened
    if getattr(error, "response", None) is None:
        return first_line(error)
    said = getattr(error, "server_message", None) or ""
    return f"{error.response.status_code} {error.response.reason_phrase}" + (f": {said}" if said else "")


def push(folder: str, repository: str, args, tokenizer, tracked: str | None) -> str:
    """Push a run's final model with its card, and return the address of both; for rank 0 alone.

    End the run with exit code 2 if that fails: the model stays, and the line says how to push it again.

    Args:
        tracked: address of the run in Weights & Biases, if it has one.
    """
    final = os.path.join(folder, "final")
    with writing(final):
        for name in ("args.json", "metrics.jsonl"):  # both name the rewards, which may be addresses
            with open(os.path.join(folder, name)) as file:
                replace_file(os.path.join(final, name), without_passwords(file.read()))
        if os.path.exists(os.path.join(folder, "curves.png")):
            shutil.copy(os.path.join(folder, "curves.png"), final)
        chat = tokenizer.chat_template is not None and args.chat_template != "none"
        model_card(final, repository, chat, tracked).save(os.path.join(final, "README.md"))
    print(f"pushes {final} to {address(repository)}", flush=True)
    try:
        # Weights of a model that was there before go: those in other files would be loaded in place of the new ones.
        HfApi().upload_folder(
            repo_id=repository, folder_path=final, commit_message=f"Model of {os.path.basename(folder)}",
            delete_patterns=WEIGHTS,
        )  # fmt: skip
    except Exception as error:  # the hub's client raises many unrelated types
        again = f"hf upload {repository} {shlex.quote(final)} --delete {shlex.quote(WEIGHTS)}"
        fail(f"--push_to_hub: the model is saved, but not pushed ({reason(error)}); push it by {again}", local=True)
    return address(repository)


def without_passwords(text: str) -> str:
    """Return a text without the user:password@ that addresses of servers may have."""
    return re.sub(r"(?<=://)[^/?#\s\"]+@", "", text)
