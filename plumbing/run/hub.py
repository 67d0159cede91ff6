"""A run's final model on the Hugging Face hub, with a model card: --push_to_hub."""

import os
import shlex

from huggingface_hub import HfApi, ModelCard, ModelCardData, constants

from plumbing.run.log import CURVES, read_args, read_log, without_secrets
from utils import exit_on_error

CARD = """---
{{ card_data }}
---

# {{ repository.split("/")[1] }}

`{{ facts.args.model }}` after {{ last.step }} steps on `{{ facts.args.dataset }}`.
{%- if tracked %} [The run]({{ tracked }}).{% endif %}

| after the last step | |
|---|---|
{%- for name, value in numbers.items() %}
| {{ name }} | {{ "%.4g" % value }} |
{%- endfor %}

The flags of `{{ facts.script }}` that are not at their defaults, as a file for its `--config`:

```json
{{ changed | tojson(indent=2) }}
```
"""
# What says nothing to others.
LOCAL_FLAGS = ("run_name", "output_dir", "resume", "push_to_hub")


def open_repository(name: str) -> str:
    """Make the repository, unless it exists, and return its id, OWNER/NAME. For rank 0 alone."""
    with exit_on_error(f"--push_to_hub {name}"):
        return HfApi().create_repo(name, exist_ok=True).repo_id


def push(folder: str, repository: str, tracked: str | None) -> str:
    """Push a run's final model with its card, and return the address of both. For rank 0 alone."""
    facts = without_secrets(read_args(folder))
    *_, last = read_log(folder)
    final = f"{folder}/final"
    model = facts["args"]["model"]
    changed = {
        name: value
        for name, value in facts["args"].items()
        if value != facts["defaults"][name] and name not in LOCAL_FLAGS
    }
    card = ModelCard.from_template(
        ModelCardData(base_model=None if os.path.exists(model) else model),
        template_str=CARD,
        repository=repository,
        facts=facts,
        last=last,
        numbers={title: last[key] for key, title in CURVES.items() if last.get(key) is not None},
        tracked=tracked,
        changed=changed,
    )
    card.save(f"{final}/README.md")
    again = f"hf upload {repository} {shlex.quote(final)} . --delete '*.safetensors*'"
    with exit_on_error(
        f"--push_to_hub {repository}: {final} is saved, but not pushed ({again} pushes it)"
    ):
        # Weights that the repository had before would be loaded in place of the new ones if their
        # files differ in name.
        HfApi().upload_folder(
            repo_id=repository, folder_path=final, delete_patterns="*.safetensors*"
        )
    return f"{constants.ENDPOINT}/{repository}"
