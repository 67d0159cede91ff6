# An image for NVIDIA GPUs: vLLM's own, with its CUDA and torch, and the other packages of requirements.txt.
#   docker build -t loopwise .
#   docker run --gpus all --ipc=host -it -v "$PWD/runs:/loopwise/runs" -v ~/.cache/huggingface:/huggingface loopwise
#   # in it, as in README.md:  python grpo.py --model Qwen/Qwen2.5-0.5B-Instruct
#   #                          torchrun --nproc_per_node 8 grpo.py --model Qwen/Qwen2.5-7B
# --ipc=host: NCCL and vLLM exchange data between processes in shared memory, of which docker gives 64 MB by default.
# runs/ and the hub's cache are folders of the host, so that they stay when the container ends.

# The version is that of vllm in requirements.txt.
FROM vllm/vllm-openai:v0.32.0
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# git: args.json and git.diff of a run name the commit and the changed files.
RUN apt-get update && apt-get install --yes --no-install-recommends git && rm -rf /var/lib/apt/lists/*
# The commands of README.md and scripts/ call python, which Ubuntu names python3.
RUN ln -sf "$(command -v python3)" /usr/local/bin/python

WORKDIR /loopwise
COPY requirements.txt .
# torch and vllm are the image's, so their lines are left out. The constraint lets the build fail if another package asks
# for another torch.
RUN uv pip freeze --system | grep '^torch' >torch.txt \
    && grep -Ev '^(torch|vllm)==' requirements.txt | uv pip install --system --no-cache --constraint torch.txt -r - \
    && rm torch.txt

# After the packages, so that a change of the code does not install them again.
COPY . .
ENV HF_HOME=/huggingface

# The image's own entry point starts a server.
ENTRYPOINT []
CMD ["bash"]
