"""The model's shape."""

import pytest

from farpipe.core.errors import InputError
from farpipe.core.spec import Model, RotaryScaling
from farpipe.core.strict import validate

SMALL = {"num_layers": 2, "hidden": 12, "num_heads": 4, "ffn_hidden": 20, "vocab_size": 300}


def test_parameters_are_counted_matrix_by_matrix():
    model = Model(**SMALL, num_kv_heads=2, head_dim=6)
    attention = 12 * 24 + 2 * 12 * 12 + 24 * 12
    mlp = 3 * 12 * 20
    assert model.num_layer_params == attention + mlp + 2 * 12
    assert model.num_embedding_params == 300 * 12
    assert model.num_head_params == 12 + 300 * 12
    assert model.num_params == 300 * 12 + 2 * model.num_layer_params + 12 + 300 * 12


def test_biases_layer_norm_learned_positions_and_tied_embeddings_are_counted():
    model = Model(
        **SMALL,
        head_dim=3,
        gated_mlp=False,
        bias=True,
        norm="layernorm",
        positions="learned",
        max_sequence_length=7,
        tied_embeddings=True,
    )
    attention = 4 * (12 * 12 + 12)
    mlp = 2 * 12 * 20 + 20 + 12
    assert model.num_layer_params == attention + mlp + 2 * 2 * 12
    assert model.num_params == (300 + 7) * 12 + 2 * model.num_layer_params + 2 * 12


def test_biases_of_query_key_and_value_alone_are_counted():
    plain, biased = (Model(**SMALL, num_kv_heads=2, head_dim=4, qkv_bias=bias) for bias in (False, True))
    assert biased.num_layer_params - plain.num_layer_params == 4 * 4 + 2 * 2 * 4


def test_a_scaling_has_the_bounds_of_its_kind():
    bounds = {kind: RotaryScaling(kind=kind, factor=4.0).high_frequency_factor for kind in ("llama3", "yarn")}
    assert bounds == {"llama3": 4.0, "yarn": 32.0}


def test_heads_share_the_width_and_have_keys_of_their_own_unless_told_otherwise():
    model = Model(**SMALL | {"num_heads": 3})
    assert (model.head_dim, model.num_kv_heads, model.attention_hidden, model.kv_hidden) == (4, 3, 12, 12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers: input should be greater than or equal to 1, found 0"),
        ({"num_layers": True}, "num_layers: input should be a valid integer, found True"),
        ({"hidden": 13}, "hidden: 13 is not a multiple of num_heads 4; or give head_dim"),
        ({"num_kv_heads": 3}, "num_kv_heads: 3 does not divide num_heads 4"),
        ({"num_heads": 12}, "head_dim: rotary positions turn pairs, so it must be even, found 1"),
        ({"positions": "learned"}, "max_sequence_length: learned positions need a table of this many rows"),
        ({"positions": "rotery"}, "positions: input should be 'rotary' or 'learned', found 'rotery'"),
        ({"head_dim": 4, "bias": True, "qkv_bias": True}, "qkv_bias: bias says so already; leave out one of them"),
        (
            {"head_dim": 4, "rotary_base": 1.0, "rotary_scaling": {"kind": "yarn", "factor": 2}},
            "rotary_base: yarn needs frequencies that fall, so it must be above 1, found 1.0",
        ),
        ({"rotary_scaling": {"kind": "linear", "factor": 2, "attention_factor": 1}}, "attention_factor: belongs to ya"),
        ({"sliding_window": 0}, "sliding_window: input should be greater than or equal to 1, found 0"),
        ({"sliding_window": 8, "window_attn_skip_freq": 1}, "window_attn_skip_freq: every how many-th layer has no wi"),
        ({"sliding_window": 8, "window_attn_skip_freq": [1, 2]}, "or a list with 1 or 0 for each layer, found [1, 2]"),
        ({"head_dim": 4, "sliding_window": 8, "window_attn_skip_freq": [1]}, "1 entries for num_layers 2"),
        ({"head_dim": 4, "window_attn_skip_freq": 2}, "says which layers have no window, but there is no sl"),
        ({"vocabsize": 3}, "vocabsize: unknown key; did you mean 'vocab_size'?"),
        ({"hidden": 10**4000}, "hidden: input should be less than or equal to"),
        ({"name": ""}, "name: string should have at least 1 character"),
    ],
)
def test_impossible_shapes_are_refused(change, message):
    with pytest.raises(InputError, match=r"^test: ") as error:
        validate(Model, SMALL | change, "test")
    assert message in str(error.value)
    assert len(str(error.value)) < 200


def test_a_head_that_does_not_divide_the_width_is_fine_when_asked_for():
    assert Model(**SMALL | {"hidden": 13}, head_dim=8).num_attention_params == 2 * 13 * (32 + 32)


@pytest.mark.parametrize(
    ("num_layers", "pattern", "share"),
    [(2, None, 1), (36, 2, 1 / 2), (26, 6, 22 / 26), (3, (0, 1, 1), 2 / 3), (2, 3, 1), (2, (0, 0), 0)],
)
def test_the_share_of_layers_with_a_window_is_that_of_megatron_s_pattern(num_layers, pattern, share):
    shape = SMALL | {"num_layers": num_layers, "head_dim": 4}
    assert Model(**shape).windowed_share == 0
    model = Model(**shape, sliding_window=8, window_attn_skip_freq=pattern)
    assert model.windowed_share == pytest.approx(share)
    assert [model.has_windows(length) for length in (7, 8, 9)] == [False, False, share > 0]
