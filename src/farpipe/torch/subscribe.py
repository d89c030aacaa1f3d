"""Weights of a training elsewhere, as they are published: ``farpipe.torch.subscribe``."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from farpipe.core.errors import InputError
from farpipe.core.spec.hugging_face import config_of
from farpipe.core.strict import expect_format, nearest, parse_json, read_text
from farpipe.engine.publish.source import Reach
from farpipe.engine.publish.subscription import Address, Received, Subscription
from farpipe.engine.publish.version import PartForm
from farpipe.engine.publish.words import FILE_NAME, TOKEN_VARIABLE
from farpipe.engine.stages.decoder_weights import is_own_name, their_name
from farpipe.engine.transport.security.tls import TlsFiles


class Weights:
    """One version of a training's weights."""

    def __init__(self, received: Received) -> None:
        self._received = received
        self.step = received.step
        """Steps that the training had done."""
        self.wire_bytes = received.wire_bytes
        """Bytes that came for this version; `whole_bytes` would have come without the one before."""
        self.whole_bytes = received.whole_bytes
        self.num_changed = received.num_changed
        """Weights that differ from the version before; None for one that came whole."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All weights by their names in the model, equal to the bit to what was published; don't write to them.

        Those of farpipe's own decoder have the names of the Llama that it is in transformers, where it is one.
        """
        model, found = self._received.publication.model, {}
        for name, tensor in self._received.tensors.items():
            is_own = model.hugging_face is None and model.module is None and is_own_name(name)
            found[their_name(name, model) if is_own else name] = tensor
        return found

    @property
    def config(self) -> dict[str, Any]:
        """The model's config.json, for transformers' ``AutoConfig.for_model``; InputError where it has none."""
        publication = self._received.publication
        if publication.config:
            found: dict[str, Any] = json.loads(publication.config)
            return found
        if publication.model.module is not None:
            raise InputError(f"a module of your own ({publication.model.module}) has no config.json")
        dtype = next(iter(self._received.tensors.values())).dtype
        return config_of(publication.model, str(dtype).removeprefix("torch."))

    @torch.no_grad()
    def load_into(self, module: nn.Module) -> None:
        """Copy the weights into `module`, such as a model of transformers, where its parameters are.

        They are equal to the bit where its dtype has as many digits. InputError for a parameter that is missing on
        either side or has another shape; nothing is written then.
        """
        parameters = dict(module.named_parameters(remove_duplicate=False))
        tensors = self.tensors
        for name, tensor in tensors.items():
            if name not in parameters:
                raise InputError(f"{type(module).__name__} has no parameter {name}{nearest(name, parameters)}")
            if parameters[name].shape != tensor.shape:
                shapes = f"{list(parameters[name].shape)}, the training's {list(tensor.shape)}"
                raise InputError(f"{type(module).__name__}: {name} has the shape {shapes}")
        filled = {id(parameters[name]) for name in tensors}
        if left := [name for name, parameter in parameters.items() if id(parameter) not in filled]:
            raise InputError(f"{type(module).__name__}: the training has no weight {left[0]}")
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)


class WeightsSubscription:
    """What `subscribe` returns: versions of a training's weights, always the newest, received in the background.

    Iterate over it, call `next` or `latest`; ``with`` or `close` ends it. The training notices nothing.
    """

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription

    def __iter__(self) -> Iterator[Weights]:
        """Yield the newest version again and again, waiting for each, until the training has ended."""
        return map(Weights, self._subscription)

    def next(self, timeout_s: float | None = None) -> Weights | None:
        """The newest version that was not taken yet, waiting for it; None after `timeout_s` or when the training ended.

        RunError when it can't be reached for `patience_s` or what comes stays damaged.
        """
        found = self._subscription.next(timeout_s)
        return None if found is None else Weights(found)

    def latest(self) -> Weights | None:
        """The newest version that was not taken yet, if one is there; doesn't wait."""
        return self.next(0.0)

    def close(self) -> None:
        """Leave."""
        self._subscription.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def subscribe(
    source: str | os.PathLike[str],
    *,
    token: str | None = None,
    certs: str | os.PathLike[str] | None = None,
    site: str = "",
    host: str | None = None,
    port: int = 0,
    allow_plaintext: bool = False,
    patience_s: float = 600.0,
    max_bytes: int | None = None,
) -> WeightsSubscription:
    """Subscribe to the weights of a training whose job has ``[publish]``.

    `source`: its run directory, a copy of the `publish.json` there, or ``HOST:PORT`` of its first process. `token`: the
    one in `publish.json`; default: FARPIPE_PUBLISH_TOKEN. `certs`: this site's folder from `farpipe certs issue`, which
    processes with certificates ask for; without, on addresses other than loopback, `allow_plaintext` says that the
    network is private. `site`: this one's name in the job; its link's free rate is used then, and an emulated
    one is emulated. `host`, `port`: where this side listens, the next process at the next port; default: any free one.
    `patience_s`: longest time without a connection. `max_bytes`: most that all weights may take; default: half of the
    free memory. InputError for a source or certificates that can't be used; what happens later, `next` raises.
    """
    tls = None if certs is None else TlsFiles.find(Path(certs), site)

    def locate() -> tuple[Address, Reach]:
        """As the file says now: a training that starts again may have another port."""
        address, of_file = _address(source)
        secret = token or of_file or os.environ.get(TOKEN_VARIABLE)
        if not secret:
            raise InputError(f"subscribe: give the token of the training's {FILE_NAME}, or set {TOKEN_VARIABLE}")
        return address, Reach(secret.encode(), tls, site, host, port, allow_plaintext)

    return WeightsSubscription(Subscription(locate, patience_s=patience_s, max_bytes=max_bytes))


def _address(source: str | os.PathLike[str]) -> tuple[Address, str]:
    """Address of the first process, and the token where `source` is a file."""
    path = Path(source) / FILE_NAME if Path(source).is_dir() else Path(source)
    if Path(source).is_dir() and not path.is_file():
        raise InputError(f"{path}: not there; a run whose job has [publish] writes it when it starts")
    if path.is_file():
        words = expect_format(parse_json(read_text(path), str(path)), PartForm.FORMAT, str(path))
        return _split(str(words.get("address", "")), str(path)), str(words.get("token", ""))
    return _split(str(source), "subscribe"), ""


def _split(address: str, where: str) -> Address:
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        known = f"HOST:PORT, a run directory with {FILE_NAME}, or that file"
        raise InputError(f"{where}: expected {known}; found {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)
