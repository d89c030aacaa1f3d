"""``farpipe optical blocking|simulate|compare``: light paths, and trainings over them."""

import typer

from farpipe.cli.optical_blocking import blocking
from farpipe.cli.optical_training import compare, simulate

optical = typer.Typer(help="Light paths: blocking of dynamic traffic, trainings over an optical network.")
optical.command("blocking")(blocking)
optical.command("simulate")(simulate)
optical.command("compare")(compare)


@optical.callback()
def common() -> None:
    """Light paths: blocking of dynamic traffic, trainings over an optical network."""
