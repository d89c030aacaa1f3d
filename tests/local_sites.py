"""Weights of a small model at several sites, and steps that move every element."""

import time

import torch

from farpipe.engine.checkpoint.files import Piece

SHAPES = {"embed": (10, 66), "layer 0": (5, 130), "gain": (66,), "layer 1": (8, 66), "head": (10, 66)}
WHOLE = ((0, 1),)
"""A layout: for every process, the part that it has of each parameter's flattened elements, as [first, end) shares."""
THIRDS = ((0, 1 / 3), (1 / 3, 2 / 3), (2 / 3, 1))


def generator(*key):
    return torch.Generator().manual_seed(hash(key) % (1 << 30))


def first_weights(name):
    return torch.randn(SHAPES[name], generator=generator(1, [*SHAPES].index(name)))


def trained(weights, name, site, step):
    """Weights after a step of a site's own, which moves every element."""
    return weights + 0.01 * torch.randn(SHAPES[name], generator=generator(2, [*SHAPES].index(name), site, step))


def pieces_of(process, layout):
    first, end = layout[process]
    found = []
    for name, shape in SHAPES.items():
        size = torch.Size(shape).numel()
        values = first_weights(name).view(-1)[round(first * size) : round(end * size)].clone()
        found.append(Piece(f"weight/{name}", shape, round(first * size), values))
    return found


def train(pieces, site, steps, exchange, pause_s=0.0):
    """Steps of a site's own, with its exchanges."""
    for step in steps:
        time.sleep(pause_s)
        for piece in pieces:
            name = piece.name.removeprefix("weight/")
            whole = torch.zeros(SHAPES[name])
            whole.view(-1)[piece.start : piece.start + piece.values.numel()] = piece.values
            moved = trained(whole, name, site, step).view(-1)
            piece.values.copy_(moved[piece.start : piece.start + piece.values.numel()])
        exchange.after(step + 1)
