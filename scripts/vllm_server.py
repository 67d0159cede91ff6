"""Serve a model with vLLM to runs on other GPUs or machines, which push their weights into it after each step.

    export VLLM_API_KEY=...                             # of your choice, the same for the server and the run
    python scripts/vllm_server.py --model Qwen/Qwen2.5-7B --port 8000 --tensor_parallel_size 2 --host 10.0.0.2
    python grpo.py --model Qwen/Qwen2.5-7B --rollout_backend server --rollout_servers http://10.0.0.2:8000

This process becomes vLLM's OpenAI-compatible server with what a run needs: log-probabilities of the distribution that
is sampled, requests and responses of token ids, and weight transfer by NCCL. All flags are those of `vllm serve`, with
--dtype bfloat16 as the default. GET /health answers once the model is loaded.

Whoever gets an answer from this server can run code on its machine: vLLM's /collective_rpc calls functions by name, and
its weight transfer connects to the address that it is told. vLLM's own --api-key leaves both open. So with a key in
VLLM_API_KEY, every path but /health requires it, and an address other than this machine's loopback requires a key. The
key and the weights travel unencrypted, and the connections of the weights require no key: let --host be an address in a
private network, such as the cluster's. On a loopback without a key, every user of the machine gets in.
"""

import argparse
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import utils
from plumbing.http import require_key


def main(line: list[str]) -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    model = (
        "folder or hub name of the model that the run trains, or of one of the same shapes: its weights are replaced"
    )
    parser.add_argument("--model", required=True, help=model)
    host = "address to listen on; one that other machines reach requires a key in the variable VLLM_API_KEY"
    parser.add_argument("--host", default="127.0.0.1", help=host)
    args, others = parser.parse_known_args(line)
    with utils.loading(f"--host {args.host}"):
        require_key(args.host, "VLLM_API_KEY")
    words = [
        "--dtype=bfloat16",
        *others,
        f"--model={args.model}",
        f"--host={args.host}",
        "--generation-config=vllm",  # the model's own defaults would change the distribution
        "--logprobs-mode=processed_logprobs",  # after the temperature
        '--weight-transfer-config={"backend": "nccl"}',
        "--middleware=plumbing.http.CheckKey",
        "--uvicorn-log-level=warning",  # no line for each request
        "--enable-scale-out",
        "--language-model-only",
    ]
    path = os.pathsep.join(filter(None, [utils.ROOT, os.environ.get("PYTHONPATH")]))  # for plumbing/http.py
    switches = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]
    # Signals and the exit code are vLLM's from here on.
    os.execve(sys.executable, command, {**os.environ, **switches})


if __name__ == "__main__":
    main(sys.argv[1:])
