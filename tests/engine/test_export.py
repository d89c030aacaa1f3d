import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from farpipe import __version__
from farpipe.core.errors import InputError
from farpipe.engine.checkpoint.export import CheckpointWeights, export_to_hugging_face
from farpipe.engine.checkpoint.files import Checkpoint
from farpipe.engine.checkpoint.folders import folder_of
from farpipe.engine.checkpoint.manifest import Manifest, Trained
from farpipe.engine.stages.decoder_weights import their_name
from small_models import GPT, LLAMA, SEED, SEQUENCE_LENGTH, TIED, whole_model
from snapshots import write_tensors
from trainings import make_run


def write_checkpoint(run_dir, model, *, step=4, shift=0.0):
    """A run directory with a checkpoint of the whole model from two ranks, one tensor of it in two pieces."""
    weights = {f"weight/{name}": p.detach() + shift for name, p in whole_model(model, torch.float32).named_parameters()}
    split = weights.pop("weight/layers.3.mlp.up.weight").view(-1)
    weights |= {f"exp_avg/{name.partition('/')[2]}": torch.zeros(2) for name in weights}
    names = sorted(weights)
    halves = [{name: weights[name] for name in names[rank::2]} for rank in range(2)]
    halves[0]["weight/layers.3.mlp.up.weight@0"] = split[:100].clone()
    halves[1]["weight/layers.3.mlp.up.weight@100"] = split[100:].clone()
    folder = folder_of(run_dir / "checkpoints", step)
    files = tuple(write_tensors(folder, rank, "here", half) for rank, half in enumerate(halves))
    trained = Trained(model=model, sequence_length=SEQUENCE_LENGTH, global_batch=8, seed=SEED)
    Manifest(step=step, farpipe=__version__, trained=trained, batches_sha256="", files=files).save(folder)
    return folder


@pytest.mark.parametrize("model", [LLAMA, TIED], ids=["untied", "tied"])
def test_a_checkpoint_becomes_a_model_of_hugging_face_and_back(model, tmp_path):
    write_checkpoint(tmp_path / "run", model, step=2, shift=1.0)
    write_checkpoint(tmp_path / "run", model, step=10)
    assert export_to_hugging_face(tmp_path / "run", tmp_path / "out") == 10, "the newest one"
    whole = whole_model(model, torch.float32)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name, parameter in whole.named_parameters():
        assert torch.equal(tensors[their_name(name, model)], parameter), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = torch.arange(SEQUENCE_LENGTH).view(1, -1)
    torch.testing.assert_close(loaded(tokens).logits, whole(tokens), rtol=0, atol=1e-6)


def test_a_model_of_bytes_gets_a_tokenizer_of_bytes(text_file, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    run = make_run(text_file, num_steps=1)
    write_checkpoint(tmp_path / "run", run.plan.model)
    run.save(tmp_path / "run" / "run.json")
    export_to_hugging_face(tmp_path / "run", tmp_path / "out")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    text = "".join(chr(number) for number in range(1, 128)) + "grüezi \u4f60\u597d\n  two"
    assert tokenizer.encode(text).ids == [*text.encode()]
    assert tokenizer.decode([*text.encode()]) == text
    (tmp_path / "run" / "run.json").unlink()
    export_to_hugging_face(tmp_path / "run", tmp_path / "unknown")
    assert not (tmp_path / "unknown" / "tokenizer.json").exists(), "nobody says that tokens are bytes"


def test_a_checkpoint_may_be_named_itself_and_is_read_one_tensor_at_a_time(tmp_path):
    folder = write_checkpoint(tmp_path / "run", LLAMA)
    assert export_to_hugging_face(folder, tmp_path / "out", dtype="bfloat16") == 4
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    weights = CheckpointWeights(Checkpoint(folder, Manifest.load(folder)))
    assert len(weights) == len([*weights]) == len([*whole_model(LLAMA, torch.float32).parameters()])
    assert weights["norm.gain"].shape == (LLAMA.hidden,)


def test_what_can_not_be_exported_is_told(tmp_path):
    with pytest.raises(InputError, match="neither a run with a whole checkpoint"):
        export_to_hugging_face(tmp_path, tmp_path / "out")
    write_checkpoint(tmp_path / "gpt", GPT)
    with pytest.raises(InputError, match=r"can't be exported|no counterpart|no parameter"):
        export_to_hugging_face(tmp_path / "gpt", tmp_path / "out")
    folder = write_checkpoint(tmp_path / "run", LLAMA)
    (folder / "rank-1.safetensors").unlink()
    with pytest.raises(InputError, match=r"copy from the other sites: rank-1\.safetensors \(written at here\)"):
        export_to_hugging_face(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()
