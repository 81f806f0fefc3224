"""One forward pass over rows of different lengths: token ids, positions and masks in, logits out.

To the model, a prefill chunk and a row's last token with its draft are the same: new tokens after those the
row already has, first those that are certain, then a tree of guesses. Knows the model and the cache. Does not
know requests.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from local_backend.caching.kv_cache import RaggedKVCache
from local_backend.drafting.draft import EMPTY_DRAFT, Draft
from local_backend.kernels.graphs import AS_THEY_ARE, COLUMN_STEP, Execution, ForwardInputs, GraphedForwards
from local_backend.kernels.llama_forward import LlamaForward
from local_backend.kernels.prepacked import prepacked_products
from local_backend.models.architecture import Architecture, cache_argument

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Decode forwards are padded to one of these widths, and beyond to multiples of the last: preparing kernels
# for a new shape takes longer than computing the padding.
_WIDTHS = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64)
_CPU = torch.device("cpu")


def padded_width(width: int) -> int:
    """The padded width of a forward that decodes ``width`` tokens per row."""
    if width > _WIDTHS[-1]:
        return -(-width // _WIDTHS[-1]) * _WIDTHS[-1]
    return _WIDTHS[bisect_left(_WIDTHS, width)]


def widest_within(num_tokens: int) -> int:
    """The largest padded width of at most ``num_tokens`` columns, where ``num_tokens`` is at least 1."""
    if num_tokens > _WIDTHS[-1]:
        return num_tokens // _WIDTHS[-1] * _WIDTHS[-1]
    return _WIDTHS[bisect_right(_WIDTHS, num_tokens) - 1]


def decode_width(num_unread: Sequence[int], drafts: Sequence[Draft]) -> int:
    """Columns of a forward that reads ``num_unread`` tokens of each row and then verifies its draft."""
    width = max(count + len(draft) for count, draft in zip(num_unread, drafts, strict=True))
    return padded_width(width) if max(num_unread) == 1 else width  # prompts rarely share a width anyway


class ModelRunner:
    """Runs a model, in evaluation mode, on consecutive rows of its cache."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: RaggedKVCache,
        architecture: Architecture,
        execution: Execution = AS_THEY_ARE,
    ) -> None:
        self._model = model
        self._cache = cache
        self._masks = MaskRules(architecture.windows, architecture.mask_dtype)
        self._device = architecture.device
        self._keeps_logits = architecture.keeps_logits
        self._fused = LlamaForward.of(model, is_compiled=execution.is_compiled)
        self._may_share = architecture.device.type == "cpu" and not (
            execution.is_compiled or any(architecture.windows.values())
        )
        self.graphed: GraphedForwards | None = None  # records decode forwards, if they are replayed
        if execution.with_graphs:
            self.graphed = GraphedForwards(self._forward, cache, architecture.device)

    @torch.inference_mode()
    def __call__(
        self,
        first_row: int,
        unread: Sequence[Sequence[int]],
        drafts: Sequence[Draft],
        *,
        with_logits: bool = True,
        num_shared: int = 0,
    ) -> Tensor | None:
        """Run the unread tokens and draft of each row from ``first_row`` on; commits nothing.

        Args:
            first_row: Slot of the first row.
            unread: The next tokens of each row, at least one.
            drafts: One for each row, rooted at the last of them.
            with_logits: Whether to compute logits; prefill does not need them.
            num_shared: First tokens that all these rows have in common.

        Returns:
            Logits ``[rows, 1 + longest draft or more, vocabulary]``, at each row's last unread token and at
            every node of its draft; beyond a draft they mean nothing.
        """
        fused = self._fused if self._fused is not None and self._fused.is_intact() else None
        is_decode = with_logits and not first_row and max(map(len, unread)) == 1
        if self.graphed is not None and is_decode and fused is self._fused:
            return self._replay(self.graphed, unread, drafts)
        num_rows = len(unread)
        num_unread = [len(tokens) for tokens in unread]
        fewest = min(num_unread)
        num_new = decode_width(num_unread, drafts) if with_logits else max(num_unread)
        lengths = self._cache.lengths[first_row : first_row + num_rows]
        is_compiled = fused is not None and fused.is_compiled
        num_columns = self._cache.begin_forward(first_row, num_rows, num_new, indexed=is_compiled)
        input_ids = _input_ids(unread, drafts, num_new).to(self._device)
        tree = TreeShape.of(lengths, num_unread, drafts, num_new)
        first_logits = fewest - 1 if with_logits else None
        if fused is not None:
            is_causal = self._masks.are_needless(tree, lengths) and not (is_compiled and num_new == 1)
            logits = fused(
                input_ids,
                tree.positions.to(self._device),
                None if is_causal else self._masks.build(tree, num_columns, self._device),
                self._cache,
                first_logits=first_logits,
                num_shared=num_shared if self._may_share else 0,
            )
        else:
            logits = self._call_model(input_ids, tree, num_columns, first_logits)
        if logits is None or max(num_unread) == fewest:
            return logits
        # Align rows whose drafts begin at different columns: all begin at the first column.
        column = torch.tensor(num_unread)[:, None] - fewest + torch.arange(1 + max(map(len, drafts)))
        row = torch.arange(num_rows)[:, None]
        return logits[row.to(logits.device), column.clamp(max=logits.shape[1] - 1).to(logits.device)]

    def _call_model(
        self, input_ids: Tensor, tree: TreeShape, num_columns: int, first_logits: int | None
    ) -> Tensor | None:
        """The model's own forward; arguments as for :class:`LlamaForward`."""
        wanted = {}
        if first_logits and self._keeps_logits:
            wanted["logits_to_keep"] = input_ids.shape[1] - first_logits
        module = self._model if first_logits is not None else self._model.base_model
        masks = self._masks.build(tree, num_columns, self._device)
        with prepacked_products():
            output = self._output(module, input_ids, tree.positions.to(self._device), masks, **wanted)
        if first_logits is None:
            return None
        logits: Tensor = output.logits[:, 0 if wanted else first_logits :]
        return logits

    def _output(self, module: Any, input_ids: Tensor, positions: Tensor, masks: Any, **options: int) -> Any:
        return module(
            input_ids=input_ids,
            position_ids=positions,
            attention_mask=masks,
            use_cache=True,
            **{cache_argument(module): self._cache},
            **options,
        )

    def _replay(
        self, graphed: GraphedForwards, unread: Sequence[Sequence[int]], drafts: Sequence[Draft]
    ) -> Tensor:
        """A forward of one unread token and a draft for each row from the first on."""
        num_rows, num_new = len(unread), decode_width([1] * len(unread), drafts)
        lengths = self._cache.begin_padded_forward(num_rows, num_new, COLUMN_STEP)
        num_padding = len(lengths) - num_rows
        unread, drafts = [*unread, *[[0]] * num_padding], [*drafts, *[EMPTY_DRAFT] * num_padding]
        tree = TreeShape.of(lengths, [1] * len(lengths), drafts, num_new)
        inputs = ForwardInputs(
            input_ids=_input_ids(unread, drafts, num_new),
            positions=tree.positions,
            masks=self._masks.build(tree, self._cache.num_attended),
            row_index=torch.arange(len(lengths))[:, None],
            column_index=torch.tensor(lengths)[:, None] + torch.arange(num_new),
        )
        return graphed(inputs)[:num_rows]

    def _forward(self, inputs: ForwardInputs) -> Tensor:
        self._cache.write_at(inputs.row_index, inputs.column_index)
        if self._fused is not None:
            logits = self._fused(
                inputs.input_ids, inputs.positions, inputs.masks, self._cache, first_logits=0
            )
        else:
            logits = self._output(self._model, inputs.input_ids, inputs.positions, inputs.masks).logits
        assert logits is not None
        return logits


def _input_ids(unread: Sequence[Sequence[int]], drafts: Sequence[Draft], num_new: int) -> Tensor:
    """``[rows, new]``: each row's unread tokens, its draft and padding."""
    return torch.tensor(
        [
            [*tokens, *draft.token_ids] + [tokens[0]] * (num_new - len(tokens) - len(draft))
            for tokens, draft in zip(unread, drafts, strict=True)
        ]
    )


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Positions of the new tokens, and which of them attend to each other.

    Attributes:
        lengths: Tokens each row had before, ``[rows]``.
        positions: ``[rows, new]``.
        ancestors: Whether a new token (second axis) attends to another (third axis), ``[rows, new, new]``;
            ``None`` if all drafts are chains, so that each token attends to those before it.
    """

    lengths: Tensor
    positions: Tensor
    ancestors: Tensor | None

    @classmethod
    def of(
        cls, lengths: Sequence[int], num_unread: Sequence[int], drafts: Sequence[Draft], num_new: int
    ) -> TreeShape:
        """The shape of ``drafts``, each after ``num_unread`` new tokens of a row of ``lengths`` tokens."""
        length = torch.tensor(lengths)
        # Padding after a draft gets the last position of the draft: the model may have no further ones.
        last = torch.tensor([count - 1 + len(draft) for count, draft in zip(num_unread, drafts, strict=True)])
        depth = torch.arange(num_new).minimum(last[:, None])  # [rows, new]
        if all(draft.is_chain for draft in drafts):
            return cls(length, length[:, None] + depth, None)
        # Through numpy: torch takes ten times as long to write single rows.
        ancestors = np.tile(np.tri(num_new, dtype=bool), (len(drafts), 1, 1))
        for row, (count, draft) in enumerate(zip(num_unread, drafts, strict=True)):
            if draft.is_chain:
                continue
            root = count - 1  # the column of the draft's root
            depths = draft.depths()
            depth[row, count:] = root + max(depths)
            depth[row, count : count + len(draft)] = torch.tensor(depths) + root
            seen = ancestors[row]
            seen[count:, count:] = np.eye(num_new - count, dtype=bool)
            for column, parent in enumerate(draft.parents, count):
                seen[column] |= seen[parent + count]
        return cls(length, length[:, None] + depth, torch.from_numpy(ancestors))


class MaskRules:
    """Builds attention masks in the form the model takes; see :class:`Architecture`."""

    def __init__(self, windows: Mapping[str, int | None], dtype: torch.dtype) -> None:
        self._windows = windows
        self._dtype = dtype

    def are_needless(self, tree: TreeShape, lengths: Sequence[int]) -> bool:
        """Whether a causal kernel, or none for a single token, attends to the same columns."""
        is_plain = tree.ancestors is None and not any(self._windows.values())
        return is_plain and len({*lengths}) == 1 and (tree.positions.shape[1] == 1 or lengths[0] == 0)

    def build(
        self, tree: TreeShape, num_columns: int, device: torch.device = _CPU
    ) -> Tensor | dict[str, Tensor]:
        """Masks ``[rows, 1, new, columns]``; a dict by kind of layer if there are several kinds."""
        # Made where they are read: a mask of a long prompt has millions of elements.
        ancestors = None if tree.ancestors is None else tree.ancestors.to(device)
        tree = TreeShape(tree.lengths.to(device), tree.positions.to(device), ancestors)
        column = torch.arange(num_columns, device=device)
        num_new = tree.positions.shape[1]
        if tree.ancestors is None:
            seen = column <= tree.positions[:, :, None]  # [rows, new, columns]
        else:
            seen = (column < tree.lengths[:, None, None]).expand(-1, num_new, -1).clone()
            for row, length in enumerate(tree.lengths.tolist()):
                seen[row, :, length : length + num_new] = tree.ancestors[row]
        by_kind = {}
        for kind, window in self._windows.items():
            by_kind[kind] = seen
            if window is not None:
                distance = tree.positions[:, :, None] - self._column_positions(tree, column)
                by_kind[kind] = seen & (distance < window)
        return make_masks(by_kind, self._dtype)

    @staticmethod
    def _column_positions(tree: TreeShape, column: Tensor) -> Tensor:
        """Position of the token in each column, ``[rows, 1, columns]``; in a tree the two differ."""
        positions = column.repeat(len(tree.lengths), 1)
        if tree.ancestors is not None:
            columns = tree.lengths[:, None] + torch.arange(tree.positions.shape[1], device=column.device)
            positions.scatter_(1, columns, tree.positions)
        return positions[:, None]


def make_masks(seen: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """Masks ``[rows, 1, new, columns]`` of what new tokens see; a dict if kinds of layers differ."""
    masks = {}
    for kind, each in seen.items():
        mask = each
        if dtype != torch.bool:
            mask = torch.zeros_like(each, dtype=dtype).masked_fill_(~each, torch.finfo(dtype).min)
        masks[kind] = mask[:, None]
    return masks if len(masks) > 1 else next(iter(masks.values()))
