"""Makes a model's folder decode with our engine, also behind ``transformers serve``."""

from __future__ import annotations

from pathlib import Path

from local_backend.drafting import make_drafter

_FILE = '''"""Lets `generate` of this model decode in parallel; written by `local_backend`."""

try:
    from local_backend.transformers.generate import generate as parallel_generate
except ImportError as error:
    raise ImportError("this model decodes with: pip install '.[local]' in a checkout") from error


def generate(model, *arguments, **options):
    return parallel_generate(model, *arguments, **{{"drafter": {drafter!r}, **options}})
'''


def write_custom_generate(model_dir: str | Path, *, drafter: str = "combined") -> Path:
    """Make a model directory decode with our engine when it is loaded with ``trust_remote_code``.

    The folder is read by ``AutoModelForCausalLM.from_pretrained(model_dir, trust_remote_code=True)``, by
    ``transformers serve model_dir --trust-remote-code`` and by ``generate(custom_generate=model_dir,
    trust_remote_code=True)``.

    Args:
        model_dir: The folder of a model's weights.
        drafter: The drafter's name.

    Returns:
        The file written, ``custom_generate/generate.py``.

    Raises:
        FileNotFoundError: There is no model in ``model_dir``.
        ValueError: No drafter has that name.
    """
    make_drafter(drafter)
    folder = Path(model_dir).expanduser()
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"there is no model in {model_dir}: it holds no config.json")
    path = folder / "custom_generate" / "generate.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(_FILE.format(drafter=drafter), "utf-8")
    return path
