"""The forward pass of Llama-like models on a CPU, in few operations.

With ``transformers``, a layer takes some hundred operations and calls a dozen modules. On one core of a Zen 3
that is 11 ms for one token of a model of 30 layers, whatever it multiplies. Here a layer takes some thirty
operations and calls no module; its products are those of
:mod:`~local_backend.kernels.prepacked_linear`. The results are those of the modules up to rounding.

Only models are taken whose modules are exactly those that are known, without hooks. This is checked at every
forward, since adapters and hooks may be added later; the model is then called as usual.

Knows the layers of Llama, Mistral, Qwen2 and Qwen3. Does not know rows or drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from transformers.activations import SiLUActivation

from local_backend.kernels.block_attention import block_attention, is_faster_in_blocks
from local_backend.kernels.grouped_attention import MOST_FOLDED_TOKENS
from local_backend.kernels.grouped_attention import NAME as IN_PLACE
from local_backend.kernels.prepacked_linear import PrepackedLinear, PrepackedProduct

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from local_backend.caching.kv_cache import RaggedKVCache

_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")


class LlamaForward:
    """Computes what the model computes.

    Args:
        model: One that :meth:`of` accepts.
        is_prepacked: Whether prepared layers multiply with prepacked weights.
    """

    def __init__(self, model: PreTrainedModel, *, is_prepacked: bool = True) -> None:
        body: Any = model.model
        config = model.config
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        self._embed = body.embed_tokens
        self._rotary = body.rotary_emb
        self._layers = [
            _Layer.of(layer, kind, is_prepacked)
            for layer, kind in zip(body.layers[: config.num_hidden_layers], kinds, strict=False)
        ]
        self._norm = _Norm.of(body.norm)
        self._head = _Linears.of([model.lm_head], is_prepacked)
        self._num_heads = config.num_attention_heads
        self._head_size = self._layers[0].head_size
        modules = list(model.modules())
        self._owners = [owner for module in modules for owner in (module._modules, vars(module))]
        self._parts = [_parts_of(owner) for owner in self._owners]
        self._hooks = [hooks for module in modules for hooks in _hooks_of(module)]

    @classmethod
    def of(cls, model: PreTrainedModel, *, is_prepacked: bool = True) -> LlamaForward | None:
        """The forward pass of ``model``; ``None`` if it is not one of the known models."""
        if not _is_known(model):
            return None
        forward = cls(model, is_prepacked=is_prepacked)
        return forward if forward.is_intact() else None

    def is_intact(self) -> bool:
        """Whether the model still has the modules it had, and no hooks."""
        return not any(self._hooks) and list(map(_parts_of, self._owners)) == self._parts

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        masks: Tensor | Mapping[str, Tensor] | None,
        cache: RaggedKVCache,
        *,
        first_logits: int | None,
    ) -> Tensor | None:
        """One forward; the cache writes its keys and values.

        Args:
            input_ids: ``[rows, new]``.
            positions: ``[rows, new]``.
            masks: ``[rows, 1, new, columns]``, by kind of layer if there are several; ``None`` if each token
                attends to those before it and itself, and either there is one new token in rows of equal
                length, or no row had any token.
            cache: Of the rows.
            first_logits: Compute logits from this new token on; ``None`` computes none.

        Returns:
            Logits ``[rows, new - first_logits, vocabulary]``.
        """
        num_rows, num_new = input_ids.shape
        hidden = _embedded(self._embed, input_ids.flatten())  # [rows * new, size]
        cos, sin = self._rotary(hidden, positions.flatten()[None])
        half = self._head_size // 2
        rope = (cos[0].view(-1, 1, 2, half), _signed(sin[0]).view(-1, 1, 2, half))
        shape = (num_rows, num_new, self._num_heads, self._head_size)
        by_kind = masks if isinstance(masks, Mapping) else {}
        attends: dict[str, _Attention] = {}
        for layer, cached in zip(self._layers, cache.layers, strict=True):
            if (attend := attends.get(layer.kind)) is None:
                mask = by_kind.get(layer.kind, masks)
                attend = attends[layer.kind] = _Attention(shape, layer.num_groups, mask)  # type: ignore[arg-type]
            layer(hidden, rope, attend, cached)
        if first_logits is None:
            return None
        if first_logits:
            hidden = hidden.view(num_rows, num_new, -1)[:, first_logits:].flatten(0, 1)
        return self._head(self._norm(hidden)).view(num_rows, num_new - first_logits, -1)


def _embedded(module: torch.nn.Embedding, token_ids: Tensor) -> Tensor:
    """Rows of the embedding's weights, ``[tokens, size]``."""
    return module.weight.index_select(0, token_ids)


def _is_known(model: PreTrainedModel) -> bool:
    name = type(model).__name__.removesuffix("ForCausalLM")
    config = model.config
    if (
        name not in _FAMILIES
        or not type(model).__module__.startswith("transformers.models.")
        or getattr(config, "hidden_act", None) != "silu"
        or getattr(config, "_attn_implementation", None) not in ("sdpa", IN_PLACE)
        or getattr(config, "pretraining_tp", 1) != 1
        or {(one.device.type, one.dtype) for one in model.parameters()}
        not in ({("cpu", torch.float32)}, {("cpu", torch.bfloat16)})
    ):
        return False
    known = {f"{name}{part}" for part in _PARTS}
    return all(
        (type(module).__name__ in known or type(module) in _PLAIN_MODULES)
        and type(module).forward.__module__.startswith(("transformers.", "torch.nn."))
        and _parts_of(vars(module)) is None
        for module in model.modules()
    )


_PARTS = ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
_PLAIN_MODULES = (torch.nn.Linear, torch.nn.Embedding, torch.nn.ModuleList, torch.nn.SiLU, SiLUActivation)


def _parts_of(owner: Mapping[str, Any]) -> Any:
    """What a forward would call: submodules, or a forward set on the module itself by other code."""
    if "_modules" not in owner:
        return dict(owner)
    forward = owner.get("forward")
    return None if isinstance(forward, PrepackedLinear) else forward


def _hooks_of(module: torch.nn.Module) -> list[Mapping[int, Any]]:
    return [module._forward_hooks, module._forward_pre_hooks]


def _signed(sin: Tensor) -> Tensor:
    """The sines with which the other half of a head is multiplied, ``[tokens, head size]``."""
    low, high = sin.chunk(2, -1)
    return torch.cat((-low, high), -1)


@dataclass(slots=True)
class _Norm:
    """Root mean square normalisation."""

    parameters: dict[str, Any]
    eps: Tensor
    share: float  # of an element in the mean

    @classmethod
    def of(cls, module: Any) -> _Norm:
        return cls(module._parameters, torch.tensor(module.variance_epsilon), 1 / module.weight.numel())

    def __call__(self, hidden: Tensor) -> Tensor:
        weight = self.parameters["weight"]
        length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self.eps, length, length, value=self.share).rsqrt_()
        if hidden.dtype == torch.float32:
            return (hidden * scale).mul_(weight)
        return (hidden.float().mul_(scale)).to(hidden.dtype).mul_(weight)


@dataclass(slots=True)
class _Linears:
    """Linear layers that read the same inputs."""

    modules: Sequence[torch.nn.Linear]
    product: PrepackedProduct | None

    @classmethod
    def of(cls, modules: Sequence[torch.nn.Linear], is_prepacked: bool) -> _Linears:
        forward = vars(modules[0]).get("forward")
        product = forward.product if isinstance(forward, PrepackedLinear) and is_prepacked else None
        if product is not None and list(map(id, product.modules)) != list(map(id, modules)):
            product = None
        return cls(modules, product)

    def __call__(self, inputs: Tensor) -> Tensor:
        """``[tokens, in]`` to ``[tokens, out of all layers]``."""
        if self.product is not None and (joined := self.product.joined(inputs)) is not None:
            return joined
        outputs = [linear(inputs, module.weight, module.bias) for module in self.modules]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


class _Attention:
    """Attention of one forward in layers of one kind.

    Args:
        shape: Rows, new tokens, heads and head size.
        num_groups: Heads of keys and values.
        mask: ``[rows, 1, new, columns]``, or ``None`` as for :class:`LlamaForward`.
    """

    def __init__(self, shape: tuple[int, int, int, int], num_groups: int, mask: Tensor | None) -> None:
        num_rows, num_new, num_heads, self._head_size = shape
        self._shape = shape
        self._num_groups = num_groups
        self._is_grouped = num_heads != num_groups
        self._is_causal = mask is None and num_new > 1
        # One head alone is enough work for the kernel if there are many new tokens.
        self._is_folded = self._is_grouped and num_new <= MOST_FOLDED_TOKENS and not self._is_causal
        self._folded = (num_rows, num_groups, num_heads // num_groups * num_new, self._head_size)
        if self._is_folded and mask is not None and num_new > 1:
            mask = mask.repeat(1, 1, num_heads // num_groups, 1)
        self._mask = mask

    def split(self, states: Tensor) -> Tensor:
        """``[tokens, heads, head size]`` to ``[rows, heads, new, head size]``."""
        num_rows, num_new, _, size = self._shape
        return states.view(num_rows, num_new, -1, size).transpose(1, 2)

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """``[tokens, heads, head size]`` to ``[tokens, heads * head size]``."""
        num_rows, num_new, num_heads, size = self._shape
        is_folded = self._is_folded
        if not is_folded:
            query = self.split(query)
        elif num_new == 1:
            query = query.view(self._folded)
        else:  # the heads of a group become further tokens: keys and values are read once
            grouped = query.view(num_rows, num_new, self._num_groups, -1, size)
            query = grouped.permute(0, 2, 3, 1, 4).reshape(self._folded)
        if is_faster_in_blocks(query):
            attended = block_attention(query, keys, values, self._mask)
        else:
            attended = scaled_dot_product_attention(
                query,
                keys,
                values,
                attn_mask=self._mask,
                is_causal=self._is_causal,
                enable_gqa=self._is_grouped and not is_folded,
            )
        if not is_folded:
            attended = attended.transpose(1, 2)
        elif num_new > 1:
            attended = attended.view(num_rows, self._num_groups, -1, num_new, size).permute(0, 3, 1, 2, 4)
        return attended.reshape(num_rows * num_new, num_heads * size)


@dataclass(slots=True)
class _Layer:
    """One decoder layer."""

    kind: str
    num_groups: int
    head_size: int
    input_norm: _Norm
    qkv: _Linears
    query_norm: _Norm | None
    key_norm: _Norm | None
    output: _Linears
    mlp_norm: _Norm
    gate_up: _Linears
    down: _Linears

    @classmethod
    def of(cls, layer: Any, kind: str, is_prepacked: bool) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        query_norm, key_norm = (None if norm is None else _Norm.of(norm) for norm in norms)
        return cls(
            kind,
            attention.k_proj.out_features // attention.head_dim,
            attention.head_dim,
            _Norm.of(layer.input_layernorm),
            _Linears.of([attention.q_proj, attention.k_proj, attention.v_proj], is_prepacked),
            query_norm,
            key_norm,
            _Linears.of([attention.o_proj], is_prepacked),
            _Norm.of(layer.post_attention_layernorm),
            _Linears.of([mlp.gate_proj, mlp.up_proj], is_prepacked),
            _Linears.of([mlp.down_proj], is_prepacked),
        )

    def __call__(self, hidden: Tensor, rope: tuple[Tensor, Tensor], attend: _Attention, cached: Any) -> None:
        """Add the layer's output to ``hidden``, ``[tokens, size]``, in place."""
        qkv = self.qkv(self.input_norm(hidden)).view(hidden.shape[0], -1, self.head_size)
        num_groups, num_heads = self.num_groups, qkv.shape[1]
        rotated = qkv[:, : num_heads - num_groups]  # queries and keys
        values = qkv[:, num_heads - num_groups :]
        if self.query_norm is not None and self.key_norm is not None:
            query, key = rotated[:, :-num_groups], rotated[:, -num_groups:]
            rotated = torch.cat((self.query_norm(query), self.key_norm(key)), 1)
        halves = rotated.unflatten(2, (2, -1))
        rotated = (halves * rope[0]).addcmul_(halves.flip(2), rope[1]).flatten(2)
        query, key = rotated[:, :-num_groups], rotated[:, -num_groups:]
        hidden.add_(self.output(attend(query, *cached.update(attend.split(key), attend.split(values)))))
        gate, up = self.gate_up(self.mlp_norm(hidden)).chunk(2, -1)
        hidden.add_(self.down(silu(gate).mul_(up)))
