"""A module that a template loads: it notes when, and draws a number."""

import os
import random

LOADED_AS = os.getpid(), os.environ.get("WHO")
DRAWN = random.getrandbits(128)
