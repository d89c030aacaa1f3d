"""``python -m farpipe`` is the same as ``farpipe``."""

from farpipe.cli import main

main()
