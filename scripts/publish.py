"""Publish a run's final model on the Hugging Face hub, with a model card: python scripts/publish.py
runs/NAME my-lab/my-model
"""

import os
from pathlib import Path

import repository  # noqa: F401
import tyro
from huggingface_hub import ModelCard, ModelCardData, create_repo, upload_folder

from plumbing.run.command import report_errors
from plumbing.run.log import CURVES, read_args, read_log, without_secrets
from utils import UserError, as_user_error

CARD = """---
{{ card_data }}
---

# {{ name.split("/")[-1] }}

`{{ args.model }}` after {{ last.step }} steps on `{{ args.dataset }}`.
{%- if tracked %} [The run]({{ tracked }}).{% endif %}

| after the last step | |
|---|---|
{%- for key, title in titles.items() if last[key] is number %}
| {{ title }} | {{ "%.4g" % last[key] }} |
{%- endfor %}

The flags of `{{ script }}` that are not at their defaults, as a file for its `--config`:

```json
{{ changed | tojson(indent=2) }}
```
"""
LOCAL_FLAGS = ("run_name", "output_dir", "resume")  # which say nothing to others


def main(run: tyro.conf.Positional[str], model: tyro.conf.Positional[str]):
    """Publish a run's final model on the Hugging Face hub, with a model card.

    Args:
        run: Run folder, with a final/.
        model: NAME or OWNER/NAME on the hub, made unless it exists; requires a login (hf auth
            login, or HF_TOKEN).
    """
    final = f"{run}/final"
    if not os.path.isdir(final):
        raise UserError(f"RUN {run}: has no final/, which a run leaves at its end")
    with as_user_error(f"RUN {run}"):
        card(run, model).save(f"{final}/README.md")
    with as_user_error(f"MODEL {model}"):
        address = create_repo(model, exist_ok=True)
        # Weights that the repository had before would be loaded in place of the new ones if their
        # files differ in name.
        upload_folder(repo_id=address.repo_id, folder_path=final, delete_patterns="*.safetensors*")
    print(address)


def card(run: str, name: str) -> ModelCard:
    """Return the card of a run's final model, by its name on the hub."""
    facts = without_secrets(read_args(run))
    rows = list(read_log(run))
    if not (facts and rows):
        raise ValueError("has no args.json, or no metrics.jsonl with a whole line")
    flags = facts["args"]
    model = flags["model"]
    tracked = Path(run, "tracked.txt")  # the run's address, with --track wandb
    return ModelCard.from_template(
        ModelCardData(base_model=None if os.path.exists(model) else model),
        template_str=CARD,
        name=name,
        **facts,
        tracked=tracked.exists() and tracked.read_text(),
        last=rows[-1],
        titles=CURVES,
        changed={
            key: x
            for key, x in flags.items()
            if x != facts["defaults"][key] and key not in LOCAL_FLAGS
        },
    )


if __name__ == "__main__":
    with report_errors():
        tyro.cli(main)
