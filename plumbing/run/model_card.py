"""The model card of a run's final model: what was trained by what command, how it went, and how to load it.

Imports plumbing.run.files, plumbing.data.rows (lists of data sets) and plumbing.run.curves (which metrics and flags are shown).
"""

import json
import os
import shlex

from huggingface_hub import ModelCard, ModelCardData, constants

from plumbing.data.rows import is_list_of_data_sets, read_file
from plumbing.run.curves import CURVES, OF_A_START
from plumbing.run.files import read_jsonl

SCRIPTS = ("grpo.py", "rloo.py", "ppo.py", "reward_model.py")  # what any other trains by is only in its own source
ALGORITHMS = {  # by --loss, --advantage or the script: name, arXiv number of the paper
    "grpo": ("GRPO", "2402.03300"),
    "dr_grpo": ("Dr. GRPO", "2503.20783"),
    "dapo": ("GRPO with DAPO's loss", "2503.14476"),
    "bnpo": ("GRPO with the token mean of an optimizer batch (BNPO)", "2402.03300"),
    "gspo": ("GSPO", "2507.18071"),
    "cispo": ("CISPO", "2506.13585"),
    "sapo": ("SAPO", "2511.20347"),
    "rloo": ("RLOO", "2402.14740"),
    "reinforce++": ("REINFORCE++", "2501.03262"),
    "reinforce++-baseline": ("REINFORCE++-baseline", "2501.03262"),
    "remax": ("ReMax", "2310.10505"),
    "opo": ("OPO", "2505.23585"),
    "ppo": ("PPO", "1707.06347"),
    "reward_model": ("the Bradley-Terry loss of preference pairs", "2203.02155"),
}

QUESTION, RESPONSE = "What is 17 * 24?", "17 * 24 = 408"  # of the examples

CARD = """---
{metadata}
---

# {title}

{what}

![curves](curves.png)

## How to load it

{examples}

## How it went

{evaluations}
{last_step}
All metrics of all steps are in `metrics.jsonl`.

## How it was trained

```bash
{command}
```

Other flags had their defaults; all of them are in `args.json`.{changes}
With {ranks}, {versions}, commit {commit}.
"""


def model_card(final: str, repository: str, chat: bool, tracked: str | None) -> ModelCard:
    """Return the card of a model.

    Args:
        final: the model's folder, with the args.json and the metrics.jsonl of its run.
        chat: whether the chat template of the tokenizer makes the prompts.
        tracked: address of the run in Weights & Biases, if it has one.
    """
    with open(os.path.join(final, "args.json")) as file:
        facts = json.load(file)
    args, script = facts["args"], facts["script"]
    rows = read_jsonl(os.path.join(final, "metrics.jsonl"))
    method = args.get("loss") or args.get("advantage") or script.removesuffix(".py")
    method = method if script in SCRIPTS else os.path.basename(script)
    data_sets, generates = names_of_data_sets(args["dataset"]), "rollout_batch_size" in args
    metadata = ModelCardData(
        base_model=None if os.path.exists(args["model"]) else args["model"],
        datasets=[name.partition(":")[0] for name in data_sets if is_hub_data_set(name)] or None,
        library_name="transformers",
        pipeline_tag="text-generation" if generates else "text-classification",
        tags=[method.removesuffix(".py"), "reinforcement-learning" if generates else "reward-model"],
    )
    examples = (generation_examples if generates else scoring_examples)(repository, args, chat)
    if generates and args["lora_rank"]:  # without the head of a reward model, which trains, too, it is of no use
        examples += ADAPTER.format(repository=repository, model=args["model"])
    return ModelCard(
        CARD.format(
            metadata=metadata.to_yaml(),
            title=repository.partition("/")[2],
            what=summary(args, method, data_sets, rows[-1], tracked),
            examples=examples.rstrip(),
            evaluations=evaluation_table(rows),
            last_step=last_step_table(rows[-1]),
            command=command(script, facts["ranks"], args, facts["defaults"]),
            changes=" Some changed on the way, see `history` there." if facts["history"] else "",
            ranks=f"{facts['ranks']} ranks" if facts["ranks"] > 1 else "1 rank",
            versions=", ".join(f"{package} {version}" for package, version in facts["versions"].items()),
            commit=(facts["git_commit"] or "unknown").replace("+", " and changes that are not in it"),
        )
    )


def address(repository: str) -> str:
    return f"{constants.ENDPOINT}/{repository}"


def names_of_data_sets(name: str) -> list[str]:
    """Return the names in a list of data sets, or the name of a data set that is no list."""
    rows = read_file("--dataset", name) if name.endswith(".json") and os.path.isfile(name) else []
    if not is_list_of_data_sets(name, rows):
        return [name]
    names = [(row["filepath"], os.path.join(os.path.dirname(name), row["filepath"])) for row in rows]
    return [in_folder if os.path.exists(in_folder) else named for named, in_folder in names]


def is_hub_data_set(name: str) -> bool:
    """Return whether a data set that was read is owner/name or owner/name:config on the hub."""
    return name.count("/") == 1 and not os.path.exists(name)


def summary(args: dict, method: str, data_sets: list[str], last: dict, tracked: str | None) -> str:
    """Return what was trained by what, on what and for how long; `last` is the last row of metrics.jsonl."""
    model, on = args["model"], []
    base = f"`{os.path.basename(os.path.abspath(model))}`" if os.path.exists(model) else f"[{model}]({address(model)})"
    for name in data_sets:
        page = address(f"datasets/{name.partition(':')[0]}")
        on.append(f"[{name}]({page})" if is_hub_data_set(name) else f"`{os.path.basename(name)}`")
    algorithm, paper = ALGORITHMS.get(method, (f"`{method}`", ""))
    source = f" ([arXiv:{paper}](https://arxiv.org/abs/{paper}))" if paper else ""
    responses = f" and {last['episode']:,} responses" if "episode" in last else ""
    sentences = [
        f"{base}, trained by {algorithm}{source} on {', '.join(on)}.",
        f"Rewards: {', '.join(f'`{name}`' for name in args['reward'])}." if "reward" in args else "",
        f"It took {last['step']:,} steps{responses}, {last['time/from_scratch'] / 60:,.1f} minutes.",
        f"[The run in Weights & Biases]({tracked})." if tracked else "",
    ]
    return "\n".join(filter(None, sentences))


def evaluation_table(rows: list[dict]) -> str:
    """Return the first, the best and the last evaluation as a table; "" if there is none."""
    evaluated = [row for row in rows if any(key.startswith("eval/") for key in row)]
    if not evaluated:
        return ""
    columns = {"first": evaluated[0]}
    for key in ("eval/accuracy", "eval/pair_accuracy"):  # of which a run has one at most
        measured = [row for row in evaluated if row.get(key) is not None]
        if measured:
            columns["best"] = max(measured, key=lambda row: row[key])
    columns["last"] = evaluated[-1]
    head = " | ".join(f"step {row['step']} ({name})" for name, row in columns.items())
    names = dict.fromkeys(key for row in columns.values() for key in row if key.startswith("eval/"))
    return table(head, {f"`{name}`": [row.get(name) for row in columns.values()] for name in names})


def last_step_table(row: dict) -> str:
    """Return as a table what curves.png shows of the last step, evaluations aside."""
    shown = {title: [row.get(key)] for key, title in CURVES.items() if not key.startswith("eval/")}
    return table(f"step {row['step']}", shown)


def table(head: str, rows: dict[str, list]) -> str:
    """Return a Markdown table of numbers, without the rows that have none; `head` is that of its columns."""
    lines = [f"| | {head} |", "|---" * (head.count("|") + 2) + "|"]
    for name, values in rows.items():
        if any(x is not None for x in values):
            lines.append(f"| {name} | {' | '.join('' if x is None else f'{x:.4g}' for x in values)} |")
    return "\n".join(lines) + "\n"


def command(script: str, ranks: int, args: dict, defaults: dict) -> str:
    """Return the command line of a run: the flags that are not at their defaults."""
    words = ["python", script] if ranks == 1 else ["torchrun", "--nproc_per_node", str(ranks), script]
    for name, value in args.items():
        if name in OF_A_START or value == defaults[name]:
            continue
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{name}")
        else:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)


# ---- the examples ----------------------------------------------------------------------------------------------------

GENERATION = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{repository}")
model = AutoModelForCausalLM.from_pretrained("{repository}")
{prompt}
inputs = {encoded}
output = model.generate(**inputs, do_sample=True, temperature={temperature}, max_new_tokens={length}{stop})
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```

By vLLM (`vllm serve {repository}` serves it):

```python
from vllm import LLM, SamplingParams

{prompt}
sampling = SamplingParams(temperature={temperature}, max_tokens={length}{vllm_stop})
print(LLM("{repository}").{vllm_call}[0].outputs[0].text)
```
"""

SCORING = """```python
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{repository}")
model = AutoModelForSequenceClassification.from_pretrained("{repository}")
{prompt}
ids = {encoded}["input_ids"]
ids += tokenizer.encode("{response}", add_special_tokens=False) + {stop}
print(model(torch.tensor([ids])).logits.item())
```

By vLLM, from the same `ids`:

```python
from vllm import LLM, PoolingParams, TokensPrompt

llm = LLM("{repository}", runner="pooling")
output = llm.classify(TokensPrompt(prompt_token_ids=ids), pooling_params=PoolingParams(use_activation=False))
print(output[0].outputs.probs[0])
```
"""

ADAPTER = """
The LoRA adapter is merged into these weights. By itself it is in `adapter/`:

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{model}")
model = PeftModel.from_pretrained(model, "{repository}", subfolder="adapter")
```
"""


def generation_examples(repository: str, args: dict, chat: bool) -> str:
    """Return how to sample from a model by transformers and by vLLM as it was trained."""
    prompt, encode = prompt_example(args, chat)
    stop = "" if args["stop_token"] == "eos" else f"[{json.dumps(args['stop_token'])}]"
    return GENERATION.format(
        repository=repository,
        prompt=prompt,
        encoded=encode.format(', return_tensors="pt"'),
        temperature=args["temperature"],
        length=args["max_response_length"],
        stop=stop and f", stop_strings={stop}, tokenizer=tokenizer",
        vllm_stop=stop and f", stop={stop}",
        vllm_call="chat(messages, sampling)" if chat else "generate(prompt, sampling)",
    )


def scoring_examples(repository: str, args: dict, chat: bool) -> str:
    """Return how to score a response by transformers and by vLLM: by the token ids that were trained on."""
    prompt, encode = prompt_example(args, chat)
    named = f"tokenizer.encode({json.dumps(args['stop_token'])}, add_special_tokens=False)"
    stop = "[tokenizer.eos_token_id]" if args["stop_token"] == "eos" else named
    return SCORING.format(repository=repository, prompt=prompt, encoded=encode.format(""), response=RESPONSE, stop=stop)


def prompt_example(args: dict, chat: bool) -> tuple[str, str]:
    """Return the lines that make a prompt, and the call that encodes it, with {} for a further option."""
    system = "" if args["chat_template"] == "none" else args["system_prompt"]
    if chat:
        turns = [("system", system), ("user", QUESTION)] if system else [("user", QUESTION)]
        lines = [f"    {json.dumps({'role': role, 'content': text}, ensure_ascii=False)}," for role, text in turns]
        encode = "tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True{})"
        return "\n".join(["messages = [", *lines, "]"]), encode
    prompt = f"{system}\n{QUESTION}" if system else QUESTION
    return f"prompt = {json.dumps(prompt, ensure_ascii=False)}", "tokenizer(prompt{})"
