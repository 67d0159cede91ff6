"""A run's final model on the Hugging Face hub, with a model card: --push_to_hub."""

import os
import re
import shlex
import shutil

from huggingface_hub import HfApi, ModelCard, ModelCardData, constants

from plumbing.run.curves import CURVES
from plumbing.run.files import read_args, read_log
from utils import loading

CARD = """---
{{ card_data }}
---

# {{ title }}

`{{ base }}`, trained by `{{ script }}` on `{{ dataset }}` for {{ step }} steps.
{%- if tracked %} [The run in Weights & Biases]({{ tracked }}).{% endif %}

![curves](curves.png)

| after the last step | |
|---|---|
{%- for name, value in numbers.items() %}
| {{ name }} | {{ "%.4g" % value }} |
{%- endfor %}

The command, without the flags at their defaults:

```bash
{{ command }}
```

{{ versions }}; commit {{ commit }}.
"""


def open_repository(name: str) -> str:
    """Make the repository, unless it exists, and return its id, OWNER/NAME. For rank 0 alone."""
    with loading(f"--push_to_hub {name}"):
        return HfApi().create_repo(name, exist_ok=True).repo_id


def push(folder: str, repository: str, tracked: str | None) -> str:
    """Push a run's final model with its card, and return the address of both. For rank 0 alone."""
    final = os.path.join(folder, "final")
    if os.path.exists(os.path.join(folder, "curves.png")):
        shutil.copy(os.path.join(folder, "curves.png"), final)
    model_card(folder, repository, tracked).save(os.path.join(final, "README.md"))
    with loading(f"--push_to_hub {repository}: {final} is saved, but not pushed; --resume pushes it"):
        # Weights that the repository had before would be loaded in place of the new ones if their files differ in name.
        HfApi().upload_folder(repo_id=repository, folder_path=final, delete_patterns="*.safetensors*")
    return f"{constants.ENDPOINT}/{repository}"


def model_card(folder: str, repository: str, tracked: str | None) -> ModelCard:
    """Return the card of a run's model; `tracked` is the address of the run in Weights & Biases, if it has one."""
    facts, last = read_args(folder), read_log(folder)[-1]
    args = facts["args"]
    on_hub = {name: without_secrets(args[name]) for name in ("model", "dataset") if not os.path.exists(args[name])}
    dataset = re.split("[:@]", on_hub.get("dataset", ""))[0]
    data = ModelCardData(
        base_model=on_hub.get("model"),
        datasets=[dataset] if dataset.count("/") == 1 else None,
        library_name="transformers",
        tags=[facts["script"].removesuffix(".py"), "reinforcement-learning"],
    )
    return ModelCard.from_template(
        data, template_str=CARD, base=on_hub.get("model") or os.path.basename(args["model"]),
        dataset=on_hub.get("dataset") or os.path.basename(args["dataset"]),
        title=repository.rpartition("/")[2], script=facts["script"], step=last["step"], tracked=tracked,
        numbers={title: last[key] for key, title in CURVES.items() if last.get(key) is not None},
        command=command(facts), versions=", ".join(map(" ".join, facts["versions"].items())),
        commit=facts["git_commit"],
    )  # fmt: skip


def command(facts: dict) -> str:
    """Return the command line of a run without the flags at their defaults, and without secrets in addresses."""
    ranks, words = facts["ranks"], []
    for name, value in facts["args"].items():
        if value != facts["defaults"][name] and name not in ("run_name", "output_dir", "resume", "push_to_hub"):
            values = [] if isinstance(value, bool) else map(str, value if isinstance(value, list) else [value])
            words += [f"--no-{name}" if value is False else f"--{name}", *map(without_secrets, values)]
    return shlex.join(
        [*(["python"] if ranks == 1 else ["torchrun", "--nproc_per_node", str(ranks)]), facts["script"], *words]
    )


def without_secrets(word: str) -> str:
    """Return a word of a command line, of an address without user, password and query, which may hold a key."""
    return re.sub(r"(?<=://)(?:[^/?#]*@)?([^?#]*)(?:[?#].*)?", r"\1", word)
