"""Puts the repository on Python's path, which has the script's folder only: commands import this
before our modules.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
