"""Imported before torch by every script."""

import os

# On a CPU that does other work too, OpenMP's threads spend their time waiting for each other's turn: 0.3 s of spinning
# at every barrier, by default. Shorter costs nothing where the cores are free, and is ten times as fast where not.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
