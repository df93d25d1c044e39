"""Shapes of well-known models, and what can be computed from a shape alone: parameters, FLOPs, activation bytes.

Sizes are those of the models' own published configurations. FLOPs are counted as in Narayanan et al. 2021, "Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (arXiv 2104.04473, section 5 and appendix): a
product of (m x k) and (k x n) is 2mkn, the backward pass is twice the forward, scores are counted whole. Activations
are counted as in Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv
2205.05198, section 4), with the terms kept apart so that gated feed-forward parts and grouped heads fit in.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elastic3d.errors import UsageError


class RecomputedShare(StrEnum):
    """The part of a block's activations that is computed again in the backward pass instead of being kept."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a decoder. All counts are for one whole model.

    width: of the stream between blocks. heads, kv_heads: of queries, and of keys and values. head: width of one head, 0
    for width / heads. ffn: width of the feed-forward part, of one expert's if there are several. gated: it has a gate
    besides its two products. context: tokens of a sample. places: rows of a learned table of positions, 0 for none.
    tied: input and output share one table. experts, chosen: how many there are, and how many a token goes through.
    biases: every product has one; qkv_biases: only queries, keys and values. centred: norms have a bias besides their
    scale. dropout: masks are kept for the backward pass.
    """

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    context: int
    head: int = 0
    gated: bool = True
    places: int = 0
    tied: bool = False
    experts: int = 1
    chosen: int = 1
    biases: bool = False
    qkv_biases: bool = False
    centred: bool = False
    dropout: bool = False

    @property
    def queries(self) -> int:
        """Width of all queries of a token."""
        return self.heads * (self.head or self.width // self.heads)

    @property
    def keys(self) -> int:
        """Width of all keys of a token, and of all values."""
        return self.kv_heads * (self.head or self.width // self.heads)


def block_parameters(shape: Shape, *, chosen: bool = False) -> int:
    """Return the parameters of one block; with `chosen`, only those that a token goes through."""
    h, f = shape.width, shape.ffn
    attention = h * (shape.queries + 2 * shape.keys) + shape.queries * h
    if shape.biases or shape.qkv_biases:
        attention += shape.queries + 2 * shape.keys
    if shape.biases:
        attention += h
    expert = (3 if shape.gated else 2) * h * f + ((f * (2 if shape.gated else 1) + h) if shape.biases else 0)
    router = h * shape.experts if shape.experts > 1 else 0
    return attention + (shape.chosen if chosen else shape.experts) * expert + router + 2 * _norm(shape)


def input_parameters(shape: Shape) -> int:
    """Return the parameters before the blocks: the table of tokens, and that of places."""
    return (shape.vocabulary + shape.places) * shape.width


def output_parameters(shape: Shape) -> int:
    """Return the parameters after the blocks: the last norm, and the output table if it is not the input's."""
    return _norm(shape) + (0 if shape.tied else shape.vocabulary * shape.width)


def parameters(shape: Shape) -> int:
    """Return the number of parameters, a tied table counted once."""
    return shape.layers * block_parameters(shape) + input_parameters(shape) + output_parameters(shape)


def chosen_parameters(shape: Shape) -> int:
    """Return the number of parameters that one token goes through; all of them if there are no experts."""
    outside = input_parameters(shape) + output_parameters(shape)
    return shape.layers * block_parameters(shape, chosen=True) + outside


def block_flops(shape: Shape) -> float:
    """Return the forward FLOPs of one block for one token of a full context."""
    h = shape.width
    products = h * (shape.queries + 2 * shape.keys) + shape.queries * h
    products += shape.chosen * (3 if shape.gated else 2) * h * shape.ffn
    products += h * shape.experts if shape.experts > 1 else 0
    return 2.0 * products + score_flops(shape)


def score_flops(shape: Shape) -> float:
    """Return the forward FLOPs of one block's scores and their sum over values, for one token of a full context."""
    return 4.0 * shape.context * shape.queries


def output_flops(shape: Shape) -> float:
    """Return the forward FLOPs of the output table for one token."""
    return 2.0 * shape.vocabulary * shape.width


def flops_per_token(shape: Shape, recompute: RecomputedShare = RecomputedShare.NONE) -> float:
    """Return the FLOPs of a forward and a backward pass over one token, recomputation included."""
    again = {
        RecomputedShare.NONE: 0.0,
        RecomputedShare.SELECTIVE: score_flops(shape),
        RecomputedShare.FULL: block_flops(shape),
    }[recompute]
    return shape.layers * (3.0 * block_flops(shape) + again) + 3.0 * output_flops(shape)


def activation_bytes(
    shape: Shape,
    *,
    recompute: RecomputedShare = RecomputedShare.NONE,
    tp: int = 1,
    sequence: bool = True,
    itemsize: int = 2,
    fused: bool = True,
    samples: int = 1,
) -> float:
    """Return the bytes that one block keeps for its backward pass, of `samples` samples, on each of `tp` ranks.

    sequence: whatever tp does not cut by heads or columns is cut along the sequence (sequence parallel). fused: scores
    are never stored, as in flash attention. With recompute "full" only the block's input is kept; with "selective" all
    but the scores, which fused attention never keeps.
    """
    h, q, k, f = shape.width, shape.queries, shape.keys, shape.ffn
    tokens = shape.context * samples
    rest = tp if sequence else 1
    if recompute is RecomputedShare.FULL:
        return tokens * itemsize * h / rest
    mask = 1 if shape.dropout else 0
    # Inputs of the two norms, of the first products of attention and of the feed-forward part, and two masks.
    whole = 4 * itemsize * h + 2 * mask * h
    # Queries, keys, values, the input of the output product; then the feed-forward part's results.
    cut = itemsize * (2 * q + 2 * k) + shape.chosen * (4 if shape.gated else 2) * itemsize * f
    if shape.experts > 1:
        whole += shape.chosen * itemsize * h + 4 * shape.experts
    if fused:
        cut += 4 * shape.heads
    elif recompute is RecomputedShare.NONE:
        cut += shape.heads * shape.context * (itemsize + (itemsize + 1) * mask)
    return tokens * (whole / rest + cut / tp)


def output_bytes(shape: Shape, *, samples: int = 1, tp: int = 1) -> float:
    """Return the bytes the last stage keeps beyond its blocks: logits in fp32 and their gradient, cut over tp."""
    return 8.0 * shape.context * samples * shape.vocabulary / tp


def shape_named(name: str) -> Shape:
    """Return the shape of that name; UsageError listing the names for any other."""
    try:
        return SHAPES[name.lower()]
    except KeyError:
        raise UsageError(f"no model shape is named {name!r}; there are: {', '.join(SHAPES)}") from None


def _norm(shape: Shape) -> int:
    return (2 if shape.centred else 1) * shape.width


def _gpt(name: str, layers: int, width: int, heads: int, context: int = 1024) -> Shape:
    """GPT-2 and GPT-3: learned places, tied ends, biases, GELU of four widths (Radford 2019, Brown 2020 table 2.1)."""
    return Shape(
        name=name,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        ffn=4 * width,
        vocabulary=50257,
        context=context,
        gated=False,
        places=context,
        tied=True,
        biases=True,
        centred=True,
        dropout=True,
    )


def _llama(
    name: str,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocabulary: int,
    context: int,
    *,
    tied: bool = False,
    qkv_biases: bool = False,
    experts: int = 1,
    chosen: int = 1,
) -> Shape:
    """Llama and its kin: rotary places, RMS norms, a gated feed-forward part, no biases or few."""
    return Shape(
        name=name,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocabulary=vocabulary,
        context=context,
        tied=tied,
        qkv_biases=qkv_biases,
        experts=experts,
        chosen=chosen,
    )


_NEOX = Shape(
    name="gpt-neox-20b",
    layers=44,
    width=6144,
    heads=64,
    kv_heads=64,
    ffn=24576,
    vocabulary=50432,
    context=2048,
    gated=False,
    biases=True,
    centred=True,
)

# Contexts are those of pre-training, even if a configuration allows longer ones. GPT-3 XL and 6.7B have the head width
# 128, as the paper's table says; the table's 24 heads of XL do not fit its width, so 16 are given here.
_ALL = (
    _gpt("gpt-125m", 12, 768, 12),
    _gpt("gpt-350m", 24, 1024, 16),
    _gpt("gpt-1.3b", 24, 2048, 16, 2048),
    _gpt("gpt2-xl", 48, 1600, 25),
    _gpt("gpt-6.7b", 32, 4096, 32, 2048),
    _gpt("gpt-175b", 96, 12288, 96, 2048),
    _NEOX,
    _llama("llama-7b", 32, 4096, 32, 32, 11008, 32000, 4096),
    _llama("llama-13b", 40, 5120, 40, 40, 13824, 32000, 4096),
    _llama("llama-70b", 80, 8192, 64, 8, 28672, 32000, 4096),
    _llama("llama-3-8b", 32, 4096, 32, 8, 14336, 128256, 8192),
    _llama("llama-3-70b", 80, 8192, 64, 8, 28672, 128256, 8192),
    _llama("llama-3-405b", 126, 16384, 128, 8, 53248, 128256, 8192),
    _llama("llama-3.2-1b", 16, 2048, 32, 8, 8192, 128256, 8192, tied=True),
    _llama("qwen2-0.5b", 24, 896, 14, 2, 4864, 151936, 4096, tied=True, qkv_biases=True),
    _llama("qwen2-7b", 28, 3584, 28, 4, 18944, 152064, 4096, qkv_biases=True),
    _llama("mistral-7b", 32, 4096, 32, 8, 14336, 32000, 8192),
    _llama("mixtral-8x7b", 32, 4096, 32, 8, 14336, 32000, 8192, experts=8, chosen=2),
    _llama("mixtral-8x22b", 56, 6144, 48, 8, 16384, 32768, 8192, experts=8, chosen=2),
)
SHAPES: dict[str, Shape] = {shape.name: shape for shape in _ALL}
