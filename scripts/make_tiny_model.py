"""Make assets/tiny: the small language model and its tokenizer that the demo and the tests train.

    python scripts/make_tiny_model.py

The task is 3-digit addition, worked column by column (units, tens, hundreds, each with its carry):

    prompt "737+361="   response "7+1+0=8 3+6+0=9 7+3+0=10 #### 1098" and the end-of-sequence token

The model is a Qwen2 with 2 layers of width 64, pretrained from scratch by next-token prediction on the demonstrations
of a careless teacher, who writes a wrong digit in a quarter of the columns. It learns both the method and the
carelessness: greedy decoding is nearly always right, a sample at temperature 1 less than half of the time. That is a
base for reinforcement learning: right answers are frequent enough to be reinforced, and there is much to gain.
No pretraining problem is among the held-out ones ("test") on which the accuracy at the end is measured.

It takes about 3 minutes on one core. Checked: two runs of the command on one machine (torch 2.13 on the CPU,
transformers 5.19, the default of one thread) wrote the same bytes in all five files. Other machines were not tried.
"""

import dataclasses
import os
import random
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers.pre_tokenizers import ByteLevel
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer, set_seed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from plumbing import command_line
from plumbing.data.rows import arithmetic_rows, worked_addition
from plumbing.flags import PositiveFloat, PositiveInt, Share, in_range
from utils import fail

IGNORE = -100  # label of the positions that carry no loss
MAX_LENGTH = 512  # of a prompt and its response together


@dataclasses.dataclass
class PretrainingArgs:
    output_dir: Path
    """folder to write; files of an earlier run in it are replaced"""
    seed: in_range(int, lambda seed: 0 <= seed < 2**32, "from 0 to 2**32 - 1") = 1
    """seed of the weights, the teacher's mistakes and the samples of the final measurement"""
    num_threads: PositiveInt = 1
    """CPU threads; another number adds floats in another order, so it may give other weights"""

    steps: PositiveInt = 1500
    """optimizer updates"""
    batch_size: PositiveInt = 128
    """demonstrations an update; each is used once"""
    learning_rate: PositiveFloat = 3e-3
    """peak learning rate, after a tenth of the steps as warm-up; then it falls linearly to zero"""

    hidden_size: PositiveInt = 64
    """width of the model"""
    num_layers: PositiveInt = 2
    """number of layers"""
    num_heads: PositiveInt = 2
    """attention heads; hidden_size / num_heads should be 32 or 64, the head sizes vLLM's CPU attention has"""


@dataclasses.dataclass
class Args(PretrainingArgs):
    output_dir: Path = Path("assets/tiny")
    """folder to write; files of an earlier run in it are replaced"""
    noise: Share = 0.24
    """probability that a column of a demonstration has a wrong digit; sampled accuracy ends near (1 - noise)^3"""
    eval_samples: PositiveInt = 2000
    """held-out problems for the accuracy printed at the end"""


def check(args: PretrainingArgs) -> None:
    """End the program for flags that do not fit together, or a folder that cannot be written to."""
    if args.hidden_size % (2 * args.num_heads):
        fail(f"--hidden_size must be a multiple of twice --num_heads, not {args.hidden_size} with {args.num_heads}")
    try:
        args.output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--output_dir {args.output_dir}: {error.strerror}")
    if not os.access(args.output_dir, os.W_OK):
        fail(f"--output_dir {args.output_dir}: not writable")


def make_tokenizer() -> Qwen2Tokenizer:
    """Return a tokenizer of one token a byte: no text is unknown, and decoding gives back what was encoded.

    AutoTokenizer opens every folder with a Qwen2 model as Qwen2Tokenizer, whatever tokenizer was saved there (its list
    MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS). So this is one, with the 256 bytes as its vocabulary and no merges.
    """
    tokens = ["<pad>", "<eos>", "<unk>"] + sorted(ByteLevel.alphabet())
    return Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[],
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_LENGTH,
    )


def make_batch(demonstrations: list[list[str]], tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and labels, both (N, L), padded on the right; labels of what the teacher wrote, <eos> included.

    Args:
        demonstrations: texts in turns: what is given, what the teacher wrote, what is given after that, and so on.
    """
    rows, labels = [], []
    for texts in demonstrations:
        row, own = [], []
        for given, written in zip(texts[::2], texts[1::2]):
            tokens = tokenizer.encode(given)
            own += [IGNORE] * len(tokens)
            row += tokens
            tokens = tokenizer.encode(written) + [tokenizer.eos_token_id]
            own += tokens
            row += tokens
        rows.append(torch.tensor(row))
        labels.append(torch.tensor(own))
    input_ids = pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    return input_ids, pad_sequence(labels, batch_first=True, padding_value=IGNORE)


def pretrain(demonstrations: list[list[str]], args: PretrainingArgs) -> tuple[Qwen2ForCausalLM, Qwen2Tokenizer]:
    """Save a model that was trained from scratch on demonstrations, each used once, and its tokenizer; return both.

    Args:
        demonstrations: as in `make_batch`, --steps times --batch_size of them.
    """
    torch.set_num_threads(args.num_threads)
    torch.use_deterministic_algorithms(True)
    set_seed(args.seed)

    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        intermediate_size=4 * args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_heads,
        num_key_value_heads=args.num_heads,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95))
    warmup = max(1, args.steps // 10)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (args.steps - step) / max(1, args.steps - warmup))
    )

    progress = tqdm(range(0, len(demonstrations), args.batch_size), desc="pretraining")
    for start in progress:
        input_ids, labels = make_batch(demonstrations[start : start + args.batch_size], tokenizer)
        # no attention mask: the padding is on the right, where causal attention does not look
        logits = model(input_ids).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        progress.set_postfix(loss=f"{loss.item():.3f}")

    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    print(f"wrote {args.output_dir}: {model.num_parameters():,} parameters")
    return model.eval(), tokenizer


@torch.no_grad()
def accuracy(model, tokenizer, rows: list[dict], do_sample: bool) -> float:
    """Return the fraction of problems whose response ends, within 48 tokens, with #### and the right answer."""
    queries = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    # top_k=0: transformers would otherwise sample from the 50 likeliest tokens only
    decoding = dict(do_sample=True, temperature=1.0, top_k=0) if do_sample else dict(do_sample=False)
    outputs = model.generate(**queries, **decoding, max_new_tokens=48)
    texts = tokenizer.batch_decode(outputs[:, queries["input_ids"].shape[1] :])
    return sum(t.replace("<pad>", "").endswith(f"#### {r['answer']}<eos>") for t, r in zip(texts, rows)) / len(rows)


def main(args: Args) -> None:
    check(args)
    generator = random.Random(args.seed)
    prompts = [row["prompt"] for row in arithmetic_rows("train", args.steps * args.batch_size)]
    demonstrations = [[prompt, worked_addition(prompt, args.noise, generator)] for prompt in prompts]
    model, tokenizer = pretrain(demonstrations, args)
    test_rows = arithmetic_rows("test", args.eval_samples)
    print(f"accuracy on {len(test_rows)} held-out problems:")
    print(f"  greedy                    {accuracy(model, tokenizer, test_rows, do_sample=False):.3f}")
    print(f"  sampled at temperature 1  {accuracy(model, tokenizer, test_rows, do_sample=True):.3f}")


if __name__ == "__main__":
    main(command_line.parse_ungrouped(Args))
