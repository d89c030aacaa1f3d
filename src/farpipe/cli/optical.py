"""``farpipe optical blocking|simulate|compare``: light paths, and trainings over them."""

import typer

from farpipe.cli.optical_blocking import blocking

optical = typer.Typer(help="Light paths: blocking of dynamic traffic, trainings over an optical network.")
optical.command("blocking")(blocking)


@optical.callback()
def common() -> None:
    """Light paths: blocking of dynamic traffic, trainings over an optical network."""
