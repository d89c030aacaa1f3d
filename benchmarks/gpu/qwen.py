"""A model of transformers with random weights: what processes divide between them."""

from pathlib import Path


def qwen(folder: Path, figures: dict[str, int]) -> Path:
    """A qwen3 of these figures in `folder`, which is made."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        num_hidden_layers=figures["num_layers"],
        hidden_size=figures["hidden"],
        num_attention_heads=figures["num_heads"],
        num_key_value_heads=figures["num_kv_heads"],
        head_dim=figures["hidden"] // figures["num_heads"],
        intermediate_size=figures["ffn_hidden"],
        vocab_size=figures["vocab_size"],
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder
