from __future__ import annotations

import pytest
import torch
from torch import nn

from elastic3d.errors import LayoutError, ModelError, UsageError
from elastic3d.parallel.initial import outline
from elastic3d.parallel.squares import places
from elastic3d.parallel.tensor.cutting import boundary
from elastic3d.parallel.tensor.foreign import own_plan
from elastic3d.parallel.tensor.styles import Style, scheme_of
from elastic3d.parallel.tensor.taking import take
from tests.parallel.tensors import SEQUENCE, WHOLE, Decoder


def test_a_plan_says_what_is_cut_and_by_what() -> None:
    """On the outline of a model: dims of parameters, and what tp must divide."""
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


def test_what_no_pattern_names_is_guessed_from_where_it_is() -> None:
    """Parts of a sequence make parts of a gradient; what computes on the whole does not."""
    scheme = scheme_of(outline(Decoder), SEQUENCE)
    assert scheme.guess("blocks.0") is Style.SUMMED
    assert scheme.guess("embed.place") is Style.REPLICATED
    assert scheme_of(outline(Decoder), WHOLE).guess("blocks.0") is Style.REPLICATED


def test_plans_that_do_not_fit_are_refused_by_name() -> None:
    """Unknown words, patterns that name nothing or twice, modules of another kind."""
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
    """Says of itself what Hugging Face's models say."""

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
    """Patterns of the base model get its prefix, also below a wrapper; those that name nothing are left out."""
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


def test_stages_hand_on_parts_of_the_sequence() -> None:
    """What a stage sends is as long as its part; a sequence that cannot be cut evenly is refused."""
    scheme = scheme_of(outline(Decoder), SEQUENCE)
    assert boundary(torch.empty(2, 6, 16, device="meta"), scheme, 2).shape == (2, 3, 16)
    assert boundary(torch.empty(2, 6, 16, device="meta"), scheme_of(outline(Decoder), WHOLE), 2).shape == (2, 6, 16)
    with pytest.raises(ModelError, match=r"shape \(2, 5, 16\), of which tp=2 cannot cut dim 1"):
        boundary(torch.empty(2, 5, 16, device="meta"), scheme, 2)


def test_rows_that_are_cut_have_a_place_for_each_rank() -> None:
    """Cut along dim 0 a row is whole on one rank; along another it has as many parts as ranks."""
    assert places([("a", 3), ("b", 4), ("c", 5)], {"a": 1, "b": 0}, 2) == (("a", 6), ("b", 4), ("c", 5))
