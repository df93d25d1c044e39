from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn

from elastic3d.errors import LayoutError, ModelError, UsageError
from elastic3d.parallel.initial import outline
from elastic3d.parallel.norms import places
from elastic3d.parallel.tensor.cutting import boundary
from elastic3d.parallel.tensor.foreign import own_plan
from elastic3d.parallel.tensor.proof import prove
from elastic3d.parallel.tensor.styles import Style, scheme_of
from elastic3d.parallel.tensor.taking import take
from tests.parallel.tensors import LENGTH, SEQUENCE, WHOLE, Block, Decoder


def test_a_tensor_plan_gives_dims_and_divisors() -> None:
    """From the outline of a model: dims of parameters, and what tp must divide."""
    scheme = scheme_of(outline(Decoder), SEQUENCE)
    assert scheme.dims["blocks.1.q.weight"] == scheme.dims["blocks.1.q.bias"] == 0
    assert scheme.dims["blocks.1.down.weight"] == 1
    assert "blocks.1.down.bias" not in scheme.dims
    assert scheme.dims["head.weight"] == 0
    assert scheme.divisor == 4
    scheme.check(2)
    with pytest.raises(LayoutError, match=r"tp=8 does not divide num_heads of module 'blocks.0' \(4\)"):
        scheme.check(8)
    assert scheme_of(outline(Decoder), WHOLE).dims["embed.token.weight"] == 0


def test_unnamed_modules_are_classified_by_their_position() -> None:
    """Parts of a sequence make parts of a gradient; modules that compute on the whole do not."""
    scheme = scheme_of(outline(Decoder), SEQUENCE)
    assert scheme.guess("blocks.0") is Style.SUMMED
    assert scheme.guess("embed.place") is Style.REPLICATED
    assert scheme_of(outline(Decoder), WHOLE).guess("blocks.0") is Style.REPLICATED


def test_plans_that_do_not_fit_are_refused_by_name() -> None:
    """Unknown words, patterns that match nothing or overlap, modules of another kind."""
    model = outline(Decoder)
    with pytest.raises(UsageError, match=r"'blocks.\*.q': 'columns'.*the styles are 'column', 'column-gathered'"):
        scheme_of(model, {"blocks.*.q": "columns"})
    with pytest.raises(ModelError, match=r"'blocks.\*.query'.* names no module of Decoder; those that can be cut are"):
        scheme_of(model, {"blocks.*.query": "column"})
    with pytest.raises(ModelError, match=r"'blocks.0.q' is named by two patterns of tensor=, as 'column' and 'row'"):
        scheme_of(model, {"blocks.*.q": "column", "blocks.0.?": "row"})
    with pytest.raises(ModelError, match=r"'norm' is a LayerNorm, and 'column' is for Linear and Embedding alone"):
        scheme_of(model, {"norm": "column"})
    with pytest.raises(ModelError, match=r"'blocks.0' \(Block\) is 'sequence' in tensor=, which is for single layers"):
        scheme_of(model, {"blocks.0": "sequence"})
    with pytest.raises(LayoutError, match=r"tp=2 needs to know how layers are cut"):
        take(model, None, 2)
    assert take(model, None, 1) is None


class Foreign(nn.Module):
    """Describes itself like Hugging Face's models."""

    def __init__(self, word: str = "colwise") -> None:
        super().__init__()
        self.base_model_prefix, self._tp_plan = "model", {"lm_head": "colwise_gather_output"}
        self.config = nn.Module()
        self.config.base_model_tp_plan = {"layers.*.up": word, "layers.*.down": "rowwise", "embed": "embedding_rowwise"}
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}) for _ in range(2)
        )
        self.lm_head = nn.Linear(4, 6)


def test_a_models_own_plan_is_translated() -> None:
    """Patterns of the base model get its prefix, also below a wrapper; those that match nothing are left out."""
    assert own_plan(Foreign()) == {
        "lm_head": "column-gathered",
        "model.layers.*.up": "column",
        "model.layers.*.down": "row",
    }
    assert "0.model.layers.*.up" in own_plan(nn.Sequential(Foreign()))
    scheme = take(Foreign(), "auto", 2)
    assert scheme is not None
    assert scheme.divisor == 2
    with pytest.raises(ModelError, match=r"of Foreign has 'moe' for 'model.layers.\*.up', which is not supported"):
        own_plan(Foreign("moe"))
    with pytest.raises(ModelError, match="Decoder has none"):
        own_plan(Decoder())


def test_stages_send_their_part_of_the_sequence() -> None:
    """A sequence that cannot be cut evenly is refused."""
    scheme = scheme_of(outline(Decoder), SEQUENCE)
    assert boundary(torch.empty(2, 6, 16, device="meta"), scheme, 2).shape == (2, 3, 16)
    assert boundary(torch.empty(2, 6, 16, device="meta"), scheme_of(outline(Decoder), WHOLE), 2).shape == (2, 6, 16)
    with pytest.raises(ModelError, match=r"shape \(2, 5, 16\), of which tp=2 cannot cut dim 1"):
        boundary(torch.empty(2, 5, 16, device="meta"), scheme, 2)


def test_rows_that_are_cut_have_a_place_for_each_rank() -> None:
    """Cut along dim 0 a row is whole on one rank; along another it has as many parts as ranks."""
    assert places([("a", 3), ("b", 4), ("c", 5)], {"a": 1, "b": 0}, 2) == (("a", 6), ("b", 4), ("c", 5))


class Fused(Block):
    """Computes queries, keys and values in one layer, one after the other in its output."""

    def __init__(self, width: int, heads: int, *, by_head: bool = False) -> None:
        super().__init__(width, heads, 0.0)
        self.qkv, self.by_head = nn.Linear(width, 3 * width), by_head
        del self.q, self.k, self.v

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.qkv(self.norm1(x))
        if self.by_head:
            q, k, v = made.view(*x.shape[:2], -1, 3 * self.size).transpose(1, 2).chunk(3, dim=-1)
        else:
            q, k, v = (self._heads(one) for one in made.chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Counted(Block):
    """Makes as many heads from a part of the features as from all of them."""

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], self.num_heads, -1).transpose(1, 2)


class Sized(Block):
    """Takes its sizes from the whole layer."""

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], self.num_heads, self.size).transpose(1, 2)


CUTS = {"blocks.*.out": "row", "blocks.*.up": "column", "blocks.*.down": "row"}
APART = {**CUTS, "blocks.*.[qkv]": "column"}
TOGETHER = {**CUTS, "blocks.*.qkv": "column"}


def proved(block: Callable[[], nn.Module], plan: Mapping[str, str]) -> None:
    def build() -> nn.Module:
        model = Decoder(0.1)
        model.blocks = nn.ModuleList(block() for _ in range(2))
        return model

    model = outline(build)
    example = torch.zeros(3, LENGTH, dtype=torch.int64)
    assert prove(model, "blocks", example, scheme_of(model, plan)) == ("blocks.0",)


@pytest.mark.parametrize("plan", [WHOLE, SEQUENCE, APART])
def test_a_block_that_can_be_computed_in_parts_is_proved(plan: Mapping[str, str]) -> None:
    """With norms of heads, biases, and activations cut along the sequence elsewhere."""
    proved(lambda: Block(16, 4, 0.5), plan)


def test_a_fused_qkv_layer_is_refused_unless_its_heads_stay_whole() -> None:
    """Shapes fit either way: cut in two, one part has queries and half the keys, the other the rest."""
    with pytest.raises(ModelError, match=r"block 'blocks.0' gives another result when it is computed in 2 parts"):
        proved(lambda: Fused(16, 4), TOGETHER)
    proved(lambda: Fused(16, 4, by_head=True), TOGETHER)


def test_views_with_a_fixed_number_of_heads_are_refused() -> None:
    """With half the features the heads would be smaller; if their size is fixed too, nothing fits."""

    def counted() -> nn.Module:
        block = Counted(16, 4, 0.0)
        block.q_norm = nn.Identity()
        return block

    with pytest.raises(ModelError, match=r"block 'blocks.0' gives another result.*not by their number"):
        proved(counted, APART)
    with pytest.raises(ModelError, match=r"block 'blocks.0' cannot be computed in 2 parts.*not by their number"):
        proved(lambda: Sized(16, 4, 0.0), APART)


def test_a_rowwise_layer_without_its_colwise_layer_is_refused() -> None:
    """It would get all features where it has weights for a part."""
    with pytest.raises(ModelError, match=r"cannot be computed in 2 parts, as tensor= has it for 'down'"):
        proved(lambda: Block(16, 4, 0.0), {"blocks.*.down": "row"})
    proved(lambda: Block(16, 4, 0.0), {"blocks.*.down": "row-split"})
    proved(lambda: Block(16, 4, 0.0), {"blocks.*.down": "column-gathered"})
