"""One process's part in the exchanges of local steps: differences out, the outer step, the merged weights in.

The owner of a box (see `routes.owned`) rounds its difference once, sends to the owners at every other site what both
have, adds what comes in the order of the sites, takes the outer step, and passes the new anchor on to those of its own
site that have the box as well. Sending does not wait: what is sent after a step is received `delay_steps` steps later,
so nothing runs beside the training but the transport.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from farpipe.core.errors import RunError
from farpipe.core.spec import LocalSteps
from farpipe.engine.checkpoint.boxes import common, sizes_of, within
from farpipe.engine.checkpoint.files import Piece
from farpipe.engine.executor.peers import MessageRow, Peers
from farpipe.engine.outer.differences import Difference, difference, from_wire, num_wire_bytes
from farpipe.engine.outer.joined_sites import FragmentRoutes, JoinedSites, SitePlace, holdings_of, joined_sites
from farpipe.engine.outer.outer_optimizer import mean_of, merge, outer_update
from farpipe.engine.outer.rounds import Report, Round, Rounds
from farpipe.engine.outer.routes import Held, Route, owned
from farpipe.engine.transport import Tag

WEIGHT: Final = "weight/"
INSIDE: Final = 1 << 20
"""Number of an exchange's messages inside a site: below it are those of the replicas' collectives."""
STATE: Final = 1 << 21
"""Number of messages with whole anchors."""


class OuterMessage(NamedTuple):
    """A difference that has come from another site."""

    sent_after: int
    """Steps that were done when it was to be sent."""
    site: int
    """Place of the site in its world."""
    fragment: int
    row: MessageRow
    arrival_ns: int
    needed_ns: int
    """Stamps of this process's clock: it waited for what was needed before it came."""


@dataclass
class Exchanged:
    """Figures of one process's exchanges so far."""

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
    sent: dict[int, Difference] = field(default_factory=dict)
    """What is on its way to the other sites, by the number of the report."""


class _View(NamedTuple):
    """A box of the training's weights on this process."""

    held: Held
    weights: Tensor
    """[size per dimension]: live."""


class LocalExchange:
    """The exchanges of one process. Every process of every site calls `after` after each step.

    Between worlds a site trains on by itself; its anchor stays, so what it has learned counts in the next exchange.
    """

    def __init__(
        self,
        settings: LocalSteps,
        pieces: Sequence[Piece],
        inner: Peers,
        num_tokens: float = 1.0,
        changed: Callable[[], None] = lambda: None,
        limit_s: float = 60.0,
    ) -> None:
        """`pieces`: of the training's state; weights are read and written in place, then `changed` is called.

        `inner`: the processes of this site. `num_tokens`: of a step at this site, by which its difference counts.
        """
        self._settings, self._inner, self._changed, self._num_tokens = settings, inner, changed, num_tokens
        weights = {p.name.removeprefix(WEIGHT): p for p in pieces if p.name.startswith(WEIGHT)}
        self._views = [_View(Held(name, box), view) for name, p in weights.items() for box, view in p.parts()]
        self._shapes = {name: tuple(piece.shape) for name, piece in weights.items()}
        mine = json.dumps([view.held for view in self._views]).encode()
        said = inner.exchange("local steps", mine, waiting_for="the ranks of this site")
        owners = owned([holdings_of(json.loads(text)) for text in said])
        self._boxes = [_own(held, self._views) for held in owners[inner.rank]]
        self.exchanged, self._version = Exchanged(), torch.zeros(1)
        self._world: JoinedSites | None = None
        self._num_joined = self._num_agreed = 0
        self.limit_s = limit_s
        """Longest wait for a quorum."""
        self.problem = ""
        """Reason why the last world was left."""

    @property
    def num_merges(self) -> int:
        """Merges that are in the anchor, those before a restart included."""
        return int(self._version)

    @property
    def is_joined(self) -> bool:
        """True if differences are exchanged."""
        return self._world is not None

    def take_messages(self) -> list[OuterMessage]:
        """What has come from other sites since the last call."""
        messages, self.exchanged.messages = self.exchanged.messages, []
        return messages

    def join(self, outer: Peers, site: int, step: int = 0, *, waiting: bool = False) -> int:
        """Enter a world: `outer` has the processes of all its sites, site after site, this one's being number `site`.

        The site with most merges gives its anchor to those with fewer. Waits for all; the step with which this site
        goes on: `step`, but where it is `waiting` that of the furthest. InputError where the sites don't train one
        model, RunError where one is lost.
        """
        mine = {"site": site, "held": [view.held for view in self._views], "shapes": self._shapes, "step": step}
        mine |= {"tokens": self._num_tokens, "merges": self.num_merges}
        texts = outer.exchange("local steps", json.dumps(mine).encode(), waiting_for="the other sites")
        said = [json.loads(text) for text in texts]
        world = joined_sites(self._settings, SitePlace(site, self._inner.rank), outer, said)
        if self._settings.quorum is not None and self._inner.rank == 0:
            firsts = [world.site_of.index(number) for number in range(len(world.tokens))]
            world.rounds = Rounds(outer, firsts, self._settings)
        merges = [one["merges"] for one in said]
        if min(merges) < max(merges):
            self._catch_up(world, merges, said[outer.rank]["merges"] < max(merges))
        self._version.fill_(max(merges))
        self._num_joined += 1
        self._world, self.problem = world, ""
        world.begin = max(one["step"] for one in said) if waiting else step
        return world.begin

    def _catch_up(self, world: JoinedSites, merges: Sequence[int], takes: bool) -> None:
        """The first site with most merges gives its anchor and momentum to those with fewer."""
        giver = world.site_of[merges.index(max(merges))]
        for number, of in enumerate(world.fragments):
            tag = Tag(number, STATE, 0)
            for route in of.out if world.site == giver else ():
                if merges[route.process] < max(merges):
                    self._give(world.outer, route, tag)
            for route in of.into if takes else ():
                if world.site_of[route.process] == giver:
                    self._take(world.outer, route, tag)
        if takes:
            self._take_anchor(world)

    def _give(self, outer: Peers, route: Route, tag: Tag) -> None:
        parts = [(self._boxes[part.number], part.box) for part in route.parts]
        both = [kind[within(o.held.box, box)].reshape(-1) for o, box in parts for kind in (o.anchor, o.momentum)]
        outer.send(route.process, "sync", tag, torch.cat(both))

    def _take(self, outer: Peers, route: Route, tag: Tag) -> None:
        message = outer.receive(route.process, "sync", tag, waiting_for="the anchor of the sites that are ahead")
        sizes = [prod(sizes_of(part.box)) for part in route.parts for _ in range(2)]
        values = iter(torch.split(message.tensor, sizes))
        for part in route.parts:
            box = self._boxes[part.number]
            place = within(box.held.box, part.box)
            for kind in (box.anchor, box.momentum):
                kind[place] = next(values).view(kind[place].shape)

    def leave(self, problem: str) -> None:
        """Go on alone: what is under way comes to nothing."""
        self._world, self.problem = None, problem
        for box in self._boxes:
            box.sent = {}

    def after(self, num_steps: int) -> None:
        """Begin and merge what is due after so many steps; waits only for what is to be merged."""
        if self._world is None or not self._world.has_quorum:
            return
        if self._world.rounds is not None:
            with suppress(RunError):  # it is met again where rounds are waited for
                self._world.rounds.look()
        for fragment in self._settings.sent_after(num_steps):
            self._send(self._world, fragment, num_steps)
        due = [fragment for fragment in self._settings.merged_after(num_steps) if fragment in self._world.under_way]
        self._merge_all(due, num_steps)

    def finish(self, num_steps: int) -> None:
        """After the last step: merge all, so that every site ends with the anchor as its weights."""
        if (world := self._world) is None or not world.has_quorum:
            return
        late = sorted(world.under_way, key=lambda fragment: world.under_way[fragment][0])
        self._merge_all(late, num_steps)
        if self._world is not None:
            others = [number for number in range(len(world.fragments)) if world.sent_after.get(number) != num_steps]
            for fragment in others:
                self._send(world, fragment, num_steps)
            self._merge_all(others, num_steps)
        if self._settings.quorum is not None:
            self._await_last_rounds(world, num_steps)
        if self._world is not None:
            self._take_anchor(world)
            self._changed()

    def _await_last_rounds(self, world: JoinedSites, num_steps: int) -> None:
        """Merge what the sites that have not done their steps yet still send."""
        if world.rounds is not None and self._world is not None:
            with suppress(RunError):
                world.rounds.finished(world.site)
        is_over = False
        while self._world is not None and not is_over:
            is_over = self._merge_rounds(world, None, num_steps)

    def _merge_all(self, fragments: Sequence[int], num_steps: int) -> None:
        for fragment in fragments:
            if self._world is not None:
                self._merge(self._world, fragment, num_steps)
        if fragments:
            self._changed()

    @torch.no_grad()
    def _send(self, world: JoinedSites, fragment: int, num_steps: int) -> None:
        of = world.fragments[fragment]
        number, since = world.num_sent, world.sent_after.get(fragment, world.begin)
        for box in (self._boxes[index] for index in of.boxes):
            delta = box.anchor - box.weights.to("cpu", torch.float32)
            box.sent[number] = difference(delta, box.held.box, self._settings.wire_type)
        world.sent_after[fragment] = num_steps
        world.under_way[fragment] = number, num_steps
        world.num_sent += 1
        with suppress(RunError):  # it is met again where the differences are received
            for route in of.out:
                parts = [self._boxes[part.number].sent[number].part(part.box) for part in route.parts]
                message = torch.cat([part.wire() for part in parts])
                world.outer.send(route.process, "sync", Tag(number, fragment, 0), message)
                self.exchanged.sent_bytes += message.nbytes
            if world.rounds is not None:
                tokens = self._num_tokens * max(1, num_steps - since)
                world.rounds.sent(fragment, Report(world.site, number, tokens))

    @torch.no_grad()
    def _merge(self, world: JoinedSites, fragment: int, num_steps: int) -> None:
        """Take the outer step of a fragment, or leave the world: where one rank of the site can't, none does."""
        number, _ = world.under_way.pop(fragment)
        if self._settings.quorum is not None:
            self._merge_rounds(world, fragment, num_steps)
            return
        reports = tuple(Report(site, number, tokens) for site, tokens in enumerate(world.tokens))
        self._take_rounds(world, [Round(fragment, reports)], num_steps)

    def _merge_rounds(self, world: JoinedSites, fragment: int | None, num_steps: int) -> bool:
        """Merge what has been decided, of one fragment or of all, after waiting for it; True if no more will come."""
        said: dict[str, Any] = {"rounds": [], "over": True, "problem": ""}
        if world.rounds is not None:
            begin_ns = world.outer.clock.now_ns()
            try:
                said["rounds"], said["over"] = world.rounds.await_round(fragment, self.limit_s)
            except RunError as error:
                said["problem"] = str(error) or "it broke"
            self.exchanged.waited_ns += world.outer.clock.now_ns() - begin_ns
        of_first = json.loads(self._agree(json.dumps(said).encode())[0])
        if of_first["problem"]:
            self.leave(of_first["problem"])
            return True
        rounds = [Round(one, tuple(Report(*report) for report in reports)) for one, reports in of_first["rounds"]]
        self._take_rounds(world, rounds, num_steps)
        return bool(of_first["over"])

    def _agree(self, payload: bytes) -> list[bytes]:
        """What all ranks of the site say."""
        self._num_agreed += 1
        return self._inner.exchange(f"local steps {self._num_agreed}", payload, waiting_for="the ranks of this site")

    @torch.no_grad()
    def _take_rounds(self, world: JoinedSites, rounds: Sequence[Round], num_steps: int) -> None:
        found, problem = [], ""
        try:
            found = [self._differences(world, one) for one in rounds]
        except RunError as error:
            problem = str(error) or "it broke"
        problems = self._agree(problem.encode())
        if any(problems):
            self.leave(max(problems).decode())
            return
        for one, differences in zip(rounds, found, strict=True):
            tokens = [report.tokens for report in one.reports]
            for index, by_report in differences.items():
                box = self._boxes[index]
                outer_update(box.anchor, box.momentum, mean_of(by_report, tokens), self._settings)
        for fragment in dict.fromkeys(one.fragment for one in rounds):
            of = world.fragments[fragment]
            for box in (self._boxes[index] for index in of.boxes):
                merge(box.weights, box.anchor.to(box.weights), self._settings)
            self._pass_on(of, Tag(num_steps, fragment, INSIDE + world.num_merged), self._settings)
            world.num_merged += 1
        self._version += len(rounds)

    def _differences(self, world: JoinedSites, one: Round) -> dict[int, list[Tensor]]:
        """The differences of a round's reports, by the number of the box; RunError where one does not come."""
        of, found = world.fragments[one.fragment], {}
        for index in of.boxes:
            box = self._boxes[index]
            own = [box.sent.pop(report.number).values for report in one.reports if report.site == world.site]
            room = [torch.empty(sizes_of(box.held.box)) for _ in range(len(one.reports) - len(own))]
            found[index] = [(own if report.site == world.site else room).pop(0) for report in one.reports]
        for place, report in enumerate(one.reports):
            for route in of.into:
                if world.site_of[route.process] == report.site:
                    room_of = {part.number: found[part.number][place] for part in route.parts}
                    self._receive(world, route, (report.number, one.fragment), room_of)
        return found

    def _receive(self, world: JoinedSites, route: Route, sent: tuple[int, int], room: Mapping[int, Tensor]) -> None:
        """Put the differences of one process of another site in their places."""
        number, fragment = sent
        sent_after = world.sent_after.get(fragment, world.begin)
        waiting_for = f"the difference of fragment {fragment} after step {sent_after}"
        begin_ns = world.outer.clock.now_ns()
        message = world.outer.receive(route.process, "sync", Tag(number, fragment, 0), waiting_for=waiting_for)
        self.exchanged.waited_ns += world.outer.clock.now_ns() - begin_ns
        came = OuterMessage(
            sent_after, world.site_of[route.process], fragment, message.row, message.times.arrival_ns, begin_ns
        )
        self.exchanged.messages.append(came)
        wire_type = self._settings.wire_type
        lengths = [num_wire_bytes(part.box, wire_type) for part in route.parts]
        for part, data in zip(route.parts, torch.split(message.tensor, lengths), strict=True):
            place = within(self._boxes[part.number].held.box, part.box)
            room[part.number][place] = from_wire(data, part.box, wire_type).values

    @torch.no_grad()
    def _take_anchor(self, world: JoinedSites) -> None:
        """The weights are the anchor's."""
        settings = self._settings.model_copy(update={"keep_local": 0.0})
        for box in self._boxes:
            merge(box.weights, box.anchor.to(box.weights), settings)
        for number, of in enumerate(world.fragments):
            self._pass_on(of, Tag(self._num_joined, number, STATE), settings)

    def _pass_on(self, of: FragmentRoutes, tag: Tag, settings: LocalSteps) -> None:
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
                merge(weights, values.view(weights.shape).to(weights), settings)

    def state(self) -> list[Piece]:
        """Live views of what this process's outer optimizer keeps, for checkpoints."""
        return [
            Piece("merges/count", (1,), 0, self._version, is_mine=self._inner.rank == 0),
            *self._outer_pieces(),
        ]

    def _outer_pieces(self) -> list[Piece]:
        return [
            Piece(f"{kind}/{box.held.name}", self._shapes[box.held.name], 0, values, offset=_offset(box.held))
            for box in self._boxes
            for kind, values in (("anchor", box.anchor), ("outer_momentum", box.momentum))
        ]


def _own(held: Held, views: Sequence[_View]) -> _Box:
    """A box that is owned: where its weights are, and an anchor that is what they are now."""
    whole = next(view for view in views if view.held.name == held.name and common(view.held.box, held.box) == held.box)
    weights = whole.weights[within(whole.held.box, held.box)]
    anchor = weights.detach().to("cpu", torch.float32, copy=True)
    return _Box(held, weights, anchor, torch.zeros_like(anchor))


def _offset(held: Held) -> tuple[int, ...]:
    return tuple(start for start, _ in held.box)
