"""What people type: one short file per command; whatever is heavy is imported inside the command."""

import sys
import traceback

from farpipe.errors import FarpipeError

INTERRUPTED = 130


def main() -> None:
    """Run the command line; every error that a user can make ends in one clear message and its exit code."""
    from farpipe.cli.app import app

    try:
        app()
    except FarpipeError as error:
        print(f"farpipe: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("farpipe: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        sys.stderr.close()
        sys.exit(0)
    except Exception:
        traceback.print_exc()
        print("farpipe: this is a bug in farpipe; please report it with the lines above", file=sys.stderr)
        sys.exit(1)
