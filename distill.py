"""Distillation from a teacher, on and off policy, and supervised fine-tuning, in one file.

A student p learns from a teacher q: another model, or the model itself behind another prompt
(arXiv:2601.19897). For each prompt take a response of the student (with probability lambda), or
that of the data set, and minimise the mean over response tokens of

    reverse_kl   KL(p || q) = sum over the vocabulary of p * (log p - log q)
    forward_kl   KL(q || p)
    jsd          beta * KL(q || m) + (1 - beta) * KL(p || m)          m = beta * q + (1 - beta) * p

Source: generalised knowledge distillation (GKD), arXiv:2306.13649, eq. 1 and algorithm 1. Without a
teacher, and with lambda = 0, the loss is -log p of the data set's responses: supervised
fine-tuning.

Deliberate choices:
1. No gradient flows through the sampling: a token's loss is the divergence of the two next-token
   distributions.
2. The sum over the vocabulary is exact. Logits exist for one chunk of tokens at a time: the
   gradient of a chunk is computed before the next chunk. `--estimator sampled` is a policy gradient of the
   reverse KL instead, by log-probabilities of sampled tokens. A teacher on a server tells its K
   most likely tokens; all others count as one (extras/vllm/teacher.py: `spread_rest`).
3. `--temperature` is that of sampling and, with a teacher, of the loss: it divides the logits;
   `--teacher_temperature` may give the teacher another.
4. The gradient is that of the global batch: sums are divided by counts over all ranks and
   micro-batches.
5. A conversation that ends with the assistant is one row, and all its assistant turns train. But it
   is cut into a row per assistant turn if the student may answer (--on_policy_share above 0), or if
   the chat template changes earlier turns.
6. Student and teacher score the same response tokens, each behind its own prompt.
7. Nothing trains on --reward: it scores held-out responses.
8. The student samples by `generate`, a copy of the decode loop of grpo.py.

    bash scripts/demo.sh distill                                                      # tiny models on a CPU, minutes
    python distill.py --model Qwen/Qwen3-0.6B --teacher Qwen/Qwen3-8B                 # one GPU of 40 GB, GSM8K
    torchrun --nproc_per_node 8 distill.py --dataset rows.jsonl --on_policy_share 0   # supervised fine-tuning
"""

import functools
import itertools
import math
import os
import re
from typing import Any, Callable, Iterable, Iterator, Literal, Sequence

import numpy as np
import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.special import entr
from transformers import PreTrainedModel

import utils
from plumbing import cli
from plumbing.cli import (
    Fraction,
    NonNegativeInt,
    PathOrName,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
)
from plumbing.data.formats import Learn
from plumbing.data.mixture import count_steps, take_prompts
from plumbing.data.rows import Row
from plumbing.models import loading
from plumbing.models.forward import (
    expand_cache,
    head_logits,
    invert_distribution,
    last_hidden_states,
    logits_processors,
)
from plumbing.models.sharding import model_device, set_gradient_sync, sync_reference
from plumbing.rollout.batch import Batch, Sample, forbid_gradient, forward_tokens
from plumbing.rollout.sampler import Experience, Sampler
from plumbing.run.command import parse, report_errors
from plumbing.run.metrics import add_rollout, batch_metrics, mismatch_metrics
from plumbing.run.setup import set_up

CHUNK_TOKENS = 256  # response tokens whose logits are held at once
ROLLOUT_OUTPUTS = ("rollout_logprobs",)  # what `generate` stores per token; vLLM returns no others
MAX_LOG_RATIO = 20  # in nats: exp of more would swamp a batch
SHRINK_AT = 0.25  # share of finished rows at which the decode loop drops them


@dataclass
class Args(
    cli.RunArgs,
    cli.ModelArgs,
    cli.DataArgs,
    cli.ScoringArgs,
    cli.RolloutArgs,
    cli.ConversationArgs,
    cli.OptimizerArgs,
):
    passes: PositiveFloat = 4.0
    """Passes over the rows of --dataset; the run ends after them (rounded down to whole steps)."""
    rollout_batch_size: PositiveInt = 128
    """Prompts per step, over all ranks."""
    mini_batch_size: NonNegativeInt = 0
    """Maximum number of responses in an optimizer update, over all ranks; those of a step are cut
    into equal parts. 0: the whole step."""
    num_epochs: PositiveInt = 1
    """Passes over one rollout."""
    max_response_length: PositiveInt = 1024
    """Maximum number of tokens of a response."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; it divides the logits in every log-probability."""
    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate of AdamW."""
    system_prompt: str = ""
    """System turn put before each prompt that has none; the saved chat template does the same; ""
    adds none."""

    teacher: PathOrName = ""
    """Model to learn from, with the vocabulary of --model: a causal language model's folder or hub
    name (that of --model for its weights of the start), self for the model that trains, or the
    http:// address of a vLLM server; "" for none, which is supervised fine-tuning on the data set's
    responses."""
    teacher_prompt: str = ""
    """Prompt that the teacher reads in place of the row's: a column, or a text with columns in
    braces, such as "{prompt}\\n\\nA worked solution:\\n{answer}"."""
    teacher_system_prompt: str = ""
    """System turn of the teacher's prompt, in place of any other one."""
    ref_refresh_every: NonNegativeInt = 0
    """Steps between two copies of the policy's weights to the teacher (TR-DPO, arXiv:2404.09656);
    0 for never."""
    teacher_top_k: PositiveInt = 20
    """Most likely tokens of a teacher on a server that are compared one by one; all others count as
    one."""
    on_policy_share: Fraction = 1.0
    """Probability lambda with which a prompt is answered by the student; else by the response of
    its row."""
    response_column: str = ""
    """Column of the text that supervised rows teach; default: the last turn of the assistant, or
    else the first of response, completion, solution, tgt, answer, output that at least one
    row fills."""
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """Divergence from the teacher that is minimised."""
    jsd_beta: PositiveFraction = 0.5
    """Weight beta of the teacher in the mixture of jsd."""
    estimator: Literal["exact", "sampled"] = "exact"
    """Sum over the vocabulary, or the policy gradient of the reverse KL from the sampled tokens
    alone."""
    teacher_temperature: PositiveFloat | None = None
    """Divides the logits of the teacher; default: --temperature."""
    reward_weights = ()  # not a flag; held-out scores read it, and () gives each source the weight 1

    @property
    def is_served(self) -> bool:
        """Whether the teacher is on a server."""
        return self.teacher.startswith(("http://", "https://"))

    @property
    def has_teacher_prompt(self) -> bool:
        """Whether the teacher reads another prompt than the student."""
        return bool(self.teacher_prompt or self.teacher_system_prompt)

    @property
    def loaded_teacher(self) -> str:
        """The teacher that this run loads; "" for none."""
        return "" if self.teacher == "self" or self.is_served else self.teacher

    def rules(self) -> Iterator[tuple[object, str]]:
        """Yield the conditions that flags must meet, each with what to say otherwise; the rules that
        scripts share are in plumbing/cli.py.
        """
        teacher_is_model = self.loaded_teacher and (
            os.path.realpath(self.teacher) == os.path.realpath(self.model)
        )
        yield (
            self.teacher or not self.on_policy_share,
            "--on_policy_share above 0 requires a --teacher; 0 is supervised fine-tuning",
        )
        yield (
            self.teacher
            or (self.divergence, self.teacher_temperature, self.has_teacher_prompt)
            == ("reverse_kl", None, False),
            "--divergence, --teacher_temperature, --teacher_prompt and --teacher_system_prompt "
            "require a --teacher",
        )
        yield (
            self.jsd_beta == 0.5 or (self.divergence == "jsd" and self.jsd_beta < 1),
            "--jsd_beta requires --divergence jsd, and must be below 1",
        )
        yield (
            self.estimator == "exact"
            or (self.divergence == "reverse_kl" and self.on_policy_share == 1),
            "--estimator sampled requires --divergence reverse_kl and --on_policy_share 1",
        )
        yield (
            not self.response_column or self.on_policy_share < 1,
            "--response_column requires an --on_policy_share below 1",
        )
        yield (
            self.on_policy_share == 1 or not (self.tools or self.environment or self.agent),
            "--tools, --environment and --agent require --on_policy_share 1",
        )
        # The prompt of the teacher.
        yield (
            self.has_teacher_prompt or not (self.teacher == "self" or teacher_is_model),
            "--teacher is the model itself: it requires --teacher_prompt or --teacher_system_prompt",
        )
        yield (
            not self.has_teacher_prompt or not (self.environment or self.agent),
            "--teacher_prompt and --teacher_system_prompt exclude --environment and --agent",
        )
        yield (
            not self.teacher_system_prompt or self.chat_template != "none",
            "--teacher_system_prompt requires another --chat_template than none",
        )
        # A teacher with the weights of the start.
        yield (
            not self.ref_refresh_every or (teacher_is_model and not self.lora_rank),
            "--ref_refresh_every requires the name of --model as --teacher, and --lora_rank 0",
        )
        # A teacher on a server.
        yield (
            not self.is_served or re.fullmatch(cli.ADDRESS, self.teacher),
            "--teacher: the address of a server must be of the form http://10.0.0.2:8000",
        )
        yield (
            not self.is_served or not self.agent,
            "--agent has several prompts in a response, and a --teacher on a server reads one",
        )
        yield (
            not self.is_served or (self.teacher_temperature or self.temperature) == 1,
            "--teacher on a server has a temperature of 1: it requires --teacher_temperature 1",
        )
        yield (
            self.teacher_top_k == 20 or (self.is_served and self.estimator == "exact"),
            "--teacher_top_k requires a --teacher on a server and --estimator exact",
        )
        yield (
            self.precision != "fp16",
            "--precision fp16: the head's gradient is computed before the loss is scaled; use bf16",
        )


# --------------------------------------------------------------------------------------------------
# The equations: tensors in, tensors out. N sequences, T response positions, V vocabulary.
# --------------------------------------------------------------------------------------------------


def divergence(logprobs: Tensor, teacher_logprobs: Tensor, kind: str, beta: float) -> Tensor:
    """Return the divergence of student p and teacher q from their log-probabilities (..., V), in
    nats: (...).

    Args:
        kind: "reverse_kl": KL(p || q); "forward_kl": KL(q || p); "jsd": beta * KL(q || m) + (1 -
            beta) * KL(p || m) with m = beta * q + (1 - beta) * p (arXiv:2306.13649, eq. 1), for 0 <
            beta < 1.
    """
    # A masked token: 0 * -inf would be NaN.
    p, q = (x.clamp(min=-1e30) for x in (logprobs, teacher_logprobs))
    kl = lambda a, b: (a.exp() * (a - b)).sum(-1)
    if kind == "reverse_kl":
        return kl(p, q)
    if kind == "forward_kl":
        return kl(q, p)
    m = torch.logaddexp(q + math.log(beta), p + math.log1p(-beta))
    return beta * kl(q, m) + (1 - beta) * kl(p, m)


def sampled_reverse_kl(
    logprobs: Tensor, teacher_logprobs: Tensor, rollout_logprobs: Tensor
) -> Tensor:
    """Return a loss (N, T) whose expected gradient is that of the reverse KL, from the sampled
    tokens (N, T) alone.

    r * (log p - log q), where only the ratio r = p / p_rollout has a gradient: a policy gradient
    with the advantage -(log p - log q) of the token and importance weights.
    """
    ratio = (logprobs - rollout_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return ratio * (logprobs - teacher_logprobs).detach()


# --------------------------------------------------------------------------------------------------
# Student and teacher: statistics of the response tokens, without ever holding logits of all of them
# --------------------------------------------------------------------------------------------------


class Policy(nn.Module):
    """A causal language model, student or teacher, whose forward gives losses and statistics of
    response tokens instead of logits.

    All of it happens inside this module's forward, so that DDP or FSDP, which wrap it, see every
    use of the weights.
    """

    def __init__(self, model: PreTrainedModel, args: Args):
        super().__init__()
        self.model = model
        self.args = args
        # The loss of supervised fine-tuning has temperature 1: only evaluations use --temperature.
        self.temperature = args.temperature if args.teacher else 1.0

    @torch.no_grad()  # the head of a teacher may be the one that trains
    def teacher_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of this model as the teacher, over its temperature: (..., H) -> (..., V)."""
        return head_logits(self.model, hidden) / (self.args.teacher_temperature or self.temperature)

    def forward(
        self,
        input_ids: Tensor,
        response_mask: Tensor,
        rollout_logprobs: Tensor | None = None,
        of_teacher: Iterable[tuple] = (),
    ) -> Any:
        """Return losses and statistics of the response tokens. The backward pass of the head runs
        here, too.

        Args:
            input_ids: (N, L), query and response, padded on the right (causal attention never looks
                there).
            response_mask: (N, L) bool, set on response tokens.
            rollout_logprobs: (tokens,), which --estimator sampled reads; None for the pass of a
                teacher, which returns the last hidden states (tokens, H) only.
            of_teacher: see `teacher_chunks`.
        Returns:
            Tensors (tokens,) by name, those of `statistics`, one value per set entry of the mask,
            row by row, float32 or better. Only "losses" has a gradient, and it is right only if the
            loss gives all tokens the same weight. A loss that uses any other output raises an error.
        """
        rows, positions = response_mask.nonzero(as_tuple=True)
        # The hidden states at the positions before the response tokens predict them.
        hidden = last_hidden_states(self.model, input_ids)[rows, positions - 1]  # (tokens, H)
        if rollout_logprobs is None:
            return hidden
        labels = input_ids[response_mask]  # (tokens,)
        head_weights = [
            x for x in self.model.get_output_embeddings().parameters() if x.requires_grad
        ]
        head_gradients = [torch.zeros_like(weight) for weight in head_weights]
        hidden_gradients = []
        chunks = []
        # One empty chunk if there are no tokens.
        of_student = zip(*(x.split(CHUNK_TOKENS) for x in (hidden, labels, rollout_logprobs)))
        for (chunk, targets, sampled), given in zip(of_student, of_teacher):
            chunk = chunk.detach().requires_grad_()
            outputs = self.statistics(chunk, targets, sampled, *given)
            chunk_gradient, *gradients = torch.autograd.grad(
                outputs["losses"].sum(), [chunk, *head_weights]
            )
            hidden_gradients.append(chunk_gradient)
            for total, gradient in zip(head_gradients, gradients):
                total += gradient
            chunks.append({name: x.detach() for name, x in outputs.items()})
        outputs = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
        losses = outputs.pop("losses")
        # The loop above has run the backward pass of the head. It knows the gradient g of the summed
        # losses with respect to x, where x are the hidden states and the head's weights. `stand_in` is
        # the sum of x * g, whose gradient is g, too: that is how the backward pass of the model, in
        # DDP or FSDP, gets g. A token has the term of its hidden state and an equal part of the head's.
        stand_in = (hidden * torch.cat(hidden_gradients)).sum(-1)  # (tokens,)
        for weight, gradient in zip(head_weights, head_gradients):
            stand_in = stand_in + (weight * gradient).sum() / max(1, len(labels))
        logged = {name: forbid_gradient(name, x) for name, x in outputs.items()}
        return {"losses": losses + (stand_in - stand_in.detach()), **logged}

    def statistics(
        self,
        hidden: Tensor,
        labels: Tensor,
        rollout_logprobs: Tensor,
        teacher_logits: Tensor | None,
        teacher_tokens: Tensor | None,
    ) -> dict[str, Tensor]:
        """Return outputs (chunk,) of a chunk of tokens: "losses", and for the log "logprobs" and
        "entropies"; with a teacher also "teacher_entropies", and "same_top", 1 where both have the
        same most likely token.

        Args:
            hidden: (chunk, H). labels, rollout_logprobs: (chunk,).
            teacher_logits, teacher_tokens: see `teacher_chunks`.
        """
        student_logprobs = (head_logits(self.model, hidden) / self.temperature).log_softmax(-1)
        at_labels = lambda x: x.gather(-1, labels[:, None])[:, 0]  # (chunk, V) -> (chunk,)
        logprobs = at_labels(student_logprobs)
        outputs = {
            "logprobs": logprobs,
            "losses": -logprobs,
            "entropies": entr(student_logprobs.detach().exp()).sum(-1),
        }
        if teacher_logits is None:
            return outputs
        if teacher_tokens is not None:
            from extras.vllm.teacher import spread_rest

            teacher_logits = spread_rest(teacher_tokens, teacher_logits, student_logprobs.detach())
        # The head of a teacher may have more rows than the vocabulary has tokens.
        teacher_logprobs = teacher_logits[:, : student_logprobs.shape[-1]].log_softmax(-1)
        if self.args.estimator == "exact":
            outputs["losses"] = divergence(
                student_logprobs, teacher_logprobs, self.args.divergence, self.args.jsd_beta
            )
        else:
            outputs["losses"] = sampled_reverse_kl(
                logprobs, at_labels(teacher_logprobs), rollout_logprobs
            )
        same_top = student_logprobs.argmax(-1) == teacher_logprobs.argmax(-1)
        outputs["same_top"] = same_top.to(logprobs.dtype)
        outputs["teacher_entropies"] = entr(teacher_logprobs.exp()).sum(-1)
        return outputs


# --------------------------------------------------------------------------------------------------
# The teacher: another model, the model that trains, or a server
# --------------------------------------------------------------------------------------------------


def teacher_chunks(
    teacher: Any, inputs: tuple[Tensor, ...], micro: dict[str, Tensor]
) -> Iterable[tuple]:
    """Return what the teacher gives for the response tokens of a micro-batch, CHUNK_TOKENS of them at
    a time: the last two arguments of `Policy.statistics`.

    Args:
        teacher: of `loading.load_teacher`. inputs: what it reads, the arguments of `Policy.forward`.
        micro: (n, T) by name; of a teacher on a server its answers (n, T, K), which `collect` asked.
    Returns:
        A pair for each chunk. Of a loaded teacher: logits (chunk, V), or of more than V tokens, to
        which a model may be padded; and None. Of a teacher on a server: log-probabilities and their
        tokens, (chunk, K) each. Without a teacher: None and None.
    """
    if "teacher_logprobs" in micro:
        m = micro["response_mask"]
        answers = micro["teacher_logprobs"][m], micro["teacher_tokens"][m].long()
        return zip(*(x.split(CHUNK_TOKENS) for x in answers))
    if teacher is None:
        return itertools.repeat((None, None))
    with torch.no_grad():
        hidden = teacher(*inputs)  # (tokens, H)
    # The head of the teacher computes while the student's forward takes chunk after chunk.
    if isinstance(teacher, FSDPModule):
        teacher.unshard()
    return ((teacher.teacher_logits(chunk), None) for chunk in hidden.split(CHUNK_TOKENS))


# --------------------------------------------------------------------------------------------------
# Rollout: whose response each prompt gets
# --------------------------------------------------------------------------------------------------


@torch.no_grad()  # not inference mode: there autocast casts all weights anew at every token
def generate(
    model: PreTrainedModel,
    queries: list[list[int]],
    uniforms: Tensor,
    stop_ids: list[int],
    args: Args,
    interrupted: Callable,
    lengths: list[int],
    stop_strings: Callable | None = None,
) -> Iterator[tuple[int, Tensor, dict[str, Tensor]]]:
    """Sample one response per query: one forward pass over the different prompts, left-padded, then
    one token at a time with the KV cache.

    A token is drawn by inverting its distribution function at a uniform number given in advance. In a
    greedy response it is the most likely token.
    Whenever a quarter of the rows have ended, they are dropped: the long tail of responses runs in
    a small batch.

    Args:
        queries: token ids. uniforms: (N, T) float64 in [0, 1), T >= all lengths; -1 in the row of a
            greedy response.
        interrupted: called at every token; once it is true, there are no further responses.
        lengths: maximum number of tokens of each response (N,).
        stop_strings: transformers' StopStringCriteria, which ends a turn of a conversation as a
            stop token does.
    Yields:
        The index in `queries` of one whose response has ended; the response (t,), token ids up to
        and including the first stop token; its per-token outputs (t,) by name.
    """
    device = model_device(model)
    # The P different prompts, each with its row in the first pass; a new prompt gets the next row.
    prompts: dict[tuple, int] = {}
    prompt_of = [prompts.setdefault(tuple(query), len(prompts)) for query in queries]  # (N,)
    width = max(map(len, prompts))
    max_length = max(lengths)
    max_lengths = torch.tensor(lengths, device=device)  # (N,)
    # Pad with the first token of the prompt: a repetition penalty also reads padding.
    input_ids = torch.tensor(
        [prompt[:1] * (width - len(prompt)) + prompt for prompt in prompts], device=device
    )  # (P, width); later (n, 1)
    attention = torch.tensor(
        [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device
    )  # (P, width); later (n, tokens so far)
    positions = (attention.cumsum(1) - 1).clamp(0)
    sequences = nn.functional.pad(input_ids[prompt_of], (0, max_length))  # (N, width + T)
    outputs = {
        name: torch.zeros(len(queries), max_length, device=device) for name in ROLLOUT_OUTPUTS
    }
    processors = logits_processors(args, width, stop_ids, device)
    stops = torch.tensor(stop_ids, device=device)
    uniforms = uniforms.to(device)
    running = torch.arange(len(queries), device=device)  # (n,), the rows that the batch still holds
    finished = torch.zeros_like(running, dtype=torch.bool)  # (n,)
    finished_count = 0  # rows that have finished and are still in the batch
    cache = None
    for t in range(max_length):
        predicted = model(
            input_ids=input_ids,
            attention_mask=attention,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = predicted.past_key_values
        logits = predicted.logits[:, -1].float()  # (n, V)
        if t == 0:  # from the prompts' rows to those of the responses
            logits, attention, positions = (x[prompt_of] for x in (logits, attention, positions))
            expand_cache(cache, torch.tensor(prompt_of, device=device))
        for process in processors:
            logits = process(sequences[running, : width + t], logits)
        token_logprobs = logits.log_softmax(-1)
        # (n, 1). NaN logits give any token; `Sampler.rollout` raises an error at its end.
        tokens = invert_distribution(token_logprobs.exp(), uniforms[running, t, None])
        sequences[running, width + t] = tokens[:, 0]
        outputs["rollout_logprobs"][running, t] = token_logprobs.gather(1, tokens)[:, 0]
        ended = torch.isin(tokens[:, 0], stops) | (t + 1 == max_lengths[running])
        if stop_strings is not None:
            ended |= stop_strings(sequences[running, width : width + t + 1], None)
        new = running[ended & ~finished]  # indices of the responses that end at this token
        for index in new.tolist():
            response = sequences[index, width : width + t + 1]
            yield index, response, {name: x[index, : t + 1] for name, x in outputs.items()}
        finished |= ended
        finished_count += len(new)
        if finished_count == len(running) or interrupted():
            return
        input_ids = tokens
        positions = positions[:, -1:] + 1
        attention = nn.functional.pad(attention, (0, 1), value=1)
        if finished_count >= SHRINK_AT * len(running):
            kept = ~finished
            running = running[kept]
            input_ids = input_ids[kept]
            positions = positions[kept]
            attention = attention[kept]
            finished = finished[kept]
            finished_count = 0
            # `reorder_cache` selects the rows of any cache, recurrent states included.
            cache.reorder_cache(kept.nonzero()[:, 0])


def collect(
    sampler: Sampler, prompts: Sequence[Row], step: int, state: dict, teacher: Any
) -> Experience:
    """Gather a response to each prompt of a step: the student's with probability --on_policy_share,
    else the row's.

    Args:
        state: `Experience.state` of the previous rollout: the "position" of the next prompt.
        teacher: of `loading.load_teacher`; one on a server is asked here.
    """
    args = sampler.args
    reward_sources = sampler.reward_sources
    samples = []
    position = state.get("position", 0)  # of the step's first prompt
    rows = take_prompts(prompts, position, args.rollout_batch_size, args.seed, args.shuffle)
    drawn = utils.generator("on policy", args.seed, step).random(len(rows))
    by_student = drawn < args.on_policy_share  # (prompts,) bool
    asked = [*itertools.compress(rows, by_student)]
    copied = [*itertools.compress(rows, ~by_student)]
    if asked:
        samples = sampler.rollout(asked, 1, ("rollout", args.seed, step)).samples
    for row in copied:
        sample = Sample.of_row(row)
        # No policy has sampled this response.
        sample.outputs["rollout_logprobs"] = np.full(len(sample.response), math.nan, np.float32)
        sample.text = sampler.tokenizer.decode(sample.response, skip_special_tokens=True)
        # It is not scored, as nothing is in training: see `scores` below.
        sample.scores = dict.fromkeys(reward_sources.sources, 0.0)
        samples.append(sample)
    if args.is_served:
        teacher.ask(samples, sampler.world, sampler.interrupted)
    batch = Batch.from_samples(samples, model_device(sampler.model))
    if args.has_teacher_prompt and not args.is_served:
        for x in samples:
            [(_, tokens, sampled)] = x.contexts
            batch.teacher_contexts.append((x.row["teacher_query"], tokens, sampled))
    metrics = batch_metrics(batch, reward_sources)
    # Sources score held-out responses only: here their metrics are NaN.
    metrics = {name: x for name, x in metrics.items() if not math.isnan(x)}
    metrics["val/on_policy_share"] = len(asked) / len(rows)
    # Nothing is scored in training: each source gives 0, or NaN where the conversation has failed.
    # A response with NaN does not train.
    batch.scores = batch.reward_components[args.reward[0]]
    if args.is_served:
        answered = batch.tokens["teacher_logprobs"].isfinite().flatten(1).all(1)  # (N,)
        batch.scores = batch.scores.where(answered, math.nan)
        metrics["teacher/left_out"] = 1 - answered.double().mean().item()
    return Experience(
        batch,
        sampled=batch,
        metrics=metrics,
        sampled_tokens=sum(batch.lengths),
        state={"position": position + len(rows)},
        unscored="",  # no reward source has failed
    )


def main(args: Args) -> None:
    # ---- setting up ----
    # What a row is: an assistant turn to learn, a whole conversation, or only a prompt.
    learn: Learn = "turns" if args.on_policy_share else "conversations"
    if args.on_policy_share == 1:
        learn = "prompts"
    make_policy = functools.partial(Policy, args=args)
    parts = set_up(args, __file__, make_policy, generate, ROLLOUT_OUTPUTS, learn)
    world, run, wrapped, sampler = parts.world, parts.run, parts.wrapped, parts.sampler
    teacher = loading.load_teacher(args, make_policy, parts)
    total_steps = count_steps(args.passes, parts.prompts, args.rollout_batch_size)
    updates_per_step = utils.count_updates(
        args.rollout_batch_size, args.mini_batch_size, args.num_epochs
    )
    optimizer = utils.Optimizer(parts.policy, args, total_steps, updates_per_step)
    # Models and optimizers have names, and "" is that of the policy.
    rollouts = parts.start(
        functools.partial(collect, teacher=teacher), total_steps, {"": optimizer}
    )

    for step in run.steps():
        # ---- 1. rollout ----
        run.phase("rollout")
        experience = rollouts.take(step)
        batch, mask = experience.batch, experience.batch.response_mask  # (N, T)
        if experience.metrics.get("teacher/left_out") == 1:
            run.fail(f"{teacher.failure}; the teacher has answered for no response of step {step}")
        trainable = batch.scores.isfinite().nonzero().flatten().tolist()

        # ---- 2. update: epochs, mini-batches (an optimizer step each), micro-batches ----
        run.phase("training")
        sums = utils.Sums(world)
        updates = utils.mini_batches(
            trainable, args.mini_batch_size, args.num_epochs, (args.seed, step)
        )
        # There are fewer updates than `updates_per_step` where responses were left out.
        optimizer.begin_step(step, len(updates))
        for number, (_, mini) in enumerate(updates):
            token_count = mask[mini].sum().item()
            for inputs, micro, last in batch.micro_batches(mini, args, world):
                m = micro["response_mask"]  # (n, T), as all of micro and out
                set_gradient_sync(wrapped, last)
                # The first two inputs are the student's, the last two the teacher's: the same two
                # unless the teacher has a prompt of its own.
                of_teacher = teacher_chunks(teacher, inputs[-2:], micro)
                given = *inputs[:2], micro["rollout_logprobs"][m], of_teacher
                out = forward_tokens(wrapped, given, m)
                loss = out["losses"].sum() / token_count  # 0 outside of m
                optimizer.backward(loss)
                sums.add(loss=loss / len(updates))
                sums.add(m, tokens=m, **out)  # "losses" is a sum over tokens, "loss" a mean
                micro.update(out)  # what is added to `micro` goes to tokens.jsonl
                if number == 0:  # with the weights that sampled
                    # Leave out responses of the data set: no policy has sampled them (NaN).
                    micro["response_mask"] = m & micro["rollout_logprobs"].isfinite()
                    add_rollout(sums, micro, out["logprobs"])
            optimizer.step()

        # ---- 3. sync: the engine, the teacher ----
        run.phase("sync")
        rollouts.sync()
        if args.ref_refresh_every and step % args.ref_refresh_every == 0:
            sync_reference(teacher, parts.policy)
        total = sums.totals()

        # ---- 4. metrics ----
        metrics = {
            "epoch": experience.state["position"] / len(parts.prompts),
            "train/loss": total["loss"],  # NaN where all conversations have failed
            "policy/entropy_avg": total["entropies"] / total["tokens"],
            **mismatch_metrics(total, step, batch),
            **experience.metrics,
            **optimizer.metrics(),
            **sampler.metrics(),
        }
        if args.teacher:
            metrics["objective/divergence"] = total["losses"] / total["tokens"]
            metrics["teacher/entropy_avg"] = total["teacher_entropies"] / total["tokens"]
            metrics["teacher/same_top_token"] = total["same_top"] / total["tokens"]
        run.log_samples(batch)
        # `experience.state`: where the next rollout begins, also that of a resumed run.
        run.finish_step(
            metrics, experience.sampled_tokens, batch.trained_tokens, **experience.state
        )
    run.finish()


if __name__ == "__main__":
    with report_errors():
        main(parse(Args))
