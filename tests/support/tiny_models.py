"""What the tests share: tiny random models of several families, and a tokenizer of one token a
character.
"""

import pytest
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

import utils
from plumbing.models import loading as models

torch.set_num_threads(1)
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

CPU = torch.device("cpu")
SMALL = dict(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=128,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=0,
)
KV = dict(num_key_value_heads=1)
FAMILIES = {  # each does something that the others do not
    "qwen2": dict(SMALL, **KV, tie_word_embeddings=True),
    "llama": dict(SMALL, **KV, tie_word_embeddings=False),
    "gemma": dict(SMALL, **KV, head_dim=8),
    "gemma2": dict(
        SMALL,
        **KV,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=4,
        final_logit_softcapping=1.5,
        attn_logit_softcapping=None,  # which float64 does not take; see test_models.py
    ),
    "gpt_neox": dict(SMALL, hidden_dropout=0.2, attention_dropout=0.2),
    "gpt2": dict(
        vocab_size=32,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=128,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        resid_pdrop=0.2,
        embd_pdrop=0.2,
        attn_pdrop=0.2,
    ),
}


def make_tokenizer(**options):
    """One token a byte. AutoTokenizer opens every folder with a Qwen2 model as Qwen2Tokenizer, so
    this is one.
    """
    tokens = ["<pad>", "<eos>", "<unk>"] + sorted(ByteLevel.alphabet())
    special = dict(pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left")
    return transformers.Qwen2Tokenizer(
        vocab={t: i for i, t in enumerate(tokens)}, merges=[], **special | options
    )


def random_model(family: str, seed: int = 0, **changes):
    """A model of which every parameter, biases and norms included, is random and large enough to
    matter.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **FAMILIES[family] | changes)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.25)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    return model.eval()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A function (family, seed, **config changes) -> folder of that random model, which is made
    once.
    """
    made = {}

    def folder(family: str = "qwen2", seed: int = 0, **changes) -> str:
        key = (family, seed, *sorted(changes.items()))
        if key not in made:
            made[key] = str(tmp_path_factory.mktemp(family))
            random_model(family, seed, **changes).save_pretrained(made[key])
        return made[key]

    return folder


@pytest.fixture(scope="session")
def load(model_folder):
    """A function (family, dtype, seed, **config changes) -> the model, loaded the way the scripts
    load it.
    """

    def load(family: str = "qwen2", dtype: torch.dtype = torch.float32, seed: int = 0, **changes):
        return models.load_model("--model", model_folder(family, seed, **changes), dtype, CPU)

    return load


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def world():
    return utils.World(0, 1, CPU)
