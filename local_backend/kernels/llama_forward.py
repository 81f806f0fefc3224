"""The forward pass of Llama-like models in few operations.

With ``transformers``, a layer takes some hundred operations and calls a dozen modules: 11 ms on one core of a
Zen 3 for one token of 30 layers, whatever it multiplies. Here a layer takes some thirty operations and calls
no module. On a CPU its products are those of :mod:`~local_backend.kernels.prepacked`; compiled, layers that
read the same inputs share one matrix, and one compiled layer of at most fifteen kernels computes all of them,
for any number of rows and tokens. The results are those of the modules up to rounding.

Only models are taken whose modules are exactly those that are known, without hooks. This is checked at every
forward, since adapters and hooks may be added later; the model is then called as usual.

Knows the layers of Llama, Mistral, Qwen2 and Qwen3. Does not know rows or drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers.activations import SiLUActivation

from local_backend.caching.cache_layer import WrittenByIndex
from local_backend.kernels.attention import attend, attend_shared, fold_mask, is_worth_sharing
from local_backend.kernels.joined import JoinedWeights
from local_backend.kernels.prepacked import PrepackedLinear, PrepackedProduct

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from local_backend.caching.kv_cache import RaggedKVCache

_MAX_KINDS = 64  # of layers that one process compiles: of one or several rows and tokens, by model
_NUM_EXACT = 8  # logits of a token
_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")


class LlamaForward:
    """Computes what a model computes that :meth:`of` accepts."""

    def __init__(self, model: PreTrainedModel, *, is_compiled: bool) -> None:
        body: Any = model.model
        config = model.config
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        self._embed = body.embed_tokens
        self._rotary = body.rotary_emb
        self._layers = [
            _Layer.of(layer, kind, is_joined=is_compiled)
            for layer, kind in zip(body.layers[: config.num_hidden_layers], kinds, strict=False)
        ]
        self._norm = _Norm.of(body.norm)
        self._head = _Linears.of(model.lm_head)
        self.is_compiled = is_compiled
        products = [(each.qkv, each.output, each.gate_up, each.down) for each in self._layers]
        self._joined = [one.joined for of_layer in products for one in of_layer if one.joined is not None]
        modules = list(model.modules())
        self._owners = [owner for module in modules for owner in (module._modules, vars(module))]
        self._parts = [_parts(owner) for owner in self._owners]
        self._hooks = [hooks for one in modules for hooks in (one._forward_hooks, one._forward_pre_hooks)]

    @classmethod
    def of(cls, model: PreTrainedModel, *, is_compiled: bool = False) -> LlamaForward | None:
        """The forward pass of ``model``; ``None`` if it is not one of the known models.

        ``is_compiled`` compiles a layer with ``torch.compile`` at its first use, which takes seconds once:
        torch keeps what it compiled on disk. The layers then read views of joined weights.
        """
        if not _is_known(model):
            return None
        with torch.inference_mode(False):  # tensors of which the model keeps views
            forward = cls(model, is_compiled=is_compiled)
        return forward if forward.is_intact() else None

    def is_intact(self) -> bool:
        """Whether the model still has the modules and joined weights it had, and no hooks."""
        return (
            not any(self._hooks)
            and list(map(_parts, self._owners)) == self._parts
            and all(joined.is_intact() for joined in self._joined)
        )

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        masks: Tensor | Mapping[str, Tensor] | None,
        cache: RaggedKVCache,
        *,
        first_logits: int | None,
        num_shared: int = 0,
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
            num_shared: First columns that are the same in all rows, and that every new token attends to.
        """
        num_rows, num_new = input_ids.shape
        hidden = self._embed.weight.index_select(0, input_ids.flatten())  # [rows * new, size]
        cos, sin = self._rotary(hidden, positions.flatten()[None])
        hidden = hidden.float()  # what layers add up is not rounded in between
        low, high = sin[0].chunk(2, -1)
        # Cosines, and sines with which the other half of a head is multiplied.
        rope = (cos[0].unflatten(-1, (2, -1))[:, None], torch.stack((-low, high), -2)[:, None])
        by_kind = masks if isinstance(masks, Mapping) else {}
        attention: dict[str, _Attention] = {}
        num_shared = num_shared if is_worth_sharing(num_rows, num_new, num_shared) else 0
        for layer, cached in zip(self._layers, cache.row_layers, strict=True):
            if layer.kind not in attention:
                mask: Any = by_kind.get(layer.kind, masks)
                mask = None if mask is None else fold_mask(mask, layer.heads_per_group)[..., num_shared:]
                attention[layer.kind] = _Attention(
                    input_ids, mask, num_shared, is_causal=mask is None and num_new > 1
                )
            if self.is_compiled:
                shape, mask = (layer.num_groups, layer.head_size), attention[layer.kind].mask
                by_index = cached.by_index(hidden, shape, mask)
                _may_change(by_index, attention[layer.kind], (hidden, *rope))
                _compiled_layer()(layer, hidden, rope, attention[layer.kind], by_index)
            else:
                layer(hidden, rope, attention[layer.kind], cached)
        if first_logits is None:
            return None
        if first_logits:
            hidden = hidden.view(num_rows, num_new, -1)[:, first_logits:].flatten(0, 1)
        inputs = self._norm(hidden)
        logits = self._head(inputs)
        if logits.dtype != torch.float32:
            # Around 16 those of bfloat16 lie 1/8 apart and tie: the best are computed again.
            best, head = logits.topk(_NUM_EXACT, -1).indices, self._head.modules[0]
            exact = (head.weight[best].float() @ inputs.float()[:, :, None]).squeeze(-1)
            exact += 0.0 if head.bias is None else head.bias[best]
            logits = logits.float().scatter_(1, best, exact)
        return logits.view(num_rows, num_new - first_logits, -1)


def _is_known(model: PreTrainedModel) -> bool:
    name = type(model).__name__.removesuffix("ForCausalLM")
    config = model.config
    if (
        name not in _FAMILIES
        or not type(model).__module__.startswith("transformers.models.")
        or getattr(config, "hidden_act", None) != "silu"
        or getattr(config, "_attn_implementation", None) != "sdpa"
        or getattr(config, "pretraining_tp", 1) != 1
        or len({(one.device, one.dtype) for one in model.parameters()}) > 1
        or model.dtype not in _DTYPES.get(model.device.type, ())
    ):
        return False
    known = {f"{name}{part}" for part in _MODULES}
    return all(
        (type(module).__name__ in known or type(module) in _PLAIN_MODULES)
        and type(module).forward.__module__.startswith(("transformers.", "torch.nn."))
        and _parts(vars(module)) is None
        for module in model.modules()
    )


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_DTYPES = {"cpu": _FLOATS[:2], "cuda": _FLOATS}
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
        eps = torch.tensor(module.variance_epsilon, device=module.weight.device)
        return cls(module._parameters, eps, 1 / module.weight.numel())

    def __call__(self, hidden: Tensor) -> Tensor:
        weight = self.parameters["weight"]
        length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self.eps, length, length, value=self.share).rsqrt_()
        return (hidden.float() * scale).mul_(weight).to(weight.dtype)


@dataclass(slots=True)
class _Linears:
    """Linear layers that read the same inputs."""

    modules: Sequence[torch.nn.Linear]
    product: PrepackedProduct | None
    joined: JoinedWeights | None

    @classmethod
    def of(cls, *modules: torch.nn.Linear, is_joined: bool = False) -> _Linears:
        if is_joined:
            return cls(modules, None, JoinedWeights.of(modules))
        forward = vars(modules[0]).get("forward")
        product = forward.product if isinstance(forward, PrepackedLinear) else None
        return cls(modules, product if product is not None and product.is_of(modules) else None, None)

    def __call__(self, inputs: Tensor) -> Tensor:
        """``[tokens, in]`` to ``[tokens, out of all layers]``."""
        if self.joined is not None:
            return linear(inputs, self.joined.weight, self.joined.bias)
        if self.product is not None and (joined := self.product(inputs)) is not None:
            return joined
        outputs = [linear(inputs, module.weight, module.bias) for module in self.modules]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


@dataclass(slots=True)
class _Attention:
    """Attention of one forward in layers of one kind."""

    input_ids: Tensor  # [rows, new]
    mask: Tensor | None
    num_shared: int
    is_causal: bool

    def split(self, states: Tensor) -> Tensor:
        """``[tokens, heads, head size]`` to ``[rows, heads, new, head size]``."""
        return states.view(*self.input_ids.shape, *states.shape[1:]).transpose(1, 2)

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """``[rows, heads, new, head size]`` to ``[tokens, heads * head size]``."""
        if self.num_shared:
            attended = attend_shared(query, keys, values, self.mask, self.num_shared)
        else:
            attended = attend(query, keys, values, self.mask, is_causal=self.is_causal)
        return attended.reshape(self.input_ids.numel(), -1)


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
    def of(cls, layer: Any, kind: str, *, is_joined: bool) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        query_norm, key_norm = (None if norm is None else _Norm.of(norm) for norm in norms)
        return cls(
            kind,
            attention.k_proj.out_features // attention.head_dim,
            attention.q_proj.out_features // attention.k_proj.out_features,
            attention.head_dim,
            _Norm.of(layer.input_layernorm),
            _Linears.of(attention.q_proj, attention.k_proj, attention.v_proj, is_joined=is_joined),
            query_norm,
            key_norm,
            _Linears.of(attention.o_proj, is_joined=is_joined),
            _Norm.of(layer.post_attention_layernorm),
            _Linears.of(mlp.gate_proj, mlp.up_proj, is_joined=is_joined),
            _Linears.of(mlp.down_proj, is_joined=is_joined),
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


@cache
def _compiled_layer() -> Callable[..., None]:
    """One compiled layer for all: weights are inputs, and numbers of rows, tokens and columns may change."""
    options: Any = {"fullgraph": True, "recompile_limit": _MAX_KINDS}  # torch's stubs lack the second
    compiled: Callable[..., None] = torch.compile(_Layer.__call__, **options)
    return compiled


def _may_change(cached: WrittenByIndex, attention: _Attention, per_token: Sequence[Tensor]) -> None:
    """Compile for any number of rows, tokens and columns at once, not for one of them first."""
    sizes: list[tuple[Tensor, tuple[int, ...]]] = [(one, (0,)) for one in (*per_token, cached.row_index)]
    sizes += [(one, (0, 1)) for one in (attention.input_ids, cached.column_index)]
    sizes += [(one, (0, 2)) for one in (cached.keys, cached.values)]
    sizes += [] if attention.mask is None else [(attention.mask, (0, 2, 3))]
    for tensor, axes in sizes:
        torch._dynamo.maybe_mark_dynamic(tensor, axes)
