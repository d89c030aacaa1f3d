"""What a subscriber and a process that publishes say to each other, as JSON; weights go beside it as messages.

A session is a run of two ranks: the subscriber is rank 0 and listens, the process is rank 1. Words are posts.

    subscriber to the first one   publication            what is published, and by which processes
    subscriber to each process    form                   which pieces it has: PartForm
    subscriber to the first one   newest (after)         step of the newest version, when there is one after that step
    subscriber to each process    fetch (step, base)     whether it is coded beside `base`; then its bytes, in chunks
    subscriber to the first one   settled                every process has got the `fetch`, and holds that version
    subscriber to each process    bye                    it has what it wanted
"""

from typing import Annotated, Final, Literal

from pydantic import Field

from farpipe.core.spec import Model
from farpipe.core.spec.part import Flag, Natural, Part, SiteName, Text
from farpipe.engine.transport import ChannelKind

SUBSCRIBER, PUBLISHER = 0, 1
"""Ranks of a session."""
WISHES: Final = "publish wishes"
ANSWERS: Final = "publish answers"
CHANNEL: Final[ChannelKind] = "sync"
MAX_CHUNK_BYTES: Final = 4 << 20
MEET_S: Final = 20.0
"""Longest wait for the other side while a session begins."""
OUTAGE_S: Final = 20.0
"""A connection that is gone for longer ends its session; the subscriber begins another."""
TOKEN_VARIABLE: Final = "FARPIPE_PUBLISH_TOKEN"
FILE_NAME: Final = "publish.json"
Sha256 = Annotated[str, Field(strict=True, pattern="^[0-9a-f]{64}$")]


class Greeting(Part):
    """What each side says before they connect; with certificates, their sites count."""

    site: SiteName | Literal[""] = ""


class Wish(Part):
    """A subscriber's wish."""

    wish: Literal["publication", "form", "newest", "fetch", "settled", "bye"]
    after: Annotated[int, Field(strict=True, ge=-1)] = -1
    """Of `newest`: the step of what it has; -1: nothing."""
    step: Natural = 0
    """Of `fetch`: the wanted version."""
    fetch: Natural = 0
    """Number of this `fetch` in its session, which its chunks bear."""
    base: Natural | None = None
    """Of `fetch`: the version that the subscriber has of this process's part; None: nothing that is of use."""
    base_sha256: Sha256 | None = None


class Newest(Part):
    """Answer to `newest`."""

    step: Natural | None = None
    """None: the training has ended, and no version after `after` will come."""


class Fetch(Part):
    """Answer to `fetch`, ahead of the chunks."""

    sha256: Sha256 | None = None
    """Digest of the whole part; None: the version is no longer here."""
    is_delta: Flag = False
    """True if it is coded beside the base."""


class PublisherAddress(Part):
    """Where a process that publishes is to be found."""

    host: Text
    port: Annotated[Natural, Field(ge=1, le=65535)]
    site: SiteName


class Publication(Part):
    """What a training publishes, and which processes have it."""

    training: Sha256
    """Digest of the model, the data's shape and the seed: equal for all attempts of one training."""
    model: Model
    config: str = ""
    """The model's config.json; empty for farpipe's own decoder and for modules of the user's own."""
    addresses: tuple[PublisherAddress, ...]
