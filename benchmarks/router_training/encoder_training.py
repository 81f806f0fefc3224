"""Makes everything the trained router ships: ``python -m benchmarks.router_training.encoder_training``.

Trains the first five layers of all-MiniLM-L6-v2 for one epoch on the English questions, averages the weights
of several runs (arXiv 2203.05482) and keeps the changes at low rank (arXiv 2106.09685). Then trains the head.
Calibration and threshold come from questions that neither head nor encoder has seen: each fold has an encoder
of its own. Needs torch and ``transformers``; takes ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.router_training.labels import TRAINING, LabelledQuestion, read_labels
from benchmarks.router_training.training import TrainingSettings, find_fold, save_head, train
from sot_chains.router.encoder import (
    MATRICES,
    NORMS,
    NUM_LAYERS,
    WEIGHTS,
    WIDTH,
    Encoder,
    find_minilm,
    truncated_ids,
)
from sot_chains.router.trained import SHIPPED_HEAD, WORDS_HEAD, Features, is_in_latin_script

_RANK = 15


@dataclass(frozen=True)
class EncoderSettings:
    """How the encoder is trained.

    Attributes:
        seeds: Of the runs, whose weights are averaged; without any the encoder is not trained.
        learning_rate: Of the layers, at its highest; it rises and falls linearly.
        head_learning_rate: Of the classifier on top, which is not kept.
        batch_size: Questions in a step.
        smoothing: Share of a label that goes to the other one.
    """

    seeds: tuple[int, ...] = (0, 1, 2)
    learning_rate: float = 5e-5
    head_learning_rate: float = 3e-3
    batch_size: int = 16
    smoothing: float = 0.1


ONE_RUN = EncoderSettings(seeds=(0,))


class TrainableEncoder(nn.Module):
    """The encoder with a classifier on top, as torch trains it.

    Args:
        folder: Holds all-MiniLM-L6-v2.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer
        from transformers import AutoModel

        super().__init__()
        self.bert: Any = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
        self.bert.encoder.layer = self.bert.encoder.layer[:NUM_LAYERS]
        self.bert.embeddings.requires_grad_(False)  # most words occur in no question
        self.classifier = nn.Linear(WIDTH, 1)
        nn.init.zeros_(self.classifier.weight)
        self.dropout = nn.Dropout(0.1)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def token_ids(self, question: str) -> list[int]:
        """The token ids that the shipped encoder would read."""
        return truncated_ids(self._tokenizer, question)

    def forward(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """The log-odds of each question, given as token ids: ``[questions]``."""
        longest = max(map(len, rows))
        ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])  # [questions, tokens]
        mask = torch.tensor([[1.0] * len(row) + [0.0] * (longest - len(row)) for row in rows])
        states = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        scores: Tensor = self.classifier(self.dropout(mean))[:, 0]
        return scores


def train_adapter(
    questions: Sequence[LabelledQuestion], folder: Path, out: Path, settings: EncoderSettings
) -> Encoder:
    """Trains on ``questions`` and writes the changes to ``out``; returns the encoder with them."""
    from safetensors.numpy import save_file

    base, mean = TrainableEncoder(folder), TrainableEncoder(folder)
    runs = [_one_run(questions, folder, settings, seed) for seed in settings.seeds]
    if runs:
        with torch.no_grad():
            for kept, *each in zip(mean.parameters(), *(run.parameters() for run in runs), strict=True):
                kept.copy_(torch.stack(list(each)).mean(0))
    save_file(_changes(base.bert.state_dict(), mean.bert.state_dict()), out)
    return Encoder(folder, out)


def _one_run(
    questions: Sequence[LabelledQuestion], folder: Path, settings: EncoderSettings, seed: int
) -> TrainableEncoder:
    torch.manual_seed(seed)
    model = TrainableEncoder(folder).train()
    rows = [model.token_ids(question.question) for question in questions]
    labels = torch.tensor([float(question.use_sot) for question in questions])
    targets = labels * (1 - settings.smoothing) + settings.smoothing / 2
    layers = [parameter for parameter in model.bert.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": layers, "lr": settings.learning_rate},
            {"params": model.classifier.parameters(), "lr": settings.head_learning_rate},
        ],
        weight_decay=0.01,
    )
    batches = list(_batches(rows, settings.batch_size, np.random.default_rng(seed)))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(10 * (step + 1) / len(batches), 1 - step / len(batches))
    )
    for batch in batches:
        scores = model([rows[index] for index in batch])
        loss = nn.functional.binary_cross_entropy_with_logits(scores, targets[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def _batches(
    rows: Sequence[Sequence[int]], size: int, random: np.random.Generator, *, chunk: int = 256
) -> Iterator[list[int]]:
    """Indices of rows in random batches of similar length, so that little is padding."""
    order = random.permutation(len(rows)).tolist()
    chunks = [
        sorted(order[at : at + chunk], key=lambda index: len(rows[index]))
        for at in range(0, len(order), chunk)
    ]
    batches = [chunk_of[at : at + size] for chunk_of in chunks for at in range(0, len(chunk_of), size)]
    for number in random.permutation(len(batches)):
        yield batches[number]


def _changes(base: dict[str, Tensor], trained: dict[str, Tensor]) -> dict[str, NDArray[Any]]:
    """The tensors of ``adapter.safetensors``: changes of matrices at low rank, and whole vectors."""
    made: dict[str, Tensor] = {}
    for number in range(NUM_LAYERS):
        source, target = f"encoder.layer.{number}", f"layer.{number}"
        for name, parts in MATRICES.items():
            change = torch.cat(
                [trained[key] - base[key] for key in (f"{source}.{part}.weight" for part in parts)]
            )
            up, sizes, down = torch.linalg.svd(change, full_matrices=False)
            made[f"{target}.{name}.up"] = (up[:, :_RANK] * sizes[:_RANK]).half()
            made[f"{target}.{name}.down"] = down[:_RANK].half()
            bias = torch.cat([trained[f"{source}.{part}.bias"] for part in parts])
            made[f"{target}.{name}.bias"] = bias.half()
        for name, part in NORMS.items():
            for kind in ("weight", "bias"):
                made[f"{target}.{name}.{kind}"] = trained[f"{source}.{part}.{kind}"].half()
    return {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in made.items()}


def make_features(questions: Sequence[LabelledQuestion], encoder: Encoder | None) -> list[Features]:
    """The features of each question."""
    return [Features.of(question.question, encoder) for question in questions]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.router_training.encoder_training", description=__doc__
    )
    parser.add_argument("--base", type=Path, help="folder of all-MiniLM-L6-v2; by default it is looked up")
    parser.add_argument("--labels", type=Path, nargs="+", default=TRAINING, help="by default our own")
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    options = parser.parse_args()
    base = options.base or find_minilm()
    questions = read_labels(options.labels)
    english = [question for question in questions if is_in_latin_script(question.question)]
    by_fold, num_folds = [], TrainingSettings().num_folds
    with tempfile.TemporaryDirectory() as folder:
        for fold in range(num_folds):
            others = [question for question in english if find_fold(question.question, num_folds) != fold]
            adapter = Path(folder, f"{fold}.safetensors")
            by_fold.append(make_features(questions, train_adapter(others, base, adapter, ONE_RUN)))
            print(f"fold {fold} of the calibration is done", flush=True)
    encoder = train_adapter(english, base, options.out / "adapter.safetensors", EncoderSettings())
    trained = train(questions, make_features(questions, encoder), features_by_fold=by_fold)
    save_head(trained.head, options.out / SHIPPED_HEAD.name)
    save_head(train(questions, make_features(questions, None)).head, options.out / WORDS_HEAD.name)
    print(f"threshold {trained.head.threshold:.3f}")


if __name__ == "__main__":
    main()
