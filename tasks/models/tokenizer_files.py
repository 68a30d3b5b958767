"""Whether the tokenizer's files in a model folder are there and its tokens are the model's, without transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tasks.core.files import read_json
from tasks.core.text import counted, one_line

TOKENIZER, CONFIG, TEMPLATE = "tokenizer.json", "config.json", "chat_template.jinja"
# What transformers reads a vocabulary from: without any it makes a tokenizer of no tokens.
VOCABULARIES = (TOKENIZER, "vocab.json", "vocab.txt", "tekken.json", "tokenizer.model", "spiece.model")


def check_tokenizer(folder: Path) -> None:
    """ValueError where no file has a vocabulary, or where a text may become a token that the model has no embedding of.

    A special token that no template writes is in no text: Gemma 3 1B has one for images, and no embedding of it.
    """
    if not any((folder / name).is_file() for name in VOCABULARIES):
        raise ValueError(
            f"{folder}: {TOKENIZER} is missing, so there is no tokenizer. Download the folder again, with all of its "
            f"files, or save the tokenizer beside the weights: `tokenizer.save_pretrained({str(folder)!r})`."
        )
    rows = _embedded_tokens(folder)
    if rows is None or not (folder / TOKENIZER).is_file():
        return
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception:  # the library raises nothing narrower; loading the tokenizer names what is wrong with the file
        return
    added, written = tokenizer.get_added_tokens_decoder(), _template(folder)
    others = {
        token_id: token
        for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()
        if token_id >= rows and not (token_id in added and added[token_id].special and token not in written)
    }
    if others:
        raise ValueError(
            f"{folder}: its tokenizer has {counted(len(others), 'token')} more than the model has embeddings of "
            f"({rows:,}), {one_line(repr(others[min(others)]))} the first, so a text with it cannot be played. Call "
            f"`model.resize_token_embeddings(len(tokenizer))` in transformers and save the model again."
        )


def _embedded_tokens(folder: Path) -> int | None:
    """None for an adapter, whose base says it, and where a config leaves it to its family."""
    config = _stated(folder / CONFIG)
    size = (config.get("text_config") or config).get("vocab_size")
    return size if isinstance(size, int) else None


def _template(folder: Path) -> str:
    """As text, wherever it is."""
    if (folder / TEMPLATE).is_file():
        return (folder / TEMPLATE).read_text(encoding="utf-8", errors="replace")
    return str(_stated(folder / "tokenizer_config.json").get("chat_template"))


def _stated(file: Path) -> dict[str, Any]:
    found = read_json(file) if file.is_file() else {}
    return found if isinstance(found, dict) else {}
