"""farpipe: plan, simulate and run the training of one large model over several datacenters."""

from farpipe.core import notebook

__version__ = "0.1.0"


def _draw(document: object) -> str | None:
    from farpipe.report.gantt import svg_of  # here, for nothing is drawn outside notebooks

    return svg_of(document)


notebook.draw = _draw
