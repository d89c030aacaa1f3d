"""Whether chunks are sound: what every plan of a batch is held against."""

from farpipe.core.errors import InputError


def check_chunks(chunks, lengths):
    """InputError unless the chunks have every token of every sequence exactly once, and no chunk two split ones."""
    reached = [0] * len(lengths)
    for index, chunk in enumerate(chunks):
        if any(not part.is_whole for part in chunk.slices[1:]):
            raise InputError(f"chunks[{index}]: only its first slice may be of a split sequence")
        for part in chunk.slices:
            if not 0 <= part.sequence < len(lengths) or part.sequence_length != lengths[part.sequence]:
                raise InputError(f"chunks[{index}]: there is no sequence {part.sequence} of {part.sequence_length}")
            if part.start != reached[part.sequence]:
                raise InputError(
                    f"chunks[{index}]: sequence {part.sequence} goes on at {reached[part.sequence]}, not {part.start}"
                )
            reached[part.sequence] = part.end
    short = [index for index, length in enumerate(lengths) if reached[index] != length]
    if short:
        raise InputError(f"chunks: sequence {short[0]} ends at {reached[short[0]]} of {lengths[short[0]]} tokens")
