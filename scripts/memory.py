"""What a run needs of each GPU's memory, before it starts, and which flags make it fit; see plumbing/memory.py.

    python scripts/memory.py --model Qwen/Qwen2.5-7B --gpus 8
"""

import os
import sys

import tyro

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from plumbing import memory

if __name__ == "__main__":
    memory.main(tyro.cli(memory.Args))
