"""Model folders that engines load. All runs share a copy of a tied model, in which the head is untied."""

import fcntl
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from leeway.common import serving_model
from leeway.common.hf_folder import HEAD, UNTIED_MARK, ModelFolderError, check_model_folder, tensors_in, write_index
from leeway.common.serving_model import prepare_serving_model, serving_models
from tests.unit.small_models import tiny_checkpoint

WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Return the folder of a model cache that only this test uses."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "leeway" / "serving_models"


@pytest.fixture
def model(tmp_path) -> Path:
    """Return the folder of a model with a tied head."""
    tiny_checkpoint(tmp_path / "model", tied=True)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    return tmp_path / "model"


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_tied_checkpoint_is_served_untied_with_equal_logits(tmp_path: Path, model, cache):
    served = prepare_serving_model(model, tmp_path / "run")
    assert served.parent == cache == serving_models()
    assert not (tmp_path / "run").exists()
    assert not check_model_folder(served).tied
    assert json.loads((served / "config.json").read_text())[UNTIED_MARK] is True
    tied, untied = (LlamaForCausalLM.from_pretrained(folder).eval() for folder in (model, served))
    assert untied.lm_head.weight.data_ptr() != untied.model.embed_tokens.weight.data_ptr()
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(untied(tokens).logits, tied(tokens).logits)


def test_the_copied_head_equals_the_embedding_and_is_in_the_index(tmp_path: Path):
    model = tiny_checkpoint(tmp_path / "model", tied=True).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    served = prepare_serving_model(tmp_path / "model", tmp_path / "run")
    assert torch.equal(load_file(served / "lm_head.safetensors")[HEAD], model.model.embed_tokens.weight)
    index = json.loads((served / "model.safetensors.index.json").read_text())
    assert index["weight_map"][HEAD] == "lm_head.safetensors"
    assert "model.embed_tokens.weight" in index["weight_map"]


def test_an_untied_checkpoint_is_served_unchanged(tmp_path: Path, cache):
    tiny_checkpoint(tmp_path / "model", tied=False)
    assert prepare_serving_model(tmp_path / "model", tmp_path / "run") == tmp_path / "model"
    assert not cache.exists()
    assert not (tmp_path / "run").exists()


def test_all_runs_of_a_model_share_one_folder_that_stores_only_the_head(tmp_path: Path, model, monkeypatch):
    served = prepare_serving_model(model, tmp_path / "run")
    own = {path.name for path in served.iterdir() if not path.is_symlink()}
    assert own == {"config.json", "lm_head.safetensors", "model.safetensors.index.json"}
    assert (served / "tokenizer.json").resolve() == model / "tokenizer.json"
    made = served.stat().st_ino
    monkeypatch.setattr(serving_model._TiedModel, "copy_to", None)
    (tmp_path / "linked").symlink_to(model)
    assert prepare_serving_model(model, tmp_path / "other-run") == served
    assert prepare_serving_model(tmp_path / "linked", tmp_path / "third-run") == served
    assert served.stat().st_ino == made


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # an import of vLLM issues this warning
@pytest.mark.process  # vLLM starts a process to inspect the class of a new model
def test_engines_of_two_runs_look_up_one_compiled_model(tmp_path: Path, model, cache):
    from vllm.engine.arg_utils import AsyncEngineArgs

    def compile_hash(folder: Path) -> str:
        made = AsyncEngineArgs(model=str(folder), skip_tokenizer_init=True, dtype="float32").create_model_config()
        return made.compute_hash()

    first, again = (compile_hash(prepare_serving_model(model, tmp_path / run)) for run in ("one", "two"))
    assert first == again
    elsewhere = shutil.copytree(next(cache.glob("llama-*")), tmp_path / "in-the-folder-of-a-run")
    assert compile_hash(elsewhere) != first, "the hash no longer depends on the folder, so runs need not share a folder"


def other_embedding(model: Path) -> None:
    tensors = load_file(model / WEIGHTS)
    tensors["model.embed_tokens.weight"] *= 2
    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})


def other_config(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))


@pytest.mark.parametrize(
    "change", [other_embedding, other_config, lambda model: (model / "vocabulary.txt").touch()],
    ids=["embedding", "config", "files"],
)  # fmt: skip
def test_a_changed_model_gets_a_new_folder_and_the_old_folder_stays(tmp_path, model, change):
    served = prepare_serving_model(model, tmp_path / "run")
    head = (served / "lm_head.safetensors").read_bytes()
    change(model)
    now = prepare_serving_model(model, tmp_path / "run")
    assert now != served
    assert (served / "lm_head.safetensors").read_bytes() == head
    assert content(now).keys() - {"lm_head.safetensors", "model.safetensors.index.json"} == {
        name.replace(WEIGHTS, "model_body.safetensors") for name in content(model)
    }
    assert torch.equal(
        load_file(now / "lm_head.safetensors")[HEAD], load_file(model / WEIGHTS)["model.embed_tokens.weight"]
    )


def test_changes_of_weights_other_than_the_embedding_are_visible_through_links(tmp_path, model):
    served = prepare_serving_model(model, tmp_path / "run")
    tensors = load_file(model / WEIGHTS)
    tensors["model.norm.weight"] += 1
    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})
    assert prepare_serving_model(model, tmp_path / "run") == served
    norm = LlamaForCausalLM.from_pretrained(served).model.norm.weight
    assert torch.equal(norm, tensors["model.norm.weight"])


@pytest.mark.parametrize(
    "damage",
    [
        lambda served: (served / "lm_head.safetensors").unlink(),
        lambda served: (served / "config.json").unlink(),
        lambda served: (served / "config.json").write_text("{"),
        lambda served: (served / "model.safetensors.index.json").write_text("[]"),
        lambda served: (served / "model_body.safetensors").unlink(),
        lambda served: os.truncate(served / "lm_head.safetensors", 100),
        lambda served: (served / "lm_head.safetensors").write_bytes(
            (served / "lm_head.safetensors").read_bytes()[:-1] + b"x"
        ),
        shutil.rmtree,
    ],
)
def test_a_damaged_copy_is_replaced(tmp_path: Path, model, damage):
    served = prepare_serving_model(model, tmp_path / "run")
    whole, original = content(served), content(model)
    damage(served)
    assert prepare_serving_model(model, tmp_path / "run") == served
    assert content(served) == whole
    assert content(model) == original


def test_a_copy_that_fails_or_is_killed_leaves_no_partial_folder(tmp_path: Path, model, cache, monkeypatch):
    with monkeypatch.context() as failing:
        failing.setattr(serving_model, "write_config", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare_serving_model(model, tmp_path / "run")
    assert [path.name for path in cache.iterdir()] == ["making.lock"]
    killed = cache / ".llama-0123456789abcdef.unfinished"
    killed.mkdir()
    (killed / "lm_head.safetensors").write_bytes(b"half")
    served = prepare_serving_model(model, tmp_path / "run")
    assert {path.name for path in cache.iterdir()} == {"making.lock", served.name}


def test_concurrent_calls_make_one_copy(tmp_path: Path, model, cache, monkeypatch):
    made, copy_to = [], serving_model._TiedModel.copy_to

    def slowly(self, copy, may_copy):
        made.append(copy)
        copy_to(self, copy, may_copy)

    monkeypatch.setattr(serving_model._TiedModel, "copy_to", slowly)
    with ThreadPoolExecutor(6) as pool:
        served = set(pool.map(lambda n: prepare_serving_model(model, tmp_path / f"run-{n}"), range(6)))
    assert made == list(served)
    assert served == set(cache.glob("llama-*"))


def unwritable(cache: Path, monkeypatch) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file in place of the folder")


def held_by_another(cache: Path, monkeypatch) -> None:
    monkeypatch.setattr(serving_model, "MAKING_LIMIT_S", 0.1)
    cache.mkdir(parents=True)
    lock = os.open(cache / "making.lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)  # the lock is held until this process ends


def without_a_home(cache: Path, monkeypatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", lambda _: (_ for _ in ()).throw(RuntimeError("no home")))


def without_links(cache: Path, monkeypatch) -> None:
    def fail(link, *_, **__):
        raise PermissionError(1, "Operation not permitted", str(link))

    monkeypatch.setattr(Path, "symlink_to", fail)


@pytest.mark.parametrize("break_cache", [unwritable, held_by_another, without_a_home, without_links])
def test_a_run_logs_and_makes_its_own_copy_if_the_cache_is_unusable(
    tmp_path: Path, model, cache, monkeypatch, caplog, break_cache
):
    break_cache(cache, monkeypatch)
    (model / "folder").mkdir()
    (model / "folder" / "file").touch()
    served = prepare_serving_model(model, tmp_path / "run")
    assert served.parent == tmp_path / "run"
    assert "cannot cache an untied copy" in caplog.text
    assert "Set XDG_CACHE_HOME" in caplog.text
    assert prepare_serving_model(model, tmp_path / "run") == served
    assert not check_model_folder(served).tied
    assert (served / "folder" / "file").exists()
    assert not list(cache.glob("llama-*") if cache.is_dir() else ())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "contains no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
        (lambda folder: (folder / "config.json").write_text('{"eos_token_id": 1}'), "has no vocab_size"),
        (lambda folder: (folder / WEIGHTS).unlink(), r"no \*\.safetensors"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"x" * 40), "cannot read .* as safetensors"),
        (lambda folder: save_file({"w": torch.ones(1)}, folder / WEIGHTS), "expected one input embedding"),
    ],
)
def test_a_folder_that_cannot_be_served_is_refused_with_the_reason(tmp_path: Path, model, cache, spoil, message: str):
    (model / "generation_config.json").unlink()
    spoil(model)
    with pytest.raises(ModelFolderError, match=message):
        prepare_serving_model(model, tmp_path / "run")
    assert not cache.exists()


def add_head(folder: Path, scale: float) -> None:
    """Add a separate head to the checkpoint of a tied model."""
    tensors = load_file(folder / WEIGHTS)
    head = scale * tensors["model.embed_tokens.weight"]
    save_file({**tensors, HEAD: head}, folder / WEIGHTS, metadata={"format": "pt"})


def test_a_tied_checkpoint_with_a_different_head_is_refused(tmp_path: Path, model, cache):
    add_head(model, scale=2.0)
    with pytest.raises(ModelFolderError, match=r"ties the head.*lm_head.weight in .*model.safetensors differs from"):
        prepare_serving_model(model, tmp_path / "run")
    assert not cache.exists()


def test_a_tied_checkpoint_with_its_embedding_stored_as_head_is_served(tmp_path: Path, model):
    add_head(model, scale=1.0)
    served = prepare_serving_model(model, tmp_path / "run")
    untied = LlamaForCausalLM.from_pretrained(served).eval()
    assert torch.equal(untied.lm_head.weight, untied.model.embed_tokens.weight)
    assert not (served / "lm_head.safetensors").exists()


def test_weights_outside_the_index_are_neither_checked_nor_served(tmp_path: Path, model):
    write_index(model, [model / "model.safetensors"])
    save_file({"layers.0.attention.wq.weight": torch.ones(3)}, model / "consolidated.safetensors")
    names = set(tensors_in(model))
    assert "layers.0.attention.wq.weight" not in names
    served = prepare_serving_model(model, tmp_path / "run")
    assert not (served / "consolidated.safetensors").exists()
    assert set(tensors_in(served)) == names | {HEAD}
    assert prepare_serving_model(model, tmp_path / "run") == served


def test_a_copy_is_never_written_through_a_link_into_the_model(tmp_path: Path, model):
    save_file({"other.weight": torch.ones(3)}, model / "lm_head.safetensors")
    original = content(model)
    with pytest.raises(FileExistsError):
        prepare_serving_model(model, tmp_path / "run")
    assert content(model) == original
