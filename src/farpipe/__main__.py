"""``python -m farpipe`` is the same as ``farpipe``."""

from farpipe.cli import main

if __name__ == "__main__":
    main()
