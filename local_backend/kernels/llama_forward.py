"""The forward pass of Llama-like models on a CPU, in few operations.

With ``transformers``, a layer takes some hundred operations and calls a dozen modules. On one core of a Zen 3
that is 11 ms for one token of a model of 30 layers, whatever it multiplies. Here a layer takes some thirty
operations and calls no module; its products are those of
:mod:`~local_backend.kernels.prepacked`. The results are those of the modules up to rounding.

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
from torch.nn.functional import linear, silu
from transformers.activations import SiLUActivation

from local_backend.kernels.attention import IN_PLACE, attend, fold_mask
from local_backend.kernels.prepacked import PrepackedLinear, PrepackedProduct

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from local_backend.caching.kv_cache import RaggedKVCache

_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")


class LlamaForward:
    """Computes what a model computes that :meth:`of` accepts."""

    def __init__(self, model: PreTrainedModel) -> None:
        body: Any = model.model
        config = model.config
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        self._embed = body.embed_tokens
        self._rotary = body.rotary_emb
        self._layers = [
            _Layer.of(layer, kind)
            for layer, kind in zip(body.layers[: config.num_hidden_layers], kinds, strict=False)
        ]
        self._norm = _Norm.of(body.norm)
        self._head = _Linears.of(model.lm_head)
        modules = list(model.modules())
        self._owners = [owner for module in modules for owner in (module._modules, vars(module))]
        self._parts = [_parts(owner) for owner in self._owners]
        self._hooks = [hooks for one in modules for hooks in (one._forward_hooks, one._forward_pre_hooks)]

    @classmethod
    def of(cls, model: PreTrainedModel) -> LlamaForward | None:
        """The forward pass of ``model``; ``None`` if it is not one of the known models."""
        if not _is_known(model):
            return None
        forward = cls(model)
        return forward if forward.is_intact() else None

    def is_intact(self) -> bool:
        """Whether the model still has the modules it had, and no hooks."""
        return not any(self._hooks) and list(map(_parts, self._owners)) == self._parts

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        masks: Tensor | Mapping[str, Tensor] | None,
        cache: RaggedKVCache,
        *,
        first_logits: int | None,
    ) -> Tensor | None:
        """Logits ``[rows, new - first_logits, vocabulary]``, or none; the cache writes keys and values.

        Args:
            input_ids: ``[rows, new]``, as ``positions``.
            positions: Of the new tokens.
            masks: ``[rows, 1, new, columns]``, by kind of layer if there are several; ``None`` if each token
                attends to those before it and itself, and either there is one new token in rows of equal
                length, or no row had any token.
            cache: Of the rows.
            first_logits: Compute logits from this new token on; ``None`` computes none.
        """
        num_rows, num_new = input_ids.shape
        hidden = self._embed.weight.index_select(0, input_ids.flatten())  # [rows * new, size]
        cos, sin = self._rotary(hidden, positions.flatten()[None])
        low, high = sin[0].chunk(2, -1)
        # Cosines, and sines with which the other half of a head is multiplied.
        rope = (cos[0].unflatten(-1, (2, -1))[:, None], torch.stack((-low, high), -2)[:, None])
        by_kind = masks if isinstance(masks, Mapping) else {}
        attention: dict[str, _Attention] = {}
        for layer, cached in zip(self._layers, cache.layers, strict=True):
            if layer.kind not in attention:
                mask: Any = by_kind.get(layer.kind, masks)
                mask = None if mask is None else fold_mask(mask, layer.heads_per_group)
                attention[layer.kind] = _Attention(num_rows, num_new, mask)
            layer(hidden, rope, attention[layer.kind], cached)
        if first_logits is None:
            return None
        if first_logits:
            hidden = hidden.view(num_rows, num_new, -1)[:, first_logits:].flatten(0, 1)
        return self._head(self._norm(hidden)).view(num_rows, num_new - first_logits, -1)


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
    known = {f"{name}{part}" for part in _MODULES}
    return all(
        (type(module).__name__ in known or type(module) in _PLAIN_MODULES)
        and type(module).forward.__module__.startswith(("transformers.", "torch.nn."))
        and _parts(vars(module)) is None
        for module in model.modules()
    )


_MODULES = ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
_PLAIN_MODULES = (torch.nn.Linear, torch.nn.Embedding, torch.nn.ModuleList, torch.nn.SiLU, SiLUActivation)


def _parts(owner: Mapping[str, Any]) -> Any:
    """What a forward would call: submodules, or a forward set on the module itself by other code."""
    if "_modules" not in owner:
        return dict(owner)
    forward = owner.get("forward")
    return None if isinstance(forward, PrepackedLinear) else forward


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
    def of(cls, *modules: torch.nn.Linear) -> _Linears:
        forward = vars(modules[0]).get("forward")
        product = forward.product if isinstance(forward, PrepackedLinear) else None
        return cls(modules, product if product is not None and product.is_of(modules) else None)

    def __call__(self, inputs: Tensor) -> Tensor:
        """``[tokens, in]`` to ``[tokens, out of all layers]``."""
        if self.product is not None and (joined := self.product(inputs)) is not None:
            return joined
        outputs = [linear(inputs, module.weight, module.bias) for module in self.modules]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


@dataclass(slots=True)
class _Attention:
    """Attention of one forward in layers of one kind."""

    num_rows: int
    num_new: int
    mask: Tensor | None

    def split(self, states: Tensor) -> Tensor:
        """``[tokens, heads, head size]`` to ``[rows, heads, new, head size]``."""
        return states.view(self.num_rows, self.num_new, *states.shape[1:]).transpose(1, 2)

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """``[rows, heads, new, head size]`` to ``[tokens, heads * head size]``."""
        is_causal = self.mask is None and self.num_new > 1
        attended = attend(query, keys, values, self.mask, is_causal=is_causal)
        return attended.reshape(self.num_rows * self.num_new, -1)


@dataclass(slots=True)
class _Layer:
    """One decoder layer."""

    kind: str
    num_groups: int
    heads_per_group: int
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
    def of(cls, layer: Any, kind: str) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        query_norm, key_norm = (None if norm is None else _Norm.of(norm) for norm in norms)
        return cls(
            kind,
            attention.k_proj.out_features // attention.head_dim,
            attention.q_proj.out_features // attention.k_proj.out_features,
            attention.head_dim,
            _Norm.of(layer.input_layernorm),
            _Linears.of(attention.q_proj, attention.k_proj, attention.v_proj),
            query_norm,
            key_norm,
            _Linears.of(attention.o_proj),
            _Norm.of(layer.post_attention_layernorm),
            _Linears.of(mlp.gate_proj, mlp.up_proj),
            _Linears.of(mlp.down_proj),
        )

    def __call__(
        self, hidden: Tensor, rope: tuple[Tensor, Tensor], attention: _Attention, cached: Any
    ) -> None:
        """Add the layer's output to ``hidden``, ``[tokens, size]``, in place."""
        qkv = self.qkv(self.input_norm(hidden)).view(hidden.shape[0], -1, self.head_size)
        num_groups = self.num_groups
        rotated, values = qkv[:, :-num_groups], qkv[:, -num_groups:]  # queries and keys; values
        if self.query_norm is not None and self.key_norm is not None:
            query, key = rotated[:, :-num_groups], rotated[:, -num_groups:]
            rotated = torch.cat((self.query_norm(query), self.key_norm(key)), 1)
        halves = rotated.unflatten(2, (2, -1))
        rotated = (halves * rope[0]).addcmul_(halves.flip(2), rope[1]).flatten(2)
        query, key = attention.split(rotated[:, :-num_groups]), attention.split(rotated[:, -num_groups:])
        hidden.add_(self.output(attention(query, *cached.update(key, attention.split(values)))))
        gate, up = self.gate_up(self.mlp_norm(hidden)).chunk(2, -1)
        hidden.add_(self.down(silu(gate).mul_(up)))
