"""Pictures of documents in notebooks: documents ask here, and the package's door says who draws them."""

from collections.abc import Callable


def _nobody(document: object) -> str | None:
    return None


draw: Callable[[object], str | None] = _nobody
"""SVG of a document; None where it has no picture."""
