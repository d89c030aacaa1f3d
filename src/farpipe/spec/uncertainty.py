"""Uncertainty of figures: ranges around what a job says of links and what the cost model says of devices."""

from farpipe.errors import UsageError
from farpipe.spec.part import Part, Share
from farpipe.strict import nearest, validate


class Uncertainty(Part):
    """Shares by which figures may be higher or lower, every value in between alike."""

    links: Share = 0.0
    """Latency and bandwidth of every link between sites, each by itself."""
    compute: Share = 0.0
    """All times of a pipeline rank together, of every rank by itself."""

    def __bool__(self) -> bool:
        return self.links > 0 or self.compute > 0


def parse_uncertainty(text: str) -> Uncertainty:
    """``links=20%,compute=5%`` as an Uncertainty; UsageError for anything else."""
    shares: dict[str, float] = {}
    for part in text.split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        if key not in Uncertainty.model_fields:
            raise UsageError(
                f"--uncertainty: expected shares such as links=20%,compute=5%, found {part.strip()!r}"
                f"{nearest(key, Uncertainty.model_fields)}"
            )
        if key in shares:
            raise UsageError(f"--uncertainty: {key} is given twice")
        shares[key] = _share(key, value)
    return validate(Uncertainty, shares, "--uncertainty")


def _share(key: str, value: str) -> float:
    try:
        share = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise UsageError(f"--uncertainty: {key} is a share from 0 to below 1, such as 0.2 or 20%, found {value!r}")
    return share
