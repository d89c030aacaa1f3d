"""Bytes of published weights beside sending all of them, over a fine-tuning with bf16 weights. Prints JSON.

    python -m benchmarks.engine.weights_out [--steps 1000]

A decoder of 0.2 M parameters learns the standard library's source for 300 steps. Then it is fine-tuned on farpipe's
docs, from weights rounded to bf16 as released ones are, once for each of RATES: AdamW on float32 masters, constant rate
after 10 steps of warm-up, whose copies in bf16 compute and are published. A row for each rate and for each number of
steps between two versions: the share of weights whose bits change from one version to the next, and by how many times
the coded bytes are fewer than all of them. `codings`: the same for other ways to code what changes in one step, means
over every 50th: XOR and zlib (level 1), its bytes by plane and zlib, a bit for each weight and the new values, four
bytes for each place and the new values.
"""

import argparse
import json
import sysconfig
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from farpipe.core.spec import Model
from farpipe.engine.publish.coding import Numbers, blocks
from farpipe.engine.publish.version import as_bits
from farpipe.engine.stages.decoder import Decoder, initialise
from farpipe.engine.stages.slices import StageSlice

MODEL: Final = Model(num_layers=4, hidden=64, num_heads=4, ffn_hidden=176, vocab_size=256)
LENGTH, SEQUENCES = 64, 2
FIRST_STEPS, FIRST_RATE = 300, 1e-3
RATES: Final = (1e-6, 1e-5, 1e-4, 1e-3)
EVERY: Final = (1, 10, 100)
"""Steps between two versions."""
WARMUP: Final = 10
SAMPLED: Final = 50
"""Steps between two that the other codings are tried on."""


def xor(new: Numbers, old: Numbers) -> bytes:
    """XOR, then zlib."""
    return zlib.compress((new ^ old).tobytes(), 1)


def xor_planes(new: Numbers, old: Numbers) -> bytes:
    """XOR with all low bytes before all high ones, then zlib."""
    return zlib.compress((new ^ old).view(np.uint8).reshape(-1, 2).T.tobytes(), 1)


def bits_and_values(new: Numbers, old: Numbers) -> bytes:
    """A bit for each weight, and the new values."""
    return b"".join([np.packbits(new != old).tobytes(), new[new != old].tobytes()])


def places_and_values(new: Numbers, old: Numbers) -> bytes:
    """Four bytes for each place, and the new values."""
    return b"".join([np.flatnonzero(new != old).astype(np.uint32).tobytes(), new[new != old].tobytes()])


def gaps_and_differences(new: Numbers, old: Numbers) -> bytes:
    """What farpipe does."""
    return b"".join(blocks(new, old))


CODINGS: Final[tuple[Callable[[Numbers, Numbers], bytes], ...]] = (
    gaps_and_differences,
    xor,
    xor_planes,
    bits_and_values,
    places_and_values,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    num_steps = parser.parse_args().steps
    torch.set_num_threads(1)
    first = new_model()
    for _ in train(first, text_of(Path(sysconfig.get_paths()["stdlib"]), "*.py"), FIRST_STEPS, FIRST_RATE):
        pass
    docs = text_of(Path(__file__).parent.parent.parent / "docs", "**/*.md")
    rows, codings = [], []
    for rate in RATES:
        found, others = fine_tuned(first, docs, num_steps, rate)
        rows += found
        codings.append({"learning rate": rate} | others)
    print(json.dumps({"rows": rows, "codings": codings}))


def new_model() -> Decoder:
    module = Decoder(MODEL, StageSlice(0, MODEL.num_layers, True, True), LENGTH)
    with torch.no_grad():
        initialise(module, 0)
    return module


def text_of(folder: Path, pattern: str) -> Tensor:
    """Bytes of a folder's files, [num_bytes]."""
    data = b"".join(path.read_bytes() for path in sorted(folder.glob(pattern)))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def train(module: Decoder, text: Tensor, num_steps: int, rate: float) -> Iterator[tuple[Numbers, float]]:
    """Yield the bits of all weights in bf16, and the loss, after every step; `module` computes with them in float32."""
    parameters = [*module.parameters()]
    masters = [parameter.detach().bfloat16().float().requires_grad_() for parameter in parameters]
    adamw = torch.optim.AdamW(masters, lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    for step in range(num_steps):
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master.bfloat16())
        starts = torch.randint(len(text) - LENGTH - 1, (SEQUENCES,), generator=generator)
        batch = torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()])
        loss = functional.cross_entropy(module(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        module.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for parameter, master in zip(parameters, masters, strict=True):
            master.grad = parameter.grad
        adamw.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / WARMUP)
        adamw.step()
        flat = torch.cat([master.detach().bfloat16().view(-1) for master in masters])
        yield as_bits(flat, "bfloat16"), float(loss.detach())


def fine_tuned(
    first: Decoder, text: Tensor, num_steps: int, rate: float
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Rows of one rate, one for each number of steps between versions; and by how many times each coding is smaller."""
    module = new_model()
    module.load_state_dict(first.state_dict())
    begin = as_bits(torch.cat([p.detach().bfloat16().view(-1) for p in module.parameters()]), "bfloat16")
    newest, coded, changed = dict.fromkeys(EVERY, begin), defaultdict(list), defaultdict(list)
    others, losses, before = defaultdict[str, list[int]](list), [], begin
    for step, (bits, loss) in enumerate(train(module, text, num_steps, rate), 1):
        losses.append(loss)
        for every in EVERY:
            if step % every == 0:
                coded[every].append(len(gaps_and_differences(bits, newest[every])))
                changed[every].append(float((bits != newest[every]).mean()))
                newest[every] = bits
        for coding in CODINGS if step % SAMPLED == 0 else ():
            others[coding.__name__].append(len(coding(bits, before)))
        before = bits
    rows = [
        {
            "learning rate": rate,
            "steps between versions": every,
            "weights that change, %": round(100 * float(np.mean(changed[every])), 2),
            "the most, %": round(100 * max(changed[every]), 2),
            "times fewer bytes": round(begin.nbytes / float(np.mean(coded[every])), 1),
            "loss, first and last 50 steps": [round(float(np.mean(part)), 2) for part in (losses[:50], losses[-50:])],
        }
        for every in EVERY
        if coded[every]
    ]
    return rows, {name: round(begin.nbytes / float(np.mean(sizes)), 1) for name, sizes in others.items()}


if __name__ == "__main__":
    main()
