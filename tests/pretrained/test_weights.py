"""A run begins with weights of any kind of file, under the names that the file has, and says what does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint as dcp

from checkpointing import open_store
from checkpointing.interchange import import_checkpoint
from elastic3d.errors import ModelError, StateError, StateUnfit, UsageError
from elastic3d.training import Run
from tests.parallel.architectures.families import FAMILIES, SIZES, gpt2, llama
from tests.parallel.architectures.weights_mains import adapted, saved
from tests.pretrained.beginning import Host, begin, values


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A llama that transformers has saved."""
    saved(llama, tmp_path / "llama")
    return tmp_path / "llama"


def state_of(build: Callable[[], nn.Module] = llama) -> dict[str, torch.Tensor]:
    torch.manual_seed(99)
    return {name: value.clone() for name, value in build().state_dict().items()}


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"wide_llama", "qwen3"}))
def test_a_folder_of_transformers_is_read_as_transformers_reads_it(family: str, tmp_path: Path) -> None:
    """Names that its files have otherwise, and experts that lie apart there, too; bf16 is widened."""
    build, blocks = FAMILIES[family]
    theirs = saved(build, tmp_path / "theirs", dtype=torch.bfloat16, max_shard_size="8KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").is_file()
    host, model = begin(build, tmp_path / "theirs", blocks=blocks)
    mine = values(model)
    assert mine.keys() == theirs.state_dict().keys()
    assert all(torch.equal(mine[name], value.float()) for name, value in theirs.state_dict().items())
    assert host.began[0].source == "none"
    assert "begins with the weights of" in host.began[0].detail


def test_a_tied_model_can_be_untied_for_stages(tmp_path: Path) -> None:
    """As the guide says: the files of most GPT-2 models lack the head, which is the embeddings once more."""
    tied: Any = saved(partial(gpt2, tie_word_embeddings=True), tmp_path / "tied")
    with pytest.raises(StateUnfit, match=r"lm_head\.weight"):
        begin(gpt2, tmp_path / "tied", blocks="transformer.h")
    head = tied.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    tied.config.tie_word_embeddings = False
    tied.save_pretrained(tmp_path / "untied")
    _, model = begin(gpt2, tmp_path / "untied", blocks="transformer.h")
    mine = values(model)
    assert torch.equal(mine["lm_head.weight"], tied.transformer.wte.weight)
    assert all(torch.equal(mine[name], value) for name, value in tied.state_dict().items())


def as_safetensors(state: dict[str, torch.Tensor], place: Path) -> Any:
    save_file(state, place / "my.safetensors")
    return place / "my.safetensors"


def as_bin(state: dict[str, torch.Tensor], place: Path) -> Any:
    (place / "hub").mkdir()
    torch.save(state, place / "hub" / "pytorch_model.bin")
    return place / "hub"


def as_bins(state: dict[str, torch.Tensor], place: Path) -> Any:
    names = list(state)
    parts = {"pytorch_model-1.bin": names[:9], "pytorch_model-2.bin": names[9:]}
    for file, some in parts.items():
        torch.save({name: state[name] for name in some}, place / file)
    where = {name: file for file, some in parts.items() for name in some}
    (place / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    return place


def as_nested(state: dict[str, torch.Tensor], place: Path) -> Any:
    torch.save({"model": state, "step": 7}, place / "last.pt")
    return str(place / "last.pt")


def as_transposed(state: dict[str, torch.Tensor], place: Path) -> Any:
    torch.save({name: value.t().contiguous().t() for name, value in state.items()}, place / "odd.pt")
    return place / "odd.pt"


def as_dcp(state: dict[str, torch.Tensor], place: Path) -> Any:
    dcp.save({"model": state}, checkpoint_id=place / "dcp", no_dist=True)
    return place / "dcp"


def as_store(state: dict[str, torch.Tensor], place: Path) -> Any:
    import_checkpoint("torch", as_nested(state, place), open_store(str(place / "store")), step=7)
    return f"{place / 'store'}@7"


def as_base_model(state: dict[str, torch.Tensor], place: Path) -> Any:
    plain = {name.removeprefix("model."): value for name, value in state.items()}
    return as_safetensors(plain, place)


@pytest.mark.parametrize(
    "write", [as_safetensors, as_bin, as_bins, as_nested, as_transposed, as_dcp, as_store, as_base_model]
)
def test_every_kind_of_file_gives_the_same_weights(
    write: Callable[[dict[str, torch.Tensor], Path], Any], tmp_path: Path
) -> None:
    """The run trains from them as from any others."""
    state = state_of()
    _, model = begin(llama, write(state, tmp_path), blocks="model.layers")
    assert all(torch.equal(value, state[name]) for name, value in values(model).items())


def test_a_base_model_takes_what_was_saved_with_a_head(folder: Path) -> None:
    """The head is unexpected, and is left out where the script says so."""

    def base() -> nn.Module:
        return llama().model  # type: ignore[no-any-return, union-attr]

    with pytest.raises(StateUnfit, match=r"1 there are not in the model: lm_head.weight"):
        begin(base, folder)
    _, model = begin(base, folder, weights_accept="lm_head.*")
    assert torch.equal(model.norm.weight, values(begin(llama, folder)[1])["model.norm.weight"])


def tied() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))


def test_tied_weights_are_read_once_whatever_name_they_have(tmp_path: Path) -> None:
    """Both names with equal values are fine; with others one would be lost."""
    state = state_of(tied)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        kept = {key: value.clone() for key, value in state.items() if key != name}
        _, model = begin(tied, as_safetensors(kept, tmp_path))
        assert torch.equal(model.lm_head.weight, state["lm_head.weight"])
        assert model.lm_head.weight is model.model.embed_tokens.weight
    both = {key: value.clone() for key, value in state.items()}
    begin(tied, as_safetensors(both, tmp_path))
    both["lm_head.weight"] += 1
    with pytest.raises(StateError, match=r"embed_tokens.weight and lm_head.weight are one tensor .* differ"):
        begin(tied, as_safetensors(both, tmp_path))


def test_what_does_not_fit_is_listed_in_one_error(tmp_path: Path) -> None:
    """Missing, unexpected, of another shape, and what would be rounded, before any rank joins."""
    state = state_of()
    del state["model.norm.weight"]
    state |= {
        "lm_head.weight": torch.zeros(3, 16),
        "score.weight": torch.zeros(2),
        "model.embed_tokens.weight": state["model.embed_tokens.weight"].double(),
    }
    file = as_safetensors(state, tmp_path)
    with pytest.raises(StateUnfit) as raised:
        Run(Host(measuring=True)).shard(llama, weights=file)
    said = str(raised.value)
    assert "1 are missing there: model.norm.weight" in said
    assert "1 there are not in the model: score.weight" in said
    assert "lm_head.weight (float32 [3, 16] there, float32 [29, 16] here)" in said
    assert "model.embed_tokens.weight (float64 [29, 16] there, float32 [29, 16] here)" in said
    assert "weights_accept=" in said


def test_what_is_accepted_as_missing_has_the_values_of_the_seed(tmp_path: Path) -> None:
    """A new head beside pretrained layers; its values do not depend on what else is read."""
    state = state_of()
    state["lm_head.weight"] = torch.zeros(3, 16)
    accepted: Any = {"weights_accept": ("lm_head.*",)}
    host, model = begin(llama, as_safetensors(state, tmp_path), **accepted)
    _, again = begin(llama, as_safetensors(state, tmp_path), blocks="model.layers", **accepted)
    assert "1 tensors that are not there by the seed, such as lm_head.weight" in host.began[0].detail
    assert torch.equal(model.lm_head.weight, again.lm_head.weight)
    assert 0 < float(model.lm_head.weight.detach().std()) < 0.1
    assert torch.equal(model.model.norm.weight, state["model.norm.weight"])


def test_nothing_in_common_is_refused_whatever_is_accepted(tmp_path: Path) -> None:
    """All of the model would be random."""
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    with pytest.raises(StateUnfit, match=r"none of the 1 tensors there has a name of the model's"):
        begin(llama, tmp_path / "a.safetensors", weights_accept="*")


def test_weights_may_be_below_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file, and as a store without a checkpoint's name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    state = state_of()
    as_safetensors(state, tmp_path)
    _, model = begin(llama, "~/my.safetensors")
    assert torch.equal(model.model.norm.weight, state["model.norm.weight"])
    open_store(f"{tmp_path}/store").put("refs/latest", b"")
    with pytest.raises(StateError, match=r"weights='~/store' cannot be used: .*refs/latest"):
        begin(llama, "~/store")
    with pytest.raises(StateError, match=r"weights='~nobody-here/llama': .*no such user"):
        begin(llama, "~nobody-here/llama")


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("nowhere", r"no such file or folder on this node.*hf download"),
        ("empty", r"holds no weights that are known"),
        ("text.safetensors", r"weights='.*text.safetensors' cannot be used"),
        ("notes.txt", r"neither a .safetensors file nor one of torch.save"),
        ("bad.bin", r"is no file of torch.save"),
        ("store@latest", r"weights='.*store@latest' cannot be used"),
    ],
)
def test_what_are_no_weights_are_refused_by_name(named: str, said: str, tmp_path: Path) -> None:
    """And nothing is unpickled."""
    (tmp_path / "empty").mkdir()
    for name in ("text.safetensors", "notes.txt", "bad.bin"):
        (tmp_path / name).write_text("no weights at all")
    with pytest.raises(StateError, match=said):
        begin(llama, str(tmp_path / named))


def test_code_in_a_file_of_torch_save_is_not_run(tmp_path: Path) -> None:
    """It is read as weights_only does it."""

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.write_text, (tmp_path / "ran", "yes"))

    torch.save({"model.norm.weight": Evil()}, tmp_path / "evil.bin")
    with pytest.raises(StateError, match=r"holds more than tensors and plain data"):
        begin(llama, tmp_path / "evil.bin")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("named", [123, b"folder", ""])
def test_what_names_no_weights_is_refused(named: Any) -> None:
    """With the argument's name."""
    with pytest.raises(UsageError, match=r"weights=.*: give a path, or URL@checkpoint"):
        Run(Host()).shard(llama, weights=named)


@pytest.mark.parametrize("accept", [5, None, ("lm_head.*", 5), b"lm_head.*"])
def test_what_are_no_patterns_is_refused(accept: Any) -> None:
    """With the argument's name, before anything is read."""
    with pytest.raises(UsageError, match=r"weights_accept=.*: give patterns of names"):
        Run(Host()).shard(llama, weights="nowhere", weights_accept=accept)


def test_weights_accept_needs_weights() -> None:
    """Else it would do nothing."""
    with pytest.raises(UsageError, match=r"weights_accept= .* give weights="):
        Run(Host()).shard(llama, weights_accept="lm_head.*")


def test_a_script_sees_the_weights_before_restore(folder: Path) -> None:
    """A copy that it makes of the model has them, and not what the seed would give."""
    seen: list[torch.Tensor] = []
    _, model = begin(llama, folder, before=lambda model: seen.append(model.model.norm.weight.detach().clone()))
    assert torch.equal(seen[0], values(model)["model.norm.weight"])
    assert not torch.equal(seen[0], torch.ones(16))


class Drawing(nn.Module):
    """Draws a number while it is built, so that it cannot be built without values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()
        self.noise = torch.randn(3)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.inner(tokens)


def test_a_model_that_is_built_whole_gets_them_too(folder: Path, tmp_path: Path) -> None:
    """What its own code draws stays."""
    state = {f"inner.{name}": value for name, value in state_of().items()}
    seen: list[torch.Tensor] = []
    file = as_safetensors(state, tmp_path)
    _, model = begin(Drawing, file, before=lambda model: seen.append(model.inner.model.norm.weight.detach().clone()))
    assert all(torch.equal(value, state[name]) for name, value in values(model).items())
    assert torch.equal(seen[0], state["inner.model.norm.weight"])


def test_a_model_too_large_to_be_built_whole_gets_them_too(folder: Path) -> None:
    """No module is initialised for nothing."""
    _, model = begin(llama, folder, whole_below=0)
    assert all(torch.equal(v, values(begin(llama, folder)[1])[name]) for name, v in values(model).items())


def test_a_store_with_imported_weights_and_others_named_is_refused(folder: Path, tmp_path: Path) -> None:
    """One of the two would be ignored."""
    import_checkpoint("safetensors", folder, open_store(str(tmp_path / "store")))
    with pytest.raises(StateError, match=r"holds weights that were imported.*leave weights= out"):
        begin(llama, folder, store=tmp_path / "store")


def test_adapters_begin_over_weights_of_the_plain_model(folder: Path) -> None:
    """Their own values are those of peft: one factor is zero, so that the model computes what it did."""

    def build() -> nn.Module:
        return adapted(llama, modules_to_save=["lm_head"])

    _, model = begin(build, folder, blocks="base_model.model.model.layers")
    mine, theirs = values(model), values(begin(llama, folder)[1])
    layer = "base_model.model.model.layers.1.self_attn.q_proj"
    assert torch.equal(mine[f"{layer}.base_layer.weight"], theirs["model.layers.1.self_attn.q_proj.weight"])
    assert torch.equal(mine[f"{layer}.lora_B.default.weight"], torch.zeros(16, 2))
    assert float(mine[f"{layer}.lora_A.default.weight"].std()) > 0
    head = "base_model.model.lm_head"
    assert torch.equal(mine[f"{head}.original_module.weight"], theirs["lm_head.weight"])
    assert torch.equal(mine[f"{head}.modules_to_save.default.weight"], theirs["lm_head.weight"])
    tokens = torch.arange(10).reshape(2, 5)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, begin(llama, folder)[1](tokens).logits)


@pytest.mark.parametrize("how", [{"use_dora": True}, {"init_lora_weights": "pissa"}], ids=str)
def test_adapters_whose_values_depend_on_the_weights_are_refused(how: dict[str, Any], folder: Path) -> None:
    """They would be computed from what is not there yet."""
    with pytest.raises(ModelError, match=r"adapter 'default' has .*computed from weights that are not there yet"):
        begin(lambda: adapted(llama, **how), folder)


def test_adapters_of_a_large_model_without_weights_are_refused() -> None:
    """A plain layer's initialiser would give them values under which the model computes something else."""
    with pytest.raises(ModelError, match=r"adapter of peft in a model too large.*weights="):
        begin(lambda: adapted(llama), None, whole_below=0)
