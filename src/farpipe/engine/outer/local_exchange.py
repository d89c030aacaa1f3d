"""One process's part in the exchanges of local steps: differences out, the outer step, the merged weights in.

The owner of a box (see `routes.owned`) rounds its difference once, sends to the owners at every other site what both
have, adds what comes in the order of the sites, takes the outer step, and passes the new anchor on to those of its own
site that have the box as well. Sending does not wait: what is sent after a step is received `delay_steps` steps later,
so nothing runs beside the training but the transport.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from farpipe.core.spec import LocalSteps
from farpipe.engine.checkpoint.boxes import common, sizes_of, within
from farpipe.engine.checkpoint.files import Piece
from farpipe.engine.executor.peers import MessageRow, Peers
from farpipe.engine.outer.differences import Difference, difference, from_wire, num_wire_bytes
from farpipe.engine.outer.outer_optimizer import fragments_of, mean_of, merge, outer_update
from farpipe.engine.outer.routes import Held, Holdings, Route, expect_one_model, owned, routes
from farpipe.engine.transport import Tag

WEIGHT: Final = "weight/"
INSIDE: Final = 1 << 20
"""Number of an exchange's messages inside a site: below it are those of the replicas' collectives."""


class SitePlace(NamedTuple):
    """A process among those of all sites that train together."""

    site: int
    process: int
    """Number inside the site."""


class OuterMessage(NamedTuple):
    """A difference that has come from another site."""

    sent_after: int
    """Steps that were done when it was sent."""
    fragment: int
    row: MessageRow


@dataclass
class Exchanged:
    """Figures of one process's exchanges so far."""

    num_merges: int = 0
    sent_bytes: int = 0
    waited_ns: int = 0
    """Time for which training stood still for messages from other sites."""
    messages: list[OuterMessage] = field(default_factory=list)


@dataclass
class _Box:
    """A box that this process owns, with what the outer optimizer keeps of it.

    All of it is in the host's memory, so that sites of unlike devices compute the same bits.
    """

    held: Held
    weights: Tensor
    """[size per dimension]: a live view of what the inner optimizer updates."""
    anchor: Tensor
    momentum: Tensor
    sent: Difference | None = None
    """What is on its way to the other sites."""


class _View(NamedTuple):
    """A box of the training's weights on this process."""

    held: Held
    weights: Tensor
    """[size per dimension]: live."""


class _Fragment(NamedTuple):
    """The routes of one fragment."""

    boxes: tuple[int, ...]
    out: list[Route]
    into: list[Route]
    """Between sites, with numbers of owned boxes; processes are numbered over all sites."""
    pass_on: list[Route]
    """To others of the own site, with numbers of owned boxes."""
    take_on: list[Route]
    """From others of the own site, with numbers of views."""


class LocalExchange:
    """The exchanges of one process. Every process of every site calls `after` after each step."""

    def __init__(
        self,
        settings: LocalSteps,
        place: SitePlace,
        pieces: Sequence[Piece],
        inner: Peers,
        outer: Peers,
        num_tokens: float = 1.0,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`pieces`: of the training's state; weights are read and written in place, then `changed` is called.

        `inner`: the processes of this site; `outer`: those of all, site after site. `num_tokens`: of a step at this
        site, by which its difference counts. InputError where the sites don't train one model.
        """
        self._settings, self._inner, self._outer, self._changed = settings, inner, outer, changed
        self._site, self.exchanged = place.site, Exchanged()
        weights = {p.name.removeprefix(WEIGHT): p for p in pieces if p.name.startswith(WEIGHT)}
        self._views = [_View(Held(name, box), view) for name, p in weights.items() for box, view in p.parts()]
        self._shapes = {name: tuple(piece.shape) for name, piece in weights.items()}
        said = self._meet(place, num_tokens)
        self._site_of = [one["site"] for one in said]
        sites = [[one for one in said if one["site"] == site] for site in sorted({*self._site_of})]
        self._tokens = [float(site[0]["tokens"]) for site in sites]
        holdings = [[_holdings(process["held"]) for process in site] for site in sites]
        expect_one_model({f"site {number}": site for number, site in enumerate(holdings)})
        owners = [owned(site) for site in holdings]
        self._boxes = [_own(held, self._views) for held in owners[place.site][place.process]]
        sizes = {name: prod(shape) for process in sites[0] for name, shape in process["shapes"].items()}
        fragments = [{*names} for names in fragments_of(sizes, settings.fragments)]
        self._fragments = [_fragment(names, place, holdings, owners) for names in fragments]

    def _meet(self, place: SitePlace, num_tokens: float) -> list[dict[str, Any]]:
        """What each process of each site says of itself, site after site."""
        held = [view.held for view in self._views]
        mine = {"site": place.site, "held": held, "shapes": self._shapes, "tokens": num_tokens}
        texts = self._outer.exchange("local steps", json.dumps(mine).encode(), waiting_for="the other sites")
        return [json.loads(text) for text in texts]

    def after(self, num_steps: int) -> None:
        """Begin and merge what is due after so many steps; waits only for what is to be merged."""
        for fragment in self._settings.sent_after(num_steps):
            self._send(fragment, num_steps)
        merged = self._settings.merged_after(num_steps)
        for fragment in merged:
            self._merge(fragment, num_steps - self._settings.delay_steps)
        if merged:
            self._changed()

    @torch.no_grad()
    def _send(self, fragment: int, num_steps: int) -> None:
        of = self._fragments[fragment]
        for box in (self._boxes[index] for index in of.boxes):
            delta = box.anchor - box.weights.to("cpu", torch.float32)
            box.sent = difference(delta, box.held.box, self._settings.wire_type)
        for route in of.out:
            message = torch.cat([_sent(self._boxes[part.number]).part(part.box).wire() for part in route.parts])
            self._outer.send(route.process, "sync", Tag(num_steps, fragment, 0), message)
            self.exchanged.sent_bytes += message.nbytes

    @torch.no_grad()
    def _merge(self, fragment: int, sent_after: int) -> None:
        of = self._fragments[fragment]
        found = {index: self._differences(self._boxes[index]) for index in of.boxes}
        for route in of.into:
            self._receive(route, fragment, sent_after, found)
        for index, by_site in found.items():
            box = self._boxes[index]
            outer_update(box.anchor, box.momentum, mean_of(by_site, self._tokens), self._settings)
            merge(box.weights, box.anchor.to(box.weights), self._settings)
            box.sent = None
        self._pass_on(of, Tag(sent_after, fragment, INSIDE))
        self.exchanged.num_merges += 1

    def _differences(self, box: _Box) -> list[Tensor]:
        """Room for the difference of every site, with the own one in its place."""
        by_site = [torch.empty(sizes_of(box.held.box)) for _ in self._tokens]
        by_site[self._site] = _sent(box).values
        return by_site

    def _receive(self, route: Route, fragment: int, sent_after: int, found: Mapping[int, list[Tensor]]) -> None:
        """Put the differences of one process of another site in their places."""
        waiting_for = f"the difference of fragment {fragment} after step {sent_after}"
        begin_ns = self._outer.clock.now_ns()
        message = self._outer.receive(route.process, "sync", Tag(sent_after, fragment, 0), waiting_for=waiting_for)
        self.exchanged.waited_ns += self._outer.clock.now_ns() - begin_ns
        self.exchanged.messages.append(OuterMessage(sent_after, fragment, message.row))
        site, wire_type = self._site_of[route.process], self._settings.wire_type
        lengths = [num_wire_bytes(part.box, wire_type) for part in route.parts]
        for part, data in zip(route.parts, torch.split(message.tensor, lengths), strict=True):
            place = within(self._boxes[part.number].held.box, part.box)
            found[part.number][site][place] = from_wire(data, part.box, wire_type).values

    def _pass_on(self, of: _Fragment, tag: Tag) -> None:
        """Give the new anchor to those of the own site that have owned boxes too, and take theirs."""
        for route in of.pass_on:
            owners = [(self._boxes[part.number], part.box) for part in route.parts]
            parts = [owner.anchor[within(owner.held.box, box)].reshape(-1) for owner, box in owners]
            self._inner.send(route.process, "sync", tag, torch.cat(parts))
        for route in of.take_on:
            message = self._inner.receive(route.process, "sync", tag, waiting_for="merged weights of another process")
            sizes = [prod(sizes_of(part.box)) for part in route.parts]
            for part, values in zip(route.parts, torch.split(message.tensor, sizes), strict=True):
                view = self._views[part.number]
                weights = view.weights[within(view.held.box, part.box)]
                merge(weights, values.view(weights.shape).to(weights), self._settings)

    def state(self) -> list[Piece]:
        """Live views of what this process's outer optimizer keeps, for checkpoints."""
        return [
            Piece(f"{kind}/{box.held.name}", self._shapes[box.held.name], 0, values, offset=_offset(box.held))
            for box in self._boxes
            for kind, values in (("anchor", box.anchor), ("outer_momentum", box.momentum))
        ]


def _fragment(
    names: Collection[str],
    place: SitePlace,
    sites: Sequence[Sequence[Holdings]],
    owners: Sequence[Sequence[Holdings]],
) -> _Fragment:
    """Routes of the parameters in `names` for the process at `place`: what each process of each site has, and owns."""
    mine, numbers = owners[place.site][place.process], count()
    far = {next(numbers): (site, held) for site, every in enumerate(owners) for held in every}
    far_owners = {number: held for number, (site, held) in far.items() if site != place.site}
    beside = [process for process in range(len(sites[place.site])) if process != place.process]
    near = {process: sites[place.site][process] for process in beside}
    near_owners = {process: owners[place.site][process] for process in beside}
    return _Fragment(
        boxes=tuple(index for index, held in enumerate(mine) if held.name in names),
        out=routes(mine, far_owners, names, out=True),
        into=routes(mine, far_owners, names, out=False),
        pass_on=routes(mine, near, names, out=True),
        take_on=routes(sites[place.site][place.process], near_owners, names, out=False),
    )


def _own(held: Held, views: Sequence[_View]) -> _Box:
    """A box that is owned: where its weights are, and an anchor that is what they are now."""
    whole = next(view for view in views if view.held.name == held.name and common(view.held.box, held.box) == held.box)
    weights = whole.weights[within(whole.held.box, held.box)]
    anchor = weights.detach().to("cpu", torch.float32, copy=True)
    return _Box(held, weights, anchor, torch.zeros_like(anchor))


def _sent(box: _Box) -> Difference:
    assert box.sent is not None, "what is sent and merged has been rounded"
    return box.sent


def _offset(held: Held) -> tuple[int, ...]:
    return tuple(start for start, _ in held.box)


def _holdings(said: Sequence[Any]) -> Holdings:
    return [Held(name, tuple((start, end) for start, end in box)) for name, box in said]
