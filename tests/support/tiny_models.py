"""What the tests share: tiny random models of several families, and a tokenizer of one token a
character.
"""

from pathlib import Path

import pytest
import torch
import transformers
import yaml
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

import utils
from plumbing.models import loading as models

torch.set_num_threads(1)
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

CPU = torch.device("cpu")
WORLD = utils.World(0, 1, CPU)  # one process
TABLE = yaml.safe_load((Path(__file__).parents[1] / "data/tiny_models.yaml").read_text())
SMALL = TABLE["shapes"]["small"]
FAMILIES = TABLE["families"]


def make_tokenizer(puts_bos: bool = False, **options):
    """One token a byte; it may put its BOS before every text. AutoTokenizer opens every folder with
    a Qwen2 model as Qwen2Tokenizer, so this is one.
    """
    tokens = ["<pad>", "<eos>", "<unk>"] + sorted(ByteLevel.alphabet())
    special = dict(pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left")
    tokenizer = transformers.Qwen2Tokenizer(
        vocab={t: i for i, t in enumerate(tokens)}, merges=[], **special | options
    )
    if puts_bos:
        bos = tokenizer.bos_token
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
        )
    return tokenizer


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
    return WORLD
