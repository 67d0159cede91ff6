"""What the server that forks the tests' runs has done before: see helpers.py."""

import gc
import os

from transformers import conversion_mapping

import grpo
import ppo
import reward_model
import rloo
from plumbing.run.command import parse

# it keeps files of a machine that dies, of which no test is one; a run has 40
os.fsync = lambda descriptor: None

for script in (grpo, ppo, reward_model, rloo):
    parse(script.Args, [])  # fills the caches of tyro
conversion_mapping.get_checkpoint_conversion_mapping("qwen2")  # and those of transformers
gc.collect()
# a collection in a run would write to the pages of every object, and each would be copied
gc.freeze()
