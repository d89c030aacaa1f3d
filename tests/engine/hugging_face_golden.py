"""Small configs of Hugging Face's, weights that follow from their names, and what transformers says of them.

As a script, with transformers installed, it writes ``golden/hugging_face.json`` anew; tests need no transformers.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch

GOLDEN = Path(__file__).parent / "golden" / "hugging_face.json"
TOKENS = [[3, 17, 42, 8, 63, 0, 11, 29, 5, 31, 2, 54], [60, 1, 1, 7, 33, 48, 20, 9, 14, 50, 27, 6]]
SMALL = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
QWEN2 = SMALL | {"model_type": "qwen2", "rope_theta": 1000000.0, "rms_norm_eps": 1e-6}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
CONFIGS = {
    "llama 2": SMALL | {"num_key_value_heads": 4, "rope_theta": 10000.0},
    "llama 3, grouped": SMALL | {"rope_theta": 500000.0},
    "llama 3.2, stretched, tied": SMALL
    | {"rope_theta": 500.0, "tie_word_embeddings": True}
    | {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 16}},
    "linear, biases, wide heads": SMALL
    | {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "rms_norm_eps": 1e-3}
    | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 1000.0},
    "mistral": SMALL | {"model_type": "mistral", "sliding_window": None, "rope_theta": 10000.0},
    "qwen 2": QWEN2 | {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 1},
    "qwen 2.5, stretched, tied": QWEN2 | {"rope_theta": 50.0, "tie_word_embeddings": True, "rope_scaling": YARN},
    "llama, stretched otherwise": SMALL
    | {"rope_theta": 100.0}
    | {"rope_scaling": YARN | {"beta_fast": 2.0, "beta_slow": 0.2, "attention_factor": 1.5}},
}


def weight(name, shape):
    """Numbers that follow from the name; large enough for every part to matter in the logits."""
    digest = hashlib.sha256(name.encode()).digest()
    numbers = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16]))).standard_normal(shape)
    shift, scale = (1.0, 0.2) if len(shape) == 1 and "norm" in name else (0.0, 0.25)
    return torch.from_numpy((shift + scale * numbers).astype(np.float32))


def main():
    import transformers

    found = {}
    for name, config in CONFIGS.items():
        family = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2"}[config["model_type"]]
        kind, whole = (getattr(transformers, family + part) for part in ("Config", "ForCausalLM"))
        torch.manual_seed(0)
        model = whole(kind(**{k: v for k, v in config.items() if k != "model_type"})).eval()
        with torch.no_grad():
            for key, tensor in model.state_dict().items():
                if not (config["tie_word_embeddings"] and key == "lm_head.weight"):
                    tensor.copy_(weight(key, tuple(tensor.shape)))
            logits = model(torch.tensor(TOKENS)).logits
        assert model.config.rms_norm_eps == config["rms_norm_eps"]
        kept = [[round(number, 6) for number in row] for row in logits[:, -2:].flatten(0, 1).tolist()]
        found[name] = {
            "names": sorted(model.state_dict()),
            "last_logits": kept,
            "mean_square": float(logits.square().mean()),
        }
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps({"transformers": transformers.__version__, "models": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
